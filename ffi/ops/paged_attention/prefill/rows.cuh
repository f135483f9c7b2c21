// What the prefill kernels share beside the schedulers: the rows of a work tile and the keys that they see, the
// transform from q·k to logits, the check of the page table, and the frame of a single-tile kernel.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_ROWS_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_ROWS_CUH_

#include <math_constants.h>

#include <cstdint>

#include "ffi/device/attention_state.cuh"
#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/fast_divisor.h"
#include "ffi/device/math_constants.h"
#include "ffi/device/mma.cuh"
#include "ffi/ops/paged_attention/padding_rows.cuh"
#include "ffi/ops/paged_attention/prefill/tile_scheduler.cuh"

namespace xla_gpu::prefill {

// How soft caps are computed: with tanhf for float32 queries, where TanhApprox's error would be visible, else by that.
enum class SoftCap { kExact, kApprox };

// Plain integer division, for kernels that divide seldom.
struct PlainDivisor {
  unsigned divisor;
  __device__ unsigned Divide(unsigned x) const { return x / divisor; }
};

// The rows of a work tile, and the keys that they see.
template <typename Divisor = PlainDivisor>
struct TileRows {
  int seq;
  int kv_head;
  int count;      // valid rows; the tile in shared memory may have more
  int key_begin;  // some row sees the keys at positions [key_begin, key_end)
  int key_end;
  int first_row_last_key;  // all rows see the keys at positions [last_row_first_key, first_row_last_key]
  int last_row_first_key;

  int q_begin;
  int num_heads;
  int window;  // sliding window in keys, 0: none
  Divisor group;
  const uint32_t* tree_mask;  // the sequence's rows of tree_mask; null: causal
  int tree_words;
  int q_len;
  unsigned first;      // packed row of the sequence where the tile begins
  int first_position;  // of the sequence's first row; negative where there are more rows than keys

  // Leaves the keys undefined: see FindKeys.
  __device__ TileRows(const PagedAttentionParams& params, const WorkTile& tile, Divisor group)
      : seq(tile.seq),
        kv_head(tile.kv_head),
        q_begin(tile.q_begin),
        num_heads(static_cast<int>(params.num_heads)),
        // A window of 2^31 or more hides nothing.
        window(params.sliding_window >> 31 != 0 ? 0 : static_cast<int>(params.sliding_window)),
        group(group),
        tree_mask(nullptr),
        tree_words(0),
        q_len(tile.q_len),
        first(tile.first_row),
        first_position(tile.context_len - tile.q_len) {
    count = static_cast<int>(min(tile.rows, tile.q_len * group.divisor - first));
  }

  // Of rows [begin, end) of the tile: the keys that some row sees, [*seen_begin, *seen_last], and those that all rows
  // see, [*all_begin, *all_last].
  __device__ void KeysOf(int begin, int end, int* seen_begin, int* seen_last, int* all_begin, int* all_last) const {
    VisibleKeys(begin, seen_begin, all_last);
    VisibleKeys(end - 1, all_begin, seen_last);
  }
  __device__ void FindKeys() {
    KeysOf(0, count, &key_begin, &key_end, &last_row_first_key, &first_row_last_key);
    ++key_end;
  }

  // With a tree_mask: all rows see the keys before the new tokens, and some row may see any of those.
  __device__ void KeysOfTree(int* seen_last, int* all_last) const {
    *seen_last = first_position + q_len - 1;
    *all_last = first_position - 1;
  }

  // The keys [*first_key, *last_key] that a row sees; none if *last_key < 0. Of a causal sequence.
  __device__ void VisibleKeys(int row, int* first_key, int* last_key) const {
    const int position = max(first_position + static_cast<int>(group.Divide(first + row)), -1);
    *last_key = row < count ? position : -1;
    *first_key = window == 0 ? 0 : max(position - window + 1, 0);
  }
  // The new tokens that a row sees, a bit each.
  __device__ uint64_t TreeTokens(int row) const {
    if (row >= count) return 0;
    const uint32_t* const words = tree_mask + group.Divide(first + row) * tree_words;
    const uint64_t tokens = __ldg(words) | (tree_words > 1 ? static_cast<uint64_t>(__ldg(words + 1)) << 32 : 0);
    return tokens & (~uint64_t{0} >> (64 - q_len));  // q_len is at most 64
  }
  __device__ int Head(int row) const {
    return kv_head * static_cast<int>(group.divisor) + static_cast<int>((first + row) % group.divisor);
  }
  // Row of query and out as [num_tokens * num_heads, head_dim].
  __device__ int64_t HeadRow(int row) const {
    const unsigned token = group.Divide(first + row);
    const unsigned head = kv_head * group.divisor + (first + row - token * group.divisor);
    return (q_begin + token) * static_cast<unsigned>(num_heads) + head;
  }
};

// Offset in elements of a key or value of kv head 0 from the cache's base; -1 if its page number is out of range.
__device__ inline int64_t KeyOffset(const PagedAttentionParams& params, int seq, int position) {
  const auto page_size = static_cast<unsigned>(params.page_size);
  const unsigned index = static_cast<unsigned>(position) / page_size;
  const unsigned slot = static_cast<unsigned>(position) - index * page_size;
  const int32_t page = __ldg(params.block_tables + seq * params.pages_per_seq + index);
  if (page < 0 || page >= params.num_pages) return -1;
  return page * params.page_stride + slot * params.slot_stride;
}

__device__ inline const char* HeadStart(const PagedAttentionParams& params, const void* cache, int kv_head) {
  const auto size = static_cast<int64_t>(SizeOf(params.cache_dtype));
  return static_cast<const char*>(cache) + kv_head * params.head_stride * size;
}

// Of a lane's columns 8n and 8n + 1 of scores, those below `end`: bits 2n and 2n + 1.
__device__ inline uint32_t LaneColumnsBelow(int end) {
  const int bits = max(end, 0) / 8 * 2 + min(max(end, 0) % 8, 2);
  return bits >= 32 ? ~0u : (1u << bits) - 1;
}

// What turns the unnormalised output of a row into the result.
struct RowNormalization {
  bool empty;    // the row sees no key
  float factor;  // of the sum of values
  float lse;     // natural logarithm of the softmax's sum
};

// From q·k to logits: scale, k_scale and soft cap. Where possible the scale is applied inside the exponent alone, and
// so is the factor of a soft cap.
struct LogitTransform {
  float scale;    // of q·k; includes k_scale
  float to_log2;  // factor from transformed scores to base-2 logits; positive
  float soft_cap;
  float v_scale = 1.0f;
  const float* sinks;
  bool premultiply;  // Transform applies the scale, or tanh of score / soft_cap; else to_log2 holds it

