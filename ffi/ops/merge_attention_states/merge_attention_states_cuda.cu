// merge_attention_states on a GPU: bound by its 3 * head_dim elements a row, so a warp streams whole rows.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ffi/base/cuda_status.h"
#include "ffi/ops/merge_attention_states/merge_attention_states.h"

namespace xla_gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Enough blocks to fill any GPU; the loop inside the kernel takes the rest of a large problem.
constexpr int64_t kMaxBlocks = 1 << 16;

template <typename T, int kVec>
struct alignas(sizeof(T) * kVec) Pack {
  T values[kVec];
};

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads)
    MergeAttentionStatesKernel(const T* __restrict__ out_a,      // [num_rows, head_dim]
                               const float* __restrict__ lse_a,  // [num_rows]
                               const T* __restrict__ out_b,      // [num_rows, head_dim]
                               const float* __restrict__ lse_b,  // [num_rows]
                               T* __restrict__ out,              // [num_rows, head_dim]
                               float* __restrict__ lse,          // [num_rows]
                               int64_t num_rows, int64_t head_dim) {
  const int lane = threadIdx.x % 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < num_rows; row += step) {
    const float a = lse_a[row];
    const float b = lse_b[row];
    // A state that saw no key has no part in the result, whatever its values are: its weight is 0 and its values are
    // not looked at.
    const bool has_a = a != -INFINITY;
    const bool has_b = b != -INFINITY;
    const float max = fmaxf(a, b);
    const float weight_a = has_a ? expf(a - max) : 0.0f;
    const float weight_b = has_b ? expf(b - max) : 0.0f;
    const float sum = weight_a + weight_b;
    if (lane == 0) lse[row] = has_a && has_b ? max + logf(sum) : has_a ? a : b;
    for (int64_t d = lane * kVec; d < head_dim; d += 32 * kVec) {
      const int64_t at = row * head_dim + d;
      const auto x = *reinterpret_cast<const Pack<T, kVec>*>(out_a + at);
      const auto y = *reinterpret_cast<const Pack<T, kVec>*>(out_b + at);
      Pack<T, kVec> merged;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float from_a = has_a ? weight_a * static_cast<float>(x.values[i]) : 0.0f;
        const float from_b = has_b ? weight_b * static_cast<float>(y.values[i]) : 0.0f;
        merged.values[i] = static_cast<T>(has_a || has_b ? (from_a + from_b) / sum : 0.0f);
      }
      *reinterpret_cast<Pack<T, kVec>*>(out + at) = merged;
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
  const auto blocks = static_cast<unsigned>(std::min((p.num_rows + kWarps - 1) / kWarps, kMaxBlocks));
  const auto kernel = bits % 8 == 0 ? MergeAttentionStatesKernel<T, kVec> : MergeAttentionStatesKernel<T, 1>;
  kernel<<<blocks, kThreads, /*shared_mem=*/0, stream>>>(a, p.lse_a, b, p.lse_b, out, p.lse, p.num_rows, p.head_dim);
  XLA_GPU_RETURN_IF_LAUNCH_FAILED();
  return Status::Ok();
}

}  // namespace

Status LaunchMergeAttentionStates(const MergeAttentionStatesParams& params, Stream stream) {
  if (params.num_rows == 0) return Status::Ok();
  switch (params.dtype) {
    case DType::kF32:
      return Launch<float>(params, stream);
    case DType::kF16:
      return Launch<__half>(params, stream);
    case DType::kBF16:
      return Launch<__nv_bfloat16>(params, stream);
    default:
      return Status::InvalidArgument(
          "merge_attention_states: out_a: expected float32, float16 or bfloat16, got float8");
  }
}

}  // namespace xla_gpu
