// The body of AttendTile: online softmax over tiles of keys. Compiled once per ISA: see ffi/host/simd.h for what may
// not be done here.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_CPU_TILE_IMPL_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_CPU_TILE_IMPL_H_

#include "ffi/host/simd.h"
#include "ffi/ops/paged_attention/cpu/products.h"
#include "ffi/ops/paged_attention/cpu/tile.h"

namespace xla_gpu {
namespace XLA_GPU_SIMD_NAMESPACE {

XLA_GPU_INLINE int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }
XLA_GPU_INLINE int64_t Larger(int64_t a, int64_t b) { return a > b ? a : b; }

// The keys of a tile of keys that a query sees: those of [begin, end) whose bit of `keys` is set.
struct Visible {
  int64_t begin;
  int64_t end;
  uint64_t keys;  // all ones without a tree_mask
};
static_assert(kTileKeys == 64, "a bit for each key");

XLA_GPU_INLINE Visible VisibleKeys(const PagedAttentionParams& params, const AttentionTile& tile, int64_t query,
                                   int64_t first_key, int64_t num_keys) {
  const int64_t position = tile.position + query;
  const int64_t begin =
      params.sliding_window > 0 ? Larger(position + 1 - params.sliding_window - first_key, 0) : int64_t{0};
  if (tile.tree_mask == nullptr) {
    return {begin, Smaller(position + 1 + tile.keys_behind - first_key, num_keys), ~uint64_t{0}};
  }
  const uint32_t* const words = tile.tree_mask + query * tile.tree_words;
  const uint64_t tokens = words[0] | (tile.tree_words > 1 ? uint64_t{words[1]} << 32 : uint64_t{0});
  const int64_t new_begin = tile.first_new - first_key;  // of the new tokens in the tile of keys
  uint64_t keys = ~uint64_t{0};
  if (new_begin <= -kTileKeys) {
    keys = 0;
  } else if (new_begin <= 0) {
    keys = tokens >> -new_begin;
  } else if (new_begin < kTileKeys) {
    keys = ((uint64_t{1} << new_begin) - 1) | tokens << new_begin;
  }
  // Begin and end are where the first and the last seen key are, so that no row counts that sees none.
  Visible visible = {begin, num_keys, keys};
  while (visible.begin < visible.end && (keys >> visible.begin & 1) == 0) ++visible.begin;
  while (visible.begin < visible.end && (keys >> (visible.end - 1) & 1) == 0) --visible.end;
  return visible;
}

// Whether some key of [begin, end) is not seen.
XLA_GPU_INLINE bool HasGaps(const Visible& visible) {
  for (int64_t n = visible.begin; n < visible.end; ++n) {
    if ((visible.keys >> n & 1) == 0) return true;
  }
  return false;
}

template <class Element>
void LoadQueryRow(const void* query, int64_t row, int64_t head_dim, float* to) {
  const auto* from = static_cast<const typename Element::Stored*>(query) + row * head_dim;
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) StoreF(to + d, Element::Load(from + d));
  if (HasHalfVector(head_dim)) StoreF(to + d, LoadEight<Element>(from + d));
}

// q[heads, rows, AccStride(head_dim)] of the tile, in float32.
inline void LoadQueries(const PagedAttentionParams& params, const AttentionTile& tile, float* q) {
  const int64_t group = params.num_heads / params.num_kv_heads;
  const int64_t stride = AccStride(params.head_dim);
  for (int64_t head = tile.head_begin; head < tile.head_end; ++head) {
    for (int64_t i = 0; i < tile.num_queries; ++i) {
      for (int64_t g = 0; g < group; ++g, q += stride) {
        const int64_t row = (tile.token + i) * params.num_heads + head * group + g;
        WithComputeType<Float32, Float16, BFloat16>(params.dtype, [&](auto element) {
          LoadQueryRow<decltype(element)>(params.query, row, params.head_dim, q);
        });
      }
    }
  }
}

// Where `count` keys from `first` on lie in the cache, in elements from element (0, 0, 0, 0). Fills kTileKeys entries;
// what lies past the keys is only ever prefetched.
inline void LocateKeys(const PagedAttentionParams& params, const int32_t* pages, int64_t first, int64_t count,
                       int64_t* offsets) {
  int64_t page = first / params.page_size;
  int64_t slot = first % params.page_size;
  for (int64_t n = 0; n < count; ++n) {
    offsets[n] = pages[page] * params.page_stride + slot * params.slot_stride;
    if (++slot == params.page_size) {
      slot = 0;
      ++page;
    }
  }
  for (int64_t n = Larger(count, 0); n < kTileKeys; ++n) offsets[n] = 0;
}

struct Scoring {
  float scale;     // of q · k as stored
  float soft_cap;  // 0: off
};

