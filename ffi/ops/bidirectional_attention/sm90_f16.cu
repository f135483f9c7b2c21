#include <cuda_fp16.h>

#include "ffi/ops/bidirectional_attention/sm90_launch.cuh"

namespace xla_gpu::bidirectional {

template Status LaunchSm90As<__half>(const BidirectionalAttentionParams&, int, int, Stream);

}  // namespace xla_gpu::bidirectional
