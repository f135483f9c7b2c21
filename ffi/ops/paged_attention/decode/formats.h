// The launch functions of the decode path by the format of the cache. Each has its own source file in instantiations/.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_FORMATS_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_FORMATS_H_

#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu::decode {

// float32 queries, over float32 and float8 caches; and those with a tree_mask that no kernel with wide work tiles
// takes.
Status LaunchSimt(const PagedAttentionCall& params, Stream stream);
Status LaunchF16(const PagedAttentionCall& params, Stream stream);
Status LaunchBF16(const PagedAttentionCall& params, Stream stream);
// float16 and bfloat16 queries over float8 caches.
Status LaunchE4M3(const PagedAttentionCall& params, Stream stream);
Status LaunchE5M2(const PagedAttentionCall& params, Stream stream);

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_FORMATS_H_