// Makes weights of a row of raw scores and rescales what the row had so far. The row sees keys [begin, end), at least
// one, but for the gaps of a tree_mask; the weights of others are 0, whatever their scores.
XLA_GPU_INLINE void SoftmaxRow(const Scoring& scoring, Visible visible, int64_t num_keys, float* scores, float* max_sum,
                               float* acc, int64_t acc_stride) {
  const bool all = visible.begin == 0 && visible.end >= (num_keys + kLanes - 1) / kLanes * kLanes;
  const VecI begin = static_cast<int32_t>(visible.begin) - VecI{};
  const VecI end = static_cast<int32_t>(visible.end) - VecI{};
  VecF largest = Broadcast(-kInfinity);
  for (int64_t n = 0; n < num_keys; n += kLanes) {
    VecF score = LoadF(scores + n) * scoring.scale;
    if (scoring.soft_cap > 0) score = Tanh(score / scoring.soft_cap) * scoring.soft_cap;
    if (!all) {
      const VecI key = LaneIndex(Lanes()) + static_cast<int32_t>(n);
      score = ((key >= begin) & (key < end)) ? score : Broadcast(-kInfinity);
    }
    StoreF(scores + n, score);
    largest = Max(score, largest);
  }
  if (visible.keys != ~uint64_t{0} && HasGaps(visible)) {
    for (int64_t n = visible.begin; n < visible.end; ++n) {
      if ((visible.keys >> n & 1) == 0) scores[n] = -kInfinity;
    }
    largest = Broadcast(-kInfinity);
    for (int64_t n = 0; n < num_keys; n += kLanes) largest = Max(LoadF(scores + n), largest);
  }
  const float old_max = max_sum[0];
  const float new_max = MaxLanes(Max(largest, Broadcast(old_max)));
  // Scores of -inf alone: subtracting them from each other would make NaN where the weights are 0.
  const float shift = new_max == -kInfinity ? 0.0f : new_max;
  VecF sum{};
  for (int64_t n = 0; n < num_keys; n += kLanes) {
    const VecF weight = Exp(LoadF(scores + n) - shift);
    StoreF(scores + n, weight);
    sum += weight;
  }
  const float shrink = Exp(Broadcast(old_max - shift))[0];
  max_sum[0] = new_max;
  max_sum[1] = max_sum[1] * shrink + SumLanes(sum);
  if (shrink != 1.0f) {
    for (int64_t d = 0; d < acc_stride; d += kLanes) StoreF(acc + d, LoadF(acc + d) * shrink);
  }
}

// Softmax of all rows of one head over a tile of keys. Returns whether some row does not see some key.
inline bool SoftmaxTile(const PagedAttentionParams& params, const AttentionTile& tile, const Scoring& scoring,
                        int64_t first_key, int64_t num_keys, float* scores, float* max_sum, float* acc) {
  const int64_t group = params.num_heads / params.num_kv_heads;
  const int64_t stride = AccStride(tile.value_dim);
  bool hidden = false;
  for (int64_t i = 0, row = 0; i < tile.num_queries; ++i) {
    const Visible visible = VisibleKeys(params, tile, i, first_key, num_keys);
    hidden |= visible.begin > 0 || visible.end < num_keys || visible.keys != ~uint64_t{0};
    for (int64_t g = 0; g < group; ++g, ++row) {
      if (visible.begin < visible.end) {
        SoftmaxRow(scoring, visible, num_keys, scores + row * kTileKeys, max_sum + 2 * row, acc + row * stride, stride);
      } else {
        memset(scores + row * kTileKeys, 0, kTileKeys * sizeof(float));
      }
    }
  }
  return hidden;
}

// AddValues for a tile with values that are not finite: 0 times such a value is NaN, so each row adds what it sees
// alone.
template <class Element>
void AddVisibleValues(const PagedAttentionParams& params, const AttentionTile& tile, int64_t first_key,
                      int64_t num_keys, const float* weights, const typename Element::Stored* v, const int64_t* offsets,
                      int64_t width, float* acc) {
  const int64_t group = params.num_heads / params.num_kv_heads;
  const int64_t stride = AccStride(tile.value_dim);
  for (int64_t i = 0, row = 0; i < tile.num_queries; ++i) {
    const Visible visible = VisibleKeys(params, tile, i, first_key, num_keys);
    for (int64_t g = 0; g < group; ++g, ++row) {
      // Run by run of keys without a gap.
      for (int64_t begin = visible.begin; begin < visible.end;) {
        int64_t end = begin;
        while (end < visible.end && (visible.keys >> end & 1) != 0) ++end;
        if (end > begin) {
          AddValues<Element>(weights + row * kTileKeys + begin, 1, v, offsets + begin, end - begin, width,
                             acc + row * stride, stride, Ahead<Element>{});
        }
        begin = end + 1;
      }
    }
  }
}