  __device__ LogitTransform(const PagedAttentionParams& params, int kv_head)
      : scale(params.scale), soft_cap(params.soft_cap), sinks(params.sinks) {
    if (params.k_scale != nullptr) {
      const int index = params.scale_per_head ? kv_head : 0;
      scale *= params.k_scale[index];
      v_scale = params.v_scale[index];
    }
    // A scale that is not positive would reverse the order of scores, or make NaN of -infinity.
    premultiply = soft_cap > 0.0f || !(scale > 0.0f);
    to_log2 = soft_cap > 0.0f ? soft_cap * kLog2E : premultiply ? kLog2E : scale * kLog2E;
  }

  template <SoftCap kSoftCap, int kM, int kN, int kI>
  __device__ void Transform(float (&s)[kM][kN][kI]) const {
    if (!premultiply) return;
    if (soft_cap > 0.0f) {
      const float inner = scale / soft_cap;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int i = 0; i < kI; ++i) {
            const float x = s[m][n][i] * inner;
            s[m][n][i] = kSoftCap == SoftCap::kExact ? tanhf(x) : TanhApprox(x);
          }
        }
      }
    } else {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int i = 0; i < kI; ++i) s[m][n][i] *= scale;
        }
      }
    }
  }

  // As Normalize, with approximate division and logarithm (a relative 2^-21 or so).
  __device__ RowNormalization NormalizeFast(AttentionState state, int head) const {
    float sum = state.sum;
    if (state.max == -INFINITY && sum == 0.0f) return {true, 0.0f, -INFINITY};
    float shift = state.max == -INFINITY ? 0.0f : __fmul_rn(state.max, to_log2);
    float factor = 1.0f;
    if (sinks != nullptr) {
      const float sink = __fmul_rn(sinks[head], kLog2E);
      const float max_with_sink = fmaxf(shift, sink);
      factor = Exp2(shift - max_with_sink);
      sum = __fmaf_rn(sum, factor, Exp2(sink - max_with_sink));
      shift = max_with_sink;
    }
    return {false, __fdividef(factor * v_scale, sum), kLn2 * (shift + __log2f(sum))};
  }

  // `state`: over all keys of the row, of transformed scores; the sum is of exp2((score - max) * to_log2). The sink
  // joins it here.
  __device__ RowNormalization Normalize(AttentionState state, int head) const {
    // NOTE: NaN scores leave the maximum at -infinity when a row has no others, but not the sum at 0.
    float sum = state.sum;
    if (state.max == -INFINITY && sum == 0.0f) return {true, 0.0f, -INFINITY};
    float shift = state.max == -INFINITY ? 0.0f : state.max * to_log2;
    float factor = 1.0f;
    if (sinks != nullptr) {
      const float sink = sinks[head] * kLog2E;
      const float max_with_sink = fmaxf(shift, sink);
      factor = Exp2(shift - max_with_sink);
      sum = sum * factor + Exp2(sink - max_with_sink);
      shift = max_with_sink;
    }
    return {false, factor * v_scale / sum, kLn2 * shift + logf(sum)};
  }
};

