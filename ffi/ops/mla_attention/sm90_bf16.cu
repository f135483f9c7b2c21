#include <cuda_bf16.h>

#include "ffi/ops/mla_attention/sm90_launch.cuh"

namespace xla_gpu::mla {

Status SuitsSm90BF16(const MlaAttentionParams& params, bool* suits) {
  return SuitsSm90As<__nv_bfloat16>(params, suits);
}

Status LaunchSm90BF16(const MlaAttentionParams& params, Stream stream) {
  return LaunchSm90As<__nv_bfloat16>(params, stream);
}

}  // namespace xla_gpu::mla
