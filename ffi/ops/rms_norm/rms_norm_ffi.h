// The checks of an RMS norm's attributes and weight, for every handler that has one.
#ifndef XLA_GPU_OPS_RMS_NORM_RMS_NORM_FFI_H_
#define XLA_GPU_OPS_RMS_NORM_RMS_NORM_FFI_H_

#include <optional>

#include "ffi/handlers/check.h"
#include "ffi/ops/rms_norm/rms_norm.h"

namespace xla_gpu {

struct NormAttributes {
  float eps, weight_offset;
  bool round_once;
};

ffi::Error GetNormAttributes(const char* op, const NormAttributes& attributes, RmsNormParams* params);

// The norm of x's rows by `norm_weight`, or none where that is not given. Sets everything but `out`.
ffi::Error GetNorm(const char* op, const ffi::AnyBuffer& x, const std::optional<ffi::AnyBuffer>& norm_weight,
                   const NormAttributes& attributes, RmsNormParams* params);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_RMS_NORM_RMS_NORM_FFI_H_
