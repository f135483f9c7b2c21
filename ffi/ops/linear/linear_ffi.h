// The checks of a weight matrix in any of linear's formats, for every handler that takes one.
#ifndef XLA_GPU_OPS_LINEAR_LINEAR_FFI_H_
#define XLA_GPU_OPS_LINEAR_LINEAR_FFI_H_

#include <cstdint>
#include <optional>
#include <string_view>

#include "ffi/handlers/check.h"
#include "ffi/ops/linear/linear.h"

namespace xla_gpu {

// What an operator calls a weight and what belongs to it.
struct LinearNames {
  const char* op;
  const char* k;  // the argument that k is taken from
  const char* weight;
  const char* scale;
  const char* zero_point;
  const char* bias;
};

struct LinearWeightOperands {
  ffi::AnyBuffer weight;
  std::optional<ffi::AnyBuffer> scale;
  std::optional<ffi::AnyBuffer> zero_point;
  std::optional<ffi::AnyBuffer> bias;
};

// "none", or an activation's name, of the attribute `activation`.
ffi::Error GetActivation(const char* op, std::string_view name, Activation* activation);

// Reads the weight, whose format follows from its dtype, and n from its shape, for params->rows, k and dtype.
ffi::Error GetLinearWeight(const LinearNames& names, const LinearWeightOperands& operands, LinearParams* params);

// The error for a zero point past 127; `zero_points` is host memory.
Status CheckZeroPoints(const LinearNames& names, const LinearParams& params, const uint8_t* zero_points);
#ifdef XLA_GPU_WITH_CUDA
// The same for zero points on the device, of which it checks a copy.
Status CheckZeroPointsOnDevice(const LinearNames& names, const LinearParams& params, Stream stream);
#endif

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_LINEAR_LINEAR_FFI_H_
