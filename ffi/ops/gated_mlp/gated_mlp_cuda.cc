// gated_mlp on a GPU: the kernels of its parts, each launched programmatically behind the one before, so that it reads
// its first weights while that one ends.
#include "ffi/ops/gated_mlp/gated_mlp.h"

namespace xla_gpu {

Status LaunchGatedMlp(const GatedMlpParams& params, Stream stream) {
  // The norm starts when everything before it has ended. A product that is first may start earlier, and what starts
  // while it runs may not rely on the weights yet.
  LaunchOrder order = LaunchOrder::kFirst;
  if (params.norm.weight != nullptr) {
    if (Status status = LaunchRmsNorm(params.norm, stream); !status.ok()) return status;
    order = LaunchOrder::kDependent;
  }
  if (Status status = LaunchLinear(params.gate_up, stream, order); !status.ok()) return status;
  return LaunchLinear(params.down, stream, order);
}

}  // namespace xla_gpu
