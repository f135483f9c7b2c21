#include <cuda_bf16.h>

#include "ffi/ops/bidirectional_attention/sm90_launch.cuh"

namespace xla_gpu::bidirectional {

template Status LaunchSm90As<__nv_bfloat16>(const BidirectionalAttentionParams&, int, int, Stream);

}  // namespace xla_gpu::bidirectional