// Whether a page number that the sequence's queries see is out of range. Thread `thread` of `threads` checks its share.
// kAtOnce: loads in flight, limited by registers.
template <int kAtOnce = 8>
__device__ inline bool FindsInvalidPage(const PagedAttentionParams& params, const WorkTile& tile, unsigned thread,
                                        unsigned threads) {
  const auto page_size = static_cast<unsigned>(params.page_size);
  int64_t key_begin = 0;
  if (params.sliding_window > 0) {
    key_begin = max(int64_t{0}, tile.context_len - tile.q_len - params.sliding_window + 1);
  }
  const unsigned end = (static_cast<unsigned>(tile.context_len) + page_size - 1) / page_size;
  const int32_t* const table = params.block_tables + tile.seq * params.pages_per_seq;
  // As unsigned, negative numbers are 2^31 and above.
  const auto num_pages = static_cast<unsigned>(min(params.num_pages, int64_t{1} << 31));
  bool invalid = false;
#pragma unroll kAtOnce
  for (unsigned i = static_cast<unsigned>(key_begin) / page_size + thread; i < end; i += threads) {
    invalid |= static_cast<unsigned>(__ldg(table + i)) >= num_pages;
  }
  return invalid;
}

// The same by a warp, for small pages, of which there are many: four page numbers to a load. kAtOnce: such loads in
// flight.
template <int kAtOnce>
__device__ inline bool FindsInvalidSmallPage(const PagedAttentionParams& params, const WorkTile& tile, unsigned lane) {
  const auto page_size = static_cast<unsigned>(params.page_size);
  int64_t key_begin = 0;
  if (params.sliding_window > 0) {
    key_begin = max(int64_t{0}, tile.context_len - tile.q_len - params.sliding_window + 1);
  }
  unsigned i = static_cast<unsigned>(key_begin) / page_size;
  const unsigned end = (static_cast<unsigned>(tile.context_len) + page_size - 1) / page_size;
  const int32_t* const table = params.block_tables + tile.seq * params.pages_per_seq;
  unsigned most = 0;  // as unsigned, negative numbers are 2^31 and above
  const auto visit = [&](unsigned index) { most = max(most, static_cast<unsigned>(__ldg(table + index))); };
  const auto misaligned = static_cast<unsigned>(reinterpret_cast<uintptr_t>(table + i) / sizeof(int32_t)) % 4;
  const unsigned body = min(i + (4 - misaligned) % 4, end);  // where whole vectors begin
  if (i + lane < body) visit(i + lane);
  const auto* const vectors = reinterpret_cast<const uint4*>(table + body);
#pragma unroll kAtOnce
  for (i = lane; i < (end - body) / 4; i += 32) {
    const uint4 x = __ldg(vectors + i);
    most = max(max(most, max(x.x, x.y)), max(x.z, x.w));
  }
  i = body + (end - body) / 4 * 4 + lane;
  if (i < end) visit(i);
  return most >= static_cast<unsigned>(min(params.num_pages, int64_t{1} << 31));
}

// Writes `value` and `lse` to all rows of a work tile, by warp `warp` of `warps`: NaN for a sequence with invalid
// metadata.
template <typename T, typename Rows>
__device__ void FillTileRows(const Rows& rows, const PagedAttentionParams& params, int warp, int warps, float value,
                             float lse) {
  for (int row = warp; row < rows.count; row += warps) {
    FillHeads<T>(params, rows.HeadRow(row), 1, value, lse);
  }
}

// The frame of a single-tile kernel: a CTA computes its work tile, or, without one, fills its share of the padding
// rows. There is always such a CTA, since the grid has one more than there can be work tiles.
// Computation::kChecksPages: Run checks the page table itself, where that overlaps with its first copies.
// kRepeats: with more than kManySequences the grid may be smaller.
template <typename Computation, typename T, bool kRepeats = false>
__device__ void RunWorkTile(const PagedAttentionParams& params, char* shared) {
  using Scheduler = typename Computation::Scheduler;
  const bool repeats = kRepeats && params.max_seqs > kManySequences;
#pragma unroll 1
  for (unsigned rank = blockIdx.x;; rank += gridDim.x) {
    Scheduler scheduler(params, *reinterpret_cast<typename Scheduler::Storage*>(shared));
    unsigned total = 0;
    WorkTile tile;
    const bool has_tile = scheduler.Find(rank, &tile, &total);
    // Of the CTAs without a tile one must wait: then this kernel ends after the decode path, if that came first.
    if (has_tile || blockIdx.x == 0) WaitForPreviousKernel();
    if (!has_tile) {
      if (repeats) total = 0;  // all CTAs come here
      FillPaddingRows<T>(params, blockIdx.x - total, gridDim.x - total);
      return;
    }
    // Either barrier frees the scheduler's shared memory.
    bool valid = tile.valid;
    if constexpr (Computation::kChecksPages) {
      __syncthreads();
    } else {
      valid = !__syncthreads_or(FindsInvalidPage(params, tile, threadIdx.x, blockDim.x)) && valid;
    }
    TileRows<> rows(params, tile, PlainDivisor{static_cast<unsigned>(params.num_heads / params.num_kv_heads)});
    rows.FindKeys();
    if (valid) {
      Computation(params, shared).Run(tile, rows);
    } else {
      FillTileRows<T>(rows, params, static_cast<int>(threadIdx.x) / 32, static_cast<int>(blockDim.x) / 32, CUDART_NAN_F,
                      CUDART_NAN_F);
    }
    if (!repeats) return;
    __syncthreads();  // the work tile's shared memory is no longer read
  }
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_ROWS_CUH_
