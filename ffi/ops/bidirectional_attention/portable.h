// The kernels for every GPU: 16-bit elements by mma.sync, float32 by fused multiply-adds.
#ifndef XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_PORTABLE_H_
#define XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_PORTABLE_H_

#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/ops/bidirectional_attention/bidirectional_attention.h"

namespace xla_gpu::bidirectional {

// Code for sm_90a has no such kernel: an error there.
Status LaunchPortable16Bit(const BidirectionalAttentionParams& params, Stream stream);
Status LaunchPortableF32(const BidirectionalAttentionParams& params, Stream stream);

}  // namespace xla_gpu::bidirectional

#endif  // XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_PORTABLE_H_
