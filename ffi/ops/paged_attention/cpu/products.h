// The two matrix products of host attention, blocked so that a tile's accumulators stay in registers. Compiled once per
// ISA: see ffi/host/simd.h for what may not be done here.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_CPU_PRODUCTS_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_CPU_PRODUCTS_H_

#include "ffi/host/simd.h"
#include "ffi/ops/paged_attention/cpu/tile.h"

namespace xla_gpu {
namespace XLA_GPU_SIMD_NAMESPACE {

// Register blocks are kBlockRows rows by kBlockVectors vectors: half of the registers, the rest for operands.
constexpr int kBlockRows = 4;
constexpr int kBlockVectors = kLanes == 16 ? 4 : 2;

// Terms that are summed one by one before they join the rest: the error of a long sum grows with this instead of its
// length.
constexpr int64_t kSegment = 32;

// A row's end that fills half a vector only (head_dim 8 modulo 16, 16 lanes).
XLA_GPU_INLINE bool HasHalfVector(int64_t head_dim) { return head_dim % kLanes != 0; }

// Asks for bytes [begin, end) of a row of the cache, one cache line or a few. Into the second level: rows a power of
// two apart would push each other out of the first.
XLA_GPU_INLINE void Prefetch(const void* row, int64_t begin, int64_t end) {
  for (int64_t byte = begin; byte < end; byte += 64) {
    __builtin_prefetch(static_cast<const char*>(row) + byte, /*rw=*/0, /*locality=*/2);
  }
}

// Asks for the share of a tile's kTileKeys rows that falls to block `row` of `rows`: spread over a product, the
// requests cost nothing.
template <class Stored>
XLA_GPU_INLINE void PrefetchShare(const Stored* base, const int64_t* offsets, int64_t head_dim, int64_t row,
                                  int64_t rows) {
  const int64_t end = row + kBlockRows < rows ? (row + kBlockRows) * kTileKeys / rows : kTileKeys;
  for (int64_t n = row * kTileKeys / rows; n < end; ++n) Prefetch(base + offsets[n], 0, head_dim * sizeof(Stored));
}

// ---- Scores with K as it lies in the cache -------------------------------------------------------------------------

// scores[r, n] = q[r] · k[n] for kRows rows and kLanes / kRows keys, vectorised along head_dim.
template <class Element, int kRows>
XLA_GPU_INLINE void ScoreFewRows(const float* q, int64_t q_stride, const typename Element::Stored* k,
                                 const int64_t* offsets, int64_t last_key, int64_t head_dim, float* scores) {
  constexpr int kKeys = kLanes / kRows;
  const typename Element::Stored* rows[kKeys];
  XLA_GPU_UNROLL
  for (int n = 0; n < kKeys; ++n) rows[n] = k + offsets[n < last_key ? n : last_key];
  VecF acc[kLanes] = {};
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) {
    VecF left[kRows];
    XLA_GPU_UNROLL
    for (int r = 0; r < kRows; ++r) left[r] = LoadF(q + r * q_stride + d);
    XLA_GPU_UNROLL
    for (int n = 0; n < kKeys; ++n) {
      const VecF right = Element::Load(rows[n] + d);
      XLA_GPU_UNROLL
      for (int r = 0; r < kRows; ++r) acc[r * kKeys + n] += left[r] * right;
    }
  }
  if (HasHalfVector(head_dim)) {
    XLA_GPU_UNROLL
    for (int n = 0; n < kKeys; ++n) {
      const VecF right = LoadEight<Element>(rows[n] + d);
      XLA_GPU_UNROLL
      for (int r = 0; r < kRows; ++r) acc[r * kKeys + n] += LoadF(q + r * q_stride + d) * right;
    }
  }
  float sums[kLanes];
  StoreF(sums, SumEach(acc));
  XLA_GPU_UNROLL
  for (int r = 0; r < kRows; ++r) memcpy(scores + r * kTileKeys, sums + r * kKeys, kKeys * sizeof(float));
}

template <class Element, int kRows>
XLA_GPU_INLINE void ScoreRowsOverKeys(const float* q, int64_t q_stride, const typename Element::Stored* k,
                                      const int64_t* offsets, int64_t num_keys, int64_t head_dim, float* scores,
                                      const typename Element::Stored* ahead) {
  constexpr int64_t kKeys = kLanes / kRows;
  for (int64_t n = 0; n < num_keys; n += kKeys) {
    if (ahead != nullptr) {
      for (int64_t i = n; i < n + kKeys; ++i) Prefetch(ahead + offsets[i], 0, head_dim * sizeof(*ahead));
    }
    ScoreFewRows<Element, kRows>(q, q_stride, k, offsets + n, num_keys - n - 1, head_dim, scores + n);
  }
}

// scores[rows, kTileKeys] = q[rows, head_dim] · k[num_keys, head_dim]ᵀ. Columns past num_keys are undefined. While it
// works it asks for the same rows of `ahead`; `offsets` has kTileKeys entries.
template <class Element>
void ScoreDirect(const float* q, int64_t q_stride, int64_t rows, const typename Element::Stored* k,
                 const int64_t* offsets, int64_t num_keys, int64_t head_dim, float* scores,
                 const typename Element::Stored* ahead) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    ScoreRowsOverKeys<Element, 4>(q + r * q_stride, q_stride, k, offsets, num_keys, head_dim, scores + r * kTileKeys,
                                  r == 0 ? ahead : nullptr);
  }
  if (r + 2 <= rows) {
    ScoreRowsOverKeys<Element, 2>(q + r * q_stride, q_stride, k, offsets, num_keys, head_dim, scores + r * kTileKeys,
                                  r == 0 ? ahead : nullptr);
    r += 2;
  }
  if (r < rows) {
    ScoreRowsOverKeys<Element, 1>(q + r * q_stride, q_stride, k, offsets, num_keys, head_dim, scores + r * kTileKeys,
                                  r == 0 ? ahead : nullptr);
  }
}

