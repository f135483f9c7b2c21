// Calls of the operators around attention and matrix products.
#include "ffi/testing/fuzz/call.h"

namespace xla_gpu::fuzz {

void Call::RmsNorm() {
  target_ = "xla_gpu_rms_norm";
  const int32_t dtype = kFloats[input_.Below(3)];
  const bool with_residual = input_.Once(2);
  const Shape shape = {input_.Below(4), input_.Below(40)};
  Add(&operands_, dtype, shape);
  Add(&operands_, dtype, {shape[1]});
  if (with_residual) Add(&operands_, dtype, shape);
  for (int i = 0; i < 1 + with_residual; ++i) Add(&results_, dtype, shape);
  AddScalar("eps", XLA_FFI_DataType_F32, input_.Once(8) ? input_.Raw<float>() : 1e-5f);
  AddScalar("weight_offset", XLA_FFI_DataType_F32, input_.Once(8) ? input_.Raw<float>() : 1.0f);
  AddScalar("round_once", XLA_FFI_DataType_PRED, input_.Once(2));
  AddScalar("has_residual", XLA_FFI_DataType_PRED, with_residual);
}

void Call::SiluAndMul() {
  target_ = input_.Once(2) ? "xla_gpu_silu_and_mul" : "xla_gpu_gelu_and_mul";
  const int32_t dtype = kFloats[input_.Below(3)];
  const Shape out = {input_.Below(4), input_.Below(40)};
  Add(&operands_, dtype, {out[0], 2 * out[1]});
  Add(&results_, dtype, out);
}

}  // namespace xla_gpu::fuzz
