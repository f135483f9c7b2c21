// A norm and the product behind it, as the first kernels of an operator that is made of several.
#ifndef XLA_GPU_OPS_LINEAR_NORMED_LINEAR_H_
#define XLA_GPU_OPS_LINEAR_NORMED_LINEAR_H_

#include "ffi/base/status.h"
#include "ffi/device/launch_order.h"
#include "ffi/device/stream.h"
#include "ffi/ops/linear/linear.h"
#include "ffi/ops/rms_norm/rms_norm.h"

namespace xla_gpu {

// Launches the norm, unless its weight is null, and the product. The norm starts when everything before it has ended;
// then `order` is kDependent, for the product and for the kernel behind it. Without a norm it is kFirst for both. What
// the norm writes is for the product alone: the normed rows, or what the product's kernel makes of them.
Status LaunchNormedLinear(const RmsNormParams& norm, const LinearParams& linear, Stream stream, LaunchOrder* order);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_LINEAR_NORMED_LINEAR_H_
