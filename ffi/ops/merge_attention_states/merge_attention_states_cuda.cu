// merge_attention_states on a GPU: limited by the bandwidth for its 3 * head_dim elements a row. A warp streams whole
// rows.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ffi/base/cuda_status.h"
#include "ffi/device/aligned_vector.h"
#include "ffi/device/attention_state.cuh"
#include "ffi/device/dispatch.cuh"
#include "ffi/ops/merge_attention_states/merge_attention_states.h"

namespace xla_gpu {
namespace {

constexpr int kMergeThreads = 256;
constexpr int kMergeWarps = kMergeThreads / 32;
// Enough CTAs to fill any GPU. A grid-stride loop takes the rest of a large problem.
constexpr int64_t kMaxMergeBlocks = 1 << 16;

template <typename T, int kVec>
__global__ void __launch_bounds__(kMergeThreads)
    MergeAttentionStatesKernel(const T* __restrict__ out_a,      // [num_rows, head_dim]
                               const float* __restrict__ lse_a,  // [num_rows]
                               const T* __restrict__ out_b,      // [num_rows, head_dim]
                               const float* __restrict__ lse_b,  // [num_rows]
                               T* __restrict__ out,              // [num_rows, head_dim]
                               float* __restrict__ lse,          // [num_rows]
                               int64_t num_rows, int64_t head_dim) {
  const int lane = threadIdx.x % 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kMergeWarps;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kMergeWarps + threadIdx.x / 32; row < num_rows; row += step) {
    const float a = lse_a[row];
    const float b = lse_b[row];
    // A state that saw no key has no part in the result, whatever its values are. The other one is the result then, as
    // it is, also where its lse is infinite or NaN: x * 1 + -0 is x, also where x is -0.
    const bool has_a = a != -INFINITY;
    const bool has_b = b != -INFINITY;
    AttentionState state = {a, has_a ? 1.0f : 0.0f};
    const MergeWeights weights = state.Merge({b, has_b ? 1.0f : 0.0f}, NaturalScores());
    const bool has_both = has_a && has_b;
    const float weight_a = has_both ? weights.first : 1.0f, weight_b = has_both ? weights.second : 1.0f;
    const float sum = has_both ? state.sum : 1.0f;
    if (lane == 0) lse[row] = has_both ? state.max + logf(state.sum) : has_a ? a : b;
    for (int64_t d = lane * kVec; d < head_dim; d += 32 * kVec) {
      const int64_t at = row * head_dim + d;
      const auto x = *reinterpret_cast<const AlignedVector<T, kVec>*>(out_a + at);
      const auto y = *reinterpret_cast<const AlignedVector<T, kVec>*>(out_b + at);
      AlignedVector<T, kVec> merged;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float from_a = has_a ? weight_a * static_cast<float>(x.values[i]) : -0.0f;
        const float from_b = has_b ? weight_b * static_cast<float>(y.values[i]) : -0.0f;
        merged.values[i] = static_cast<T>(has_a || has_b ? (from_a + from_b) / sum : 0.0f);
      }
      *reinterpret_cast<AlignedVector<T, kVec>*>(out + at) = merged;
    }
  }
}

template <typename T>
Status Launch(const MergeAttentionStatesParams& p, Stream stream) {
  constexpr int kVec = 8 / sizeof(T);
  const auto* a = static_cast<const T*>(p.out_a);
  const auto* b = static_cast<const T*>(p.out_b);
  auto* out = static_cast<T*>(p.out);
  const uintptr_t bits = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) |
                         reinterpret_cast<uintptr_t>(out) | static_cast<uintptr_t>(p.head_dim * sizeof(T));
  const auto blocks = static_cast<unsigned>(std::min((p.num_rows + kMergeWarps - 1) / kMergeWarps, kMaxMergeBlocks));
  const auto kernel = bits % 8 == 0 ? MergeAttentionStatesKernel<T, kVec> : MergeAttentionStatesKernel<T, 1>;
  kernel<<<blocks, kMergeThreads, /*shared_mem=*/0, stream>>>(a, p.lse_a, b, p.lse_b, out, p.lse, p.num_rows,
                                                              p.head_dim);
  XLA_GPU_RETURN_IF_LAUNCH_FAILED();
  return Status::Ok();
}

}  // namespace

Status LaunchMergeAttentionStates(const MergeAttentionStatesParams& params, Stream stream) {
  if (params.num_rows == 0) return Status::Ok();
  return DispatchFloat(params.dtype, "merge_attention_states: out_a",
                       [&](auto zero) { return Launch<decltype(zero)>(params, stream); });
}

}  // namespace xla_gpu
