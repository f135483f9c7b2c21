// gated_mlp: norm, gate and up projection, activation, down projection and residual as one call. It is made of the
// operators rms_norm and linear; what one hands to the next lies in scratch memory.
#ifndef XLA_GPU_OPS_GATED_MLP_GATED_MLP_H_
#define XLA_GPU_OPS_GATED_MLP_GATED_MLP_H_

#include <algorithm>
#include <cstdint>

#include "ffi/base/scratch_layout.h"
#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/host/executor.h"
#include "ffi/ops/linear/linear.h"
#include "ffi/ops/rms_norm/rms_norm.h"

namespace xla_gpu {

struct GatedMlpParams {
  RmsNormParams norm;    // weight is null without a norm
  LinearParams gate_up;  // [2 * intermediate, hidden], with the activation; x is the call's where there is no norm
  LinearParams down;     // [hidden, intermediate], with the residual; out is the call's
};

// Points the parts at one another's results, which lie in `scratch`. Returns the bytes of scratch memory.
inline int64_t PlaceGatedMlp(GatedMlpParams* params, void* scratch) {
  GatedMlpParams& p = *params;
  ScratchLayout layout(scratch);
  const auto item = static_cast<int64_t>(SizeOf(p.gate_up.dtype));
  if (p.norm.weight != nullptr) p.gate_up.x = p.norm.out = layout.Take(p.gate_up.rows * p.gate_up.k * item);
  p.down.x = p.gate_up.out = layout.Take(p.down.rows * p.down.k * item);
  // Each of the products has used its scratch memory when the next one writes to it.
  p.gate_up.scratch = p.down.scratch = layout.Take(std::max(LinearScratchBytes(p.gate_up), LinearScratchBytes(p.down)));
  return layout.bytes();
}

Status RunGatedMlp(const GatedMlpParams& params, const Executor& executor);
Status LaunchGatedMlp(const GatedMlpParams& params, Stream stream);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_GATED_MLP_GATED_MLP_H_
