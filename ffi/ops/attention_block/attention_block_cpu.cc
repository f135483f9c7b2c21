#include "ffi/ops/attention_block/attention_block.h"

namespace xla_gpu {

Status RunAttentionBlock(const AttentionBlockParams& params, const Executor& executor) {
  Status status;
  if (params.norm.weight != nullptr) status = RunRmsNorm(params.norm, executor);
  if (status.ok() && params.has_qkv_product) status = RunLinear(params.qkv, executor);
  if (status.ok()) status = RunRotaryAndCache(params.rotary, executor);
  if (status.ok()) status = RunPagedAttention(params.attention, executor);
  if (status.ok() && params.has_out_product) status = RunLinear(params.out, executor);
  return status;
}

}  // namespace xla_gpu