// ---- Scores with K rearranged --------------------------------------------------------------------------------------

// Writes k_t[AccStride(head_dim), kTileKeys], K's tile transposed and in float32, zero past num_keys.
template <class Element>
void TransposeKeys(const typename Element::Stored* k, const int64_t* offsets, int64_t num_keys, int64_t head_dim,
                   float* k_t) {
  for (int64_t n = 0; n < kTileKeys; n += kLanes) {
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      VecF square[kLanes];
      XLA_GPU_UNROLL
      for (int i = 0; i < kLanes; ++i) {
        if (n + i >= num_keys) {
          square[i] = VecF{};
        } else if (d + kLanes <= head_dim) {
          square[i] = Element::Load(k + offsets[n + i] + d);
        } else {
          square[i] = LoadEight<Element>(k + offsets[n + i] + d);
        }
      }
      Transpose(square);
      XLA_GPU_UNROLL
      for (int i = 0; i < kLanes; ++i) StoreF(k_t + (d + i) * kTileKeys + n, square[i]);
    }
  }
}

template <int kRows>
XLA_GPU_INLINE void ScoreBlock(const float* q, int64_t q_stride, const float* k_t, int64_t head_dim, float* scores) {
  for (int64_t segment = 0; segment < head_dim; segment += kSegment) {
    const int64_t end = segment + kSegment < head_dim ? segment + kSegment : head_dim;
    VecF acc[kRows][kBlockVectors] = {};
    for (int64_t d = segment; d < end; ++d) {
      VecF right[kBlockVectors];
      XLA_GPU_UNROLL
      for (int j = 0; j < kBlockVectors; ++j) right[j] = LoadF(k_t + d * kTileKeys + j * kLanes);
      XLA_GPU_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const VecF left = Broadcast(q[r * q_stride + d]);
        XLA_GPU_UNROLL
        for (int j = 0; j < kBlockVectors; ++j) acc[r][j] += left * right[j];
      }
    }
    XLA_GPU_UNROLL
    for (int r = 0; r < kRows; ++r) {
      XLA_GPU_UNROLL
      for (int j = 0; j < kBlockVectors; ++j) {
        float* const score = scores + r * kTileKeys + j * kLanes;
        StoreF(score, segment == 0 ? acc[r][j] : LoadF(score) + acc[r][j]);
      }
    }
  }
}

// scores[rows, kTileKeys] = q[rows, head_dim] · k_t[head_dim, kTileKeys], for the first kBlockRows of `rows` at most.
inline void ScoreTransposed(const float* q, int64_t q_stride, int64_t rows, const float* k_t, int64_t head_dim,
                            float* scores) {
  static_assert(kBlockRows == 4, "one case per number of rows");
  for (int64_t n = 0; n < kTileKeys; n += kBlockVectors * kLanes) {
    switch (rows) {
      case 1:
        ScoreBlock<1>(q, q_stride, k_t + n, head_dim, scores + n);
        break;
      case 2:
        ScoreBlock<2>(q, q_stride, k_t + n, head_dim, scores + n);
        break;
      case 3:
        ScoreBlock<3>(q, q_stride, k_t + n, head_dim, scores + n);
        break;
      default:
        ScoreBlock<4>(q, q_stride, k_t + n, head_dim, scores + n);
    }
  }
}

// ---- Weighted sums of V --------------------------------------------------------------------------------------------

// Rows of the cache that are needed next, prefetched while others are summed.
template <class Element>
struct Ahead {
  const typename Element::Stored* base;  // null: none
  const int64_t* offsets;                // [kTileKeys]
};

