// gated_mlp on a GPU: the kernels of its parts, each launched programmatically behind the one before, so that it starts
// while that one ends.
#include "ffi/ops/gated_mlp/gated_mlp.h"
#include "ffi/ops/linear/normed_linear.h"

namespace xla_gpu {

Status LaunchGatedMlp(const GatedMlpParams& params, Stream stream) {
  LaunchOrder order;
  if (Status status = LaunchNormedLinear(params.norm, params.gate_up, stream, &order); !status.ok()) return status;
  return LaunchLinear(params.down, stream, order);
}

}  // namespace xla_gpu
