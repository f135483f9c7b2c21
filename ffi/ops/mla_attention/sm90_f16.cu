#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ffi/ops/mla_attention/sm90_launch.cuh"

namespace xla_gpu::mla {

template Status SuitsSm90As<__half>(const MlaAttentionParams&, bool*);
template Status LaunchSm90As<__half>(const MlaAttentionParams&, Stream);

}  // namespace xla_gpu::mla
