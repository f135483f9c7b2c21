// What the prefill kernels share beside the schedule: the rows of a tile, the way from products to logits, the loop
// over a block's tiles, and the rows that no product fills.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_ROWS_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_ROWS_CUH_

#include <math_constants.h>

#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/ops/paged_attention/padding_rows.cuh"
#include "ffi/ops/paged_attention/prefill/tile_scheduler.cuh"

namespace xla_gpu {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// 1 - 2 / (e^2x + 1): absolute error of 1e-7 or so, which soft_cap multiplies; exact at ±infinity.
__device__ inline float FastTanh(float x) { return 1.0f - __fdividef(2.0f, Exp2(2.0f * kLog2E * x) + 1.0f); }

// Division by any number.
struct PlainDivisor {
  unsigned divisor;
  __device__ unsigned Divide(unsigned x) const { return x / divisor; }
};

// Division by a number below 2^31 that the host knows, for numerators below 2^31.
struct FastDivisor {
  unsigned divisor;
  unsigned multiplier;  // 2^(31 + shift) / divisor, rounded up
  int shift;

  static FastDivisor Make(int64_t divisor) {
    FastDivisor fast{static_cast<unsigned>(divisor), 0, 0};
    while (int64_t{1} << fast.shift < divisor) ++fast.shift;
    fast.multiplier = static_cast<unsigned>(((int64_t{1} << (31 + fast.shift)) + divisor - 1) / divisor);
    return fast;
  }
  __device__ unsigned Divide(unsigned x) const { return __umulhi(2 * x, multiplier) >> shift; }
};

// A tile's rows, and the keys that they see.
template <typename Divisor>
struct PrefillRowsBy {
  int seq;
  int kv_head;
  int count;      // rows of the tile; its shared memory may have more
  int key_begin;  // positions [key_begin, key_end) are seen by some row
  int key_end;
  int first_row_last_key;  // all rows see the keys of [last_row_first_key, first_row_last_key]
  int last_row_first_key;

  int q_begin;
  int num_heads;
  int window;  // 0: none
  Divisor group;
  unsigned first;      // packed row of the sequence where the tile begins
  int first_position;  // of the sequence's first row; negative where there are more rows than keys

  // Without the keys.
  __device__ PrefillRowsBy(const PagedAttentionParams& params, const PrefillTile& tile, int rows_per_tile,
                           Divisor group)
      : seq(tile.seq),
        kv_head(tile.kv_head),
        q_begin(tile.q_begin),
        num_heads(static_cast<int>(params.num_heads)),
        // A window of 2^31 or more hides nothing.
        window(params.sliding_window >> 31 != 0 ? 0 : static_cast<int>(params.sliding_window)),
        group(group),
        first(static_cast<unsigned>(tile.index) * rows_per_tile),
        first_position(tile.context_len - tile.q_len) {
    count = static_cast<int>(min(static_cast<unsigned>(rows_per_tile), tile.q_len * group.divisor - first));
  }

  // The keys of rows [begin, end) of the tile: those that some row sees, [*seen_begin, *seen_last], and those that all
  // see, [*all_begin, *all_last].
  __device__ void KeysOf(int begin, int end, int* seen_begin, int* seen_last, int* all_begin, int* all_last) const {
    VisibleKeys(begin, seen_begin, all_last);
    VisibleKeys(end - 1, all_begin, seen_last);
  }
  __device__ void FindKeys() {
    KeysOf(0, count, &key_begin, &key_end, &last_row_first_key, &first_row_last_key);
    ++key_end;
  }

