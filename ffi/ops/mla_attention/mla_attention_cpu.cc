// mla_attention on the host: paged_attention's tiles over latents, whose values are the beginning of their keys.
#include "ffi/ops/mla_attention/as_paged_attention.h"
#include "ffi/ops/mla_attention/mla_attention.h"

namespace xla_gpu {

static_assert(kMaxMlaValueDim <= kMaxHostValueDim);

Status CheckMlaAttentionMetadata(const MlaAttentionParams& params, const char* op) {
  return CheckPagedAttentionMetadata(mla::AsPagedAttention(params), op);
}

Status RunMlaAttention(const MlaAttentionParams& params, const Executor& executor) {
  return RunPagedAttention(mla::AsPagedAttention(params), executor);
}

}  // namespace xla_gpu