template <class Element, int kRows, int kVectors, bool kHalf, bool kAhead>
XLA_GPU_INLINE void AddValuesBlock(const float* weights, const typename Element::Stored* v, const int64_t* offsets,
                                   int64_t num_keys, float* acc, int64_t acc_stride, const Ahead<Element>& ahead,
                                   int64_t d) {
  constexpr int64_t kBytes = kVectors * kLanes * sizeof(typename Element::Stored);
  VecF sum[kRows][kVectors] = {};
  for (int64_t n = 0; n < num_keys; ++n) {
    const typename Element::Stored* const row = v + offsets[n];
    if (kAhead) Prefetch(ahead.base + ahead.offsets[n] + d, 0, kBytes);
    VecF right[kVectors];
    XLA_GPU_UNROLL
    for (int j = 0; j < kVectors; ++j) right[j] = kHalf ? LoadEight<Element>(row) : Element::Load(row + j * kLanes);
    XLA_GPU_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const VecF left = Broadcast(weights[r * kTileKeys + n]);
      XLA_GPU_UNROLL
      for (int j = 0; j < kVectors; ++j) sum[r][j] += left * right[j];
    }
  }
  XLA_GPU_UNROLL
  for (int r = 0; r < kRows; ++r) {
    XLA_GPU_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      float* const to = acc + r * acc_stride + j * kLanes;
      StoreF(to, LoadF(to) + sum[r][j]);
    }
  }
}

template <class Element, int kRows, bool kAhead>
void AddValuesRows(const float* weights, const typename Element::Stored* v, const int64_t* offsets, int64_t num_keys,
                   int64_t head_dim, float* acc, int64_t acc_stride, const Ahead<Element>& ahead) {
  int64_t d = 0;
  for (; d + kBlockVectors * kLanes <= head_dim; d += kBlockVectors * kLanes) {
    AddValuesBlock<Element, kRows, kBlockVectors, false, kAhead>(weights, v + d, offsets, num_keys, acc + d, acc_stride,
                                                                 ahead, d);
  }
  for (; d + kLanes <= head_dim; d += kLanes) {
    AddValuesBlock<Element, kRows, 1, false, kAhead>(weights, v + d, offsets, num_keys, acc + d, acc_stride, ahead, d);
  }
  if (HasHalfVector(head_dim)) {
    AddValuesBlock<Element, kRows, 1, true, kAhead>(weights, v + d, offsets, num_keys, acc + d, acc_stride, ahead, d);
  }
}

template <class Element, bool kAhead>
XLA_GPU_INLINE void AddValuesOfUpTo4Rows(const float* weights, int64_t rows, const typename Element::Stored* v,
                                         const int64_t* offsets, int64_t num_keys, int64_t head_dim, float* acc,
                                         int64_t acc_stride, const Ahead<Element>& ahead) {
  static_assert(kBlockRows == 4, "one case per number of rows");
  switch (rows) {
    case 1:
      return AddValuesRows<Element, 1, kAhead>(weights, v, offsets, num_keys, head_dim, acc, acc_stride, ahead);
    case 2:
      return AddValuesRows<Element, 2, kAhead>(weights, v, offsets, num_keys, head_dim, acc, acc_stride, ahead);
    case 3:
      return AddValuesRows<Element, 3, kAhead>(weights, v, offsets, num_keys, head_dim, acc, acc_stride, ahead);
    default:
      return AddValuesRows<Element, 4, kAhead>(weights, v, offsets, num_keys, head_dim, acc, acc_stride, ahead);
  }
}

// acc[rows, head_dim] += weights[rows, num_keys] · v[num_keys, head_dim]; weights' rows lie kTileKeys apart.
template <class Element>
void AddValues(const float* weights, int64_t rows, const typename Element::Stored* v, const int64_t* offsets,
               int64_t num_keys, int64_t head_dim, float* acc, int64_t acc_stride, const Ahead<Element>& ahead) {
  int64_t r = 0;
  if (ahead.base != nullptr) {
    AddValuesOfUpTo4Rows<Element, true>(weights, rows, v, offsets, num_keys, head_dim, acc, acc_stride, ahead);
    r = kBlockRows;
  }
  for (; r < rows; r += kBlockRows) {
    AddValuesOfUpTo4Rows<Element, false>(weights + r * kTileKeys, rows - r, v, offsets, num_keys, head_dim,
                                         acc + r * acc_stride, acc_stride, ahead);
  }
}

// Writes packed[num_keys, AccStride(head_dim)], V's tile in float32.
template <class Element>
void PackValues(const typename Element::Stored* v, const int64_t* offsets, int64_t num_keys, int64_t head_dim,
                float* packed) {
  const int64_t stride = AccStride(head_dim);
  for (int64_t n = 0; n < num_keys; ++n) {
    const typename Element::Stored* const row = v + offsets[n];
    int64_t d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) StoreF(packed + n * stride + d, Element::Load(row + d));
    if (HasHalfVector(head_dim)) StoreF(packed + n * stride + d, LoadEight<Element>(row + d));
  }
}

// Whether all of a tile's values are finite.
template <class Element>
bool AllFinite(const typename Element::Stored* v, const int64_t* offsets, int64_t num_keys, int64_t head_dim) {
  VecF zeros{};  // times 0 only what is not finite becomes NaN, and a sum never loses that
  for (int64_t n = 0; n < num_keys; ++n) {
    const typename Element::Stored* const row = v + offsets[n];
    int64_t d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) zeros += Element::Load(row + d) * 0.0f;
    if (HasHalfVector(head_dim)) zeros += LoadEight<Element>(row + d) * 0.0f;
  }
  return SumLanes(zeros) == 0.0f;
}

}  // namespace XLA_GPU_SIMD_NAMESPACE
}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_CPU_PRODUCTS_H_