template <class Element>
void AttendTileAs(const PagedAttentionParams& params, const AttentionTile& tile, const TileStates& state,
                  float* workspace) {
  using Stored = typename Element::Stored;
  const int64_t head_dim = params.head_dim;
  const int64_t value_dim = tile.value_dim;
  const int64_t stride = AccStride(head_dim);
  const int64_t acc_stride = AccStride(value_dim);
  const int64_t heads = tile.head_end - tile.head_begin;
  const int64_t rows = tile.num_queries * (params.num_heads / params.num_kv_heads);
  const bool direct = rows <= kMaxDirectRows;
  const Stored* const first_k = static_cast<const Stored*>(params.k_cache) + tile.head_begin * params.head_stride;
  const Stored* const first_v = static_cast<const Stored*>(params.v_cache) + tile.head_begin * params.head_stride;

  float* const q = workspace;
  float* const scores = q + heads * rows * stride;
  float* const k_t = scores + rows * kTileKeys;
  float* const v_packed = k_t + kTileKeys * stride;

  LoadQueries(params, tile, q);
  memset(scores, 0, rows * kTileKeys * sizeof(float));
  memset(state.acc, 0, heads * rows * acc_stride * sizeof(float));
  for (int64_t row = 0; row < heads * rows; ++row) {
    state.max_sum[2 * row] = -kInfinity;
    state.max_sum[2 * row + 1] = 0;
  }

  const int64_t packed_width = (value_dim + kLanes - 1) / kLanes * kLanes;
  int64_t packed_offsets[kTileKeys];
  for (int64_t n = 0; n < kTileKeys; ++n) packed_offsets[n] = n * acc_stride;
  int64_t offset_sets[2][kTileKeys];
  int64_t* offsets = offset_sets[0];
  int64_t* next_offsets = offset_sets[1];
  int64_t next_keys = Smaller(kTileKeys, tile.key_end - tile.key_begin);
  LocateKeys(params, tile.pages, tile.key_begin, next_keys, next_offsets);

  for (int64_t key = tile.key_begin; key < tile.key_end; key += kTileKeys) {
    int64_t* const unused = offsets;
    offsets = next_offsets;
    next_offsets = unused;
    const int64_t num_keys = next_keys;
    next_keys = Larger(0, Smaller(kTileKeys, tile.key_end - key - kTileKeys));
    LocateKeys(params, tile.pages, key + kTileKeys, next_keys, next_offsets);

    // Heads inside, keys outside: what lies together in memory is used together.
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t head = tile.head_begin + h;
      const Stored* const k = first_k + h * params.head_stride;
      const Stored* const v = first_v + h * params.head_stride;
      const float* const q_head = q + h * rows * stride;
      float* const acc = state.acc + h * rows * acc_stride;
      float* const max_sum = state.max_sum + 2 * h * rows;
      const int64_t scale_index = params.scale_per_head ? head : 0;
      const float k_scale = params.k_scale != nullptr ? params.k_scale[scale_index] : 1.0f;
      const Scoring scoring = {params.scale * k_scale, params.soft_cap};

      if (direct) {
        ScoreDirect<Element>(q_head, stride, rows, k, offsets, num_keys, head_dim, scores, /*ahead=*/v);
      } else {
        TransposeKeys<Element>(k, offsets, num_keys, head_dim, k_t);
        for (int64_t r = 0; r < rows; r += kBlockRows) {
          PrefetchShare(v, offsets, value_dim, r, rows);
          ScoreTransposed(q_head + r * stride, stride, rows - r, k_t, head_dim, scores + r * kTileKeys);
        }
      }

      const bool hidden = SoftmaxTile(params, tile, scoring, key, num_keys, scores, max_sum, acc);

      // What the next round of this loop begins with.
      const bool last_head = h + 1 == heads;
      const Ahead<Element> ahead = {last_head ? first_k : k + params.head_stride, last_head ? next_offsets : offsets};
      if (hidden && !AllFinite<Element>(v, offsets, num_keys, value_dim)) {
        AddVisibleValues<Element>(params, tile, key, num_keys, scores, v, offsets, value_dim, acc);
      } else if (direct) {
        AddValues<Element>(scores, rows, v, offsets, num_keys, value_dim, acc, acc_stride, ahead);
      } else {
        PackValues<Element>(v, offsets, num_keys, value_dim, v_packed);
        for (int64_t r = 0; r < rows; r += kBlockRows) {
          PrefetchShare(ahead.base, ahead.offsets, head_dim, r, rows);
          AddValues<Float32>(scores + r * kTileKeys, Smaller(kBlockRows, rows - r), v_packed, packed_offsets, num_keys,
                             packed_width, acc + r * acc_stride, acc_stride, Ahead<Float32>{});
        }
      }
    }
  }
}

void AttendTile(const PagedAttentionParams& params, const AttentionTile& tile, const TileStates& state,
                float* workspace) {
  WithStorageType<Float32, Float16, BFloat16, Float8E4M3FN, Float8E5M2>(
      params.cache_dtype, [&](auto element) { AttendTileAs<decltype(element)>(params, tile, state, workspace); });
}

}  // namespace XLA_GPU_SIMD_NAMESPACE
}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_CPU_TILE_IMPL_H_
