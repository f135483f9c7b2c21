// The decode path by what the cache holds; each in its own source file.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_FORMATS_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_FORMATS_H_

#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu::decode {

// Queries of float32, over float32 and float8 caches.
Status LaunchF32(const PagedAttentionParams& params, Stream stream);
Status LaunchF16(const PagedAttentionParams& params, Stream stream);
Status LaunchBF16(const PagedAttentionParams& params, Stream stream);
// float8 caches, for queries of float16 and bfloat16.
Status LaunchE4M3(const PagedAttentionParams& params, Stream stream);
Status LaunchE5M2(const PagedAttentionParams& params, Stream stream);

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_FORMATS_H_
