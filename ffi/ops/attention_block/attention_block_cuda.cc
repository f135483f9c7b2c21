// attention_block on a GPU: the kernels of its parts, each launched programmatically behind the one before, so that it
// starts while that one ends.
#include "ffi/ops/attention_block/attention_block.h"
#include "ffi/ops/linear/normed_linear.h"

namespace xla_gpu {

Status LaunchAttentionBlock(const AttentionBlockParams& params, Stream stream) {
  LaunchOrder order = LaunchOrder::kFirst;
  if (params.has_qkv_product) {
    if (Status status = LaunchNormedLinear(params.norm, params.qkv, stream, &order); !status.ok()) return status;
  }
  if (Status status = LaunchRotaryAndCache(params.rotary, stream, order); !status.ok()) return status;
  PagedAttentionCall attention = params.attention;
  attention.order = LaunchOrder::kDependent;
  if (Status status = LaunchPagedAttention(attention, stream); !status.ok()) return status;
  return params.has_out_product ? LaunchLinear(params.out, stream, LaunchOrder::kDependent) : Status::Ok();
}

}  // namespace xla_gpu
