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

void Call::Sample() {
  target_ = "xla_gpu_sample";
  const int64_t rows = input_.Below(4);
  Add(&operands_, kFloats[input_.Below(3)], {rows, 1 + input_.Below(40)});
  Add(&operands_, XLA_FFI_DataType_F32, {rows});  // temperature
  AddNumbers(XLA_FFI_DataType_S32, {rows}, 40);   // top_k
  Add(&operands_, XLA_FFI_DataType_F32, {rows});  // top_p
  Add(&operands_, XLA_FFI_DataType_F32, {rows});  // min_p
  // Numbers that the handler takes: random bits are rarely between 0 and 1.
  if (!input_.Once(4)) {
    for (const size_t operand : {1, 3, 4}) {
      auto* values = static_cast<float*>(operands_[operand].data);
      for (int64_t row = 0; row < rows; ++row) values[row] = static_cast<float>(input_.Below(11)) / 10.0f;
    }
  }
  AddNumbers(input_.Once(2) ? XLA_FFI_DataType_S64 : XLA_FFI_DataType_S32, {rows}, 100);  // seed
  AddNumbers(XLA_FFI_DataType_S32, {rows}, 100);                                          // step
  Add(&results_, XLA_FFI_DataType_S32, {rows});
  Add(&results_, XLA_FFI_DataType_F32, {rows});
  AddScalar("check_inputs", XLA_FFI_DataType_PRED, input_.Once(2));
}

}  // namespace xla_gpu::fuzz
