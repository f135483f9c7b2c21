#include <cuda_fp16.h>

#include "ffi/ops/mla_attention/sm90_launch.cuh"

namespace xla_gpu::mla {

Status SuitsSm90F16(const MlaAttentionParams& params, bool* suits) { return SuitsSm90As<__half>(params, suits); }

Status LaunchSm90F16(const MlaAttentionParams& params, Stream stream) { return LaunchSm90As<__half>(params, stream); }

}  // namespace xla_gpu::mla