  // The keys [*first_key, *last_key] that a row sees; none if *last_key < 0.
  __device__ void VisibleKeys(int row, int* first_key, int* last_key) const {
    const int position = max(first_position + static_cast<int>(group.Divide(first + row)), -1);
    *last_key = row < count ? position : -1;
    *first_key = window == 0 ? 0 : max(position - window + 1, 0);
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

using PrefillRows = PrefillRowsBy<PlainDivisor>;

// Element offset of a key or value of kv head 0 from the cache's base; -1 if its page lies outside.
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

struct SoftmaxEnd {
  bool empty;    // the row sees no key
  float factor;  // of the sum of values
  float lse;
};

// From products q·k to logits. Where nothing stands against it the scale is applied inside the exponent alone.
struct PrefillScores {
  float scale;    // of a product; includes k_scale
  float to_log2;  // what turns the transformed scores into logits of base 2; positive
  float soft_cap;
  float v_scale = 1.0f;
  const float* sinks;
  bool premultiply;

  __device__ PrefillScores(const PagedAttentionParams& params, int kv_head)
      : scale(params.scale), soft_cap(params.soft_cap), sinks(params.sinks) {
    if (params.k_scale != nullptr) {
      const int index = params.scale_per_head ? kv_head : 0;
      scale *= params.k_scale[index];
      v_scale = params.v_scale[index];
    }
    // A scale that is not positive would turn the order of scores around, or mix up -infinity and NaN.
    premultiply = soft_cap > 0.0f || !(scale > 0.0f);
    to_log2 = premultiply ? kLog2E : scale * kLog2E;
  }

  // kExact: for float32, whose results would show the fast tanh's error.
  template <bool kExact, int kM, int kN, int kI>
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
            s[m][n][i] = soft_cap * (kExact ? tanhf(x) : FastTanh(x));
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

  // As End, with approximate division and logarithm (a relative 2^-21 or so).
  __device__ SoftmaxEnd EndFast(float largest, float sum, int head) const {
    if (largest == -INFINITY && sum == 0.0f) return {true, 0.0f, -INFINITY};
    float shift = largest == -INFINITY ? 0.0f : __fmul_rn(largest, to_log2);
    float factor = 1.0f;
    if (sinks != nullptr) {
      const float sink = __fmul_rn(sinks[head], kLog2E);
      const float together = fmaxf(shift, sink);
      factor = Exp2(shift - together);
      sum = __fmaf_rn(sum, factor, Exp2(sink - together));
      shift = together;
    }
    return {false, __fdividef(factor * v_scale, sum), kLn2 * (shift + __log2f(sum))};
  }

  // `largest`: the row's largest transformed score; `sum`: of exp2((score - largest) * to_log2).
  __device__ SoftmaxEnd End(float largest, float sum, int head) const {
    // NOTE: NaN scores leave `largest` at -infinity when a row has no others, but not the sum at 0.
    if (largest == -INFINITY && sum == 0.0f) return {true, 0.0f, -INFINITY};
    float shift = largest == -INFINITY ? 0.0f : largest * to_log2;
    float factor = 1.0f;
    if (sinks != nullptr) {
      const float sink = sinks[head] * kLog2E;
      const float together = fmaxf(shift, sink);
      factor = Exp2(shift - together);
      sum = sum * factor + Exp2(sink - together);
      shift = together;
    }
    return {false, factor * v_scale / sum, kLn2 * shift + logf(sum)};
  }
};

// Whether a page that the sequence's queries see lies outside the cache, as far as thread `thread` of `threads` looks.
// kAtOnce: pages looked at together, which is a matter of registers.
template <int kAtOnce = 8>
__device__ inline bool FindsPageOutside(const PagedAttentionParams& params, const PrefillTile& tile, unsigned thread,
                                        unsigned threads) {
  const auto page_size = static_cast<unsigned>(params.page_size);
  int64_t key_begin = 0;
  if (params.sliding_window > 0) {
    key_begin = max(int64_t{0}, tile.context_len - tile.q_len - params.sliding_window + 1);
  }
  const unsigned end = (static_cast<unsigned>(tile.context_len) + page_size - 1) / page_size;
  const int32_t* const table = params.block_tables + tile.seq * params.pages_per_seq;
  // Negative numbers are 2^31 and more without their sign.
  const auto num_pages = static_cast<unsigned>(min(params.num_pages, int64_t{1} << 31));
  bool outside = false;
#pragma unroll kAtOnce
  for (unsigned i = static_cast<unsigned>(key_begin) / page_size + thread; i < end; i += threads) {
    outside |= static_cast<unsigned>(__ldg(table + i)) >= num_pages;
  }
  return outside;
}

// The same in all of a tile's rows, by warp `warp` of `warps`: NaN in those of a sequence with wrong metadata.
template <typename T, typename Rows>
__device__ void FillTile(const Rows& rows, const PagedAttentionParams& params, int warp, int warps, float value,
                         float lse) {
  for (int row = warp; row < rows.count; row += warps) {
    FillHeads<T>(params, rows.HeadRow(row), 1, value, lse);
  }
}

// All that a block of a prefill kernel does: its tile, or, without one, a share of the rows that belong to no sequence.
// There is always such a block, since the grid has one more than there can be tiles.
template <typename Kernel, typename T>
__device__ void RunPrefillTile(const PagedAttentionParams& params, char* shared) {
  using Schedule = typename Kernel::Schedule;
  Schedule schedule(params, *reinterpret_cast<typename Schedule::Storage*>(shared));
  unsigned total = 0;
  PrefillTile tile;
  const bool has_tile = schedule.Find(blockIdx.x, &tile, &total);
  // One block without a tile is enough to wait: when this kernel has ended, so has the decode path, if that came first.
  if (has_tile || blockIdx.x == 0) WaitForPreviousKernel();
  if (!has_tile) {
    FillUnownedRows<T>(params, blockIdx.x - total, gridDim.x - total);
    return;
  }
  // Also the barrier after which shared memory is free.
  bool valid = tile.valid;
  if constexpr (Kernel::kChecksPages) {
    __syncthreads();
  } else {
    valid = !__syncthreads_or(FindsPageOutside(params, tile, threadIdx.x, blockDim.x)) && valid;
  }
  PrefillRows rows(params, tile, Kernel::kRows,
                   PlainDivisor{static_cast<unsigned>(params.num_heads / params.num_kv_heads)});
  rows.FindKeys();
  if (valid) {
    Kernel(params, shared).Run(tile, rows);
  } else {
    FillTile<T>(rows, params, static_cast<int>(threadIdx.x) / 32, static_cast<int>(blockDim.x) / 32, CUDART_NAN_F,
                CUDART_NAN_F);
  }
}

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_ROWS_CUH_
