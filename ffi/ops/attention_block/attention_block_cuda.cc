// attention_block on a GPU: the kernels of its parts, each launched programmatically behind the one before, so that a
// product reads its first weights while the kernels before it end.
#include "ffi/ops/attention_block/attention_block.h"

namespace xla_gpu {

Status LaunchAttentionBlock(const AttentionBlockParams& params, Stream stream) {
  // The norm starts when everything before it has ended. A product that is first may start earlier, and what starts
  // while it runs may not rely on operands yet; then the rotation starts when it has ended.
  LaunchOrder order = LaunchOrder::kFirst;
  if (params.norm.weight != nullptr) {
    if (Status status = LaunchRmsNorm(params.norm, stream); !status.ok()) return status;
    order = LaunchOrder::kDependent;
  }
  if (Status status = LaunchLinear(params.qkv, stream, order); !status.ok()) return status;
  if (Status status = LaunchRotaryAndCache(params.rotary, stream, order); !status.ok()) return status;
  if (Status status = LaunchPagedAttention(params.attention, stream); !status.ok()) return status;
  return LaunchLinear(params.out, stream, LaunchOrder::kDependent);
}

}  // namespace xla_gpu
