#include "ffi/ops/gated_mlp/gated_mlp.h"

namespace xla_gpu {

Status RunGatedMlp(const GatedMlpParams& params, const Executor& executor) {
  if (params.norm.weight != nullptr) {
    if (Status status = RunRmsNorm(params.norm, executor); !status.ok()) return status;
  }
  if (Status status = RunLinear(params.gate_up, executor); !status.ok()) return status;
  return RunLinear(params.down, executor);
}

}  // namespace xla_gpu
