// gated_mlp: checks and bindings of the host and CUDA handlers.
#include <string_view>
#include <utility>

#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/handlers/optional_operands.h"
#include "ffi/ops/gated_mlp/gated_mlp.h"
#include "ffi/ops/linear/linear_ffi.h"
#include "ffi/ops/rms_norm/rms_norm_ffi.h"

namespace xla_gpu {

struct GatedMlpAttributes {
  std::string_view activation;
  bool check_inputs;
  float eps;
  int64_t given;  // of the optional operands, a bit each in their order
  bool round_once;
  float weight_offset;
};

}  // namespace xla_gpu

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(xla_gpu::GatedMlpAttributes,
                                      ::xla::ffi::StructMember<std::string_view>("activation"),
                                      ::xla::ffi::StructMember<bool>("check_inputs"),
                                      ::xla::ffi::StructMember<float>("eps"),
                                      ::xla::ffi::StructMember<int64_t>("given"),
                                      ::xla::ffi::StructMember<bool>("round_once"),
                                      ::xla::ffi::StructMember<float>("weight_offset"));

namespace xla_gpu {
namespace {

constexpr char kGatedMlpOp[] = "gated_mlp";
constexpr LinearNames kGateUpNames = {kGatedMlpOp,          "x",           "gate_up_weight", "gate_up_scale",
                                      "gate_up_zero_point", "gate_up_bias"};
constexpr LinearNames kDownNames = {kGatedMlpOp,  "gate_up_weight",  "down_weight",
                                    "down_scale", "down_zero_point", "down_bias"};

namespace gated_mlp_operand {
enum {
  kX,
  kGateUpWeight,
  kDownWeight,
  kNormWeight,  // the first optional one
  kResidual,
  kGateUpScale,
  kGateUpZeroPoint,
  kGateUpBias,
  kDownScale,
  kDownZeroPoint,
  kDownBias,
  kNumOperands,
};
}  // namespace gated_mlp_operand
using GatedMlpOperands = OptionalOperands<gated_mlp_operand::kNumOperands, gated_mlp_operand::kNormWeight>;

ffi::Error GetParams(const ffi::RemainingArgs& args, const GatedMlpAttributes& attributes, GatedMlpParams* params) {
  GatedMlpParams& p = *params;
  namespace operand = gated_mlp_operand;
  GatedMlpOperands operands;
  XLA_GPU_RETURN_IF_ERROR(operands.Get(kGatedMlpOp, args, attributes.given));
  const ffi::AnyBuffer& x = *operands[operand::kX];
  DType dtype;
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(kGatedMlpOp, "x", x, &dtype));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(kGatedMlpOp, "x", x, 2));
  const int64_t rows = x.dimensions()[0], hidden = x.dimensions()[1];
  // ---- norm
  XLA_GPU_RETURN_IF_ERROR(GetNorm(kGatedMlpOp, x, operands[operand::kNormWeight],
                                  {attributes.eps, attributes.weight_offset, attributes.round_once}, &p.norm));
  // ---- gate and up
  p.gate_up.dtype = p.down.dtype = dtype;
  p.gate_up.rows = p.down.rows = rows;
  p.gate_up.k = hidden;
  p.gate_up.x = x.untyped_data();
  XLA_GPU_RETURN_IF_ERROR(GetActivation(kGatedMlpOp, attributes.activation, &p.gate_up.activation));
  if (p.gate_up.activation == Activation::kNone) {
    return Mismatch(kGatedMlpOp, "activation", "silu_and_mul or gelu_and_mul", "'none'");
  }
  XLA_GPU_RETURN_IF_ERROR(GetLinearWeight(kGateUpNames,
                                          {*operands[operand::kGateUpWeight], operands[operand::kGateUpScale],
                                           operands[operand::kGateUpZeroPoint], operands[operand::kGateUpBias]},
                                          &p.gate_up));
  // ---- down
  p.down.k = p.gate_up.out_features();
  XLA_GPU_RETURN_IF_ERROR(GetLinearWeight(kDownNames,
                                          {*operands[operand::kDownWeight], operands[operand::kDownScale],
                                           operands[operand::kDownZeroPoint], operands[operand::kDownBias]},
                                          &p.down));
  if (const auto& residual = operands[operand::kResidual]) {
    XLA_GPU_RETURN_IF_ERROR(CheckDType(kGatedMlpOp, "residual", *residual, x.element_type()));
    XLA_GPU_RETURN_IF_ERROR(CheckShape(kGatedMlpOp, "residual", *residual, {rows, p.down.n}));
    p.down.residual = residual->untyped_data();
  }
  return ffi::Error::Success();
}

// `check` looks at zero points, `run` computes.
template <typename Check, typename Run>
ffi::Error GatedMlp(const ffi::RemainingArgs& args, const ffi::AnyBuffer& out, const ffi::AnyBuffer& scratch,
                    const GatedMlpAttributes& attributes, Check&& check, Run&& run) {
  return NoThrow(kGatedMlpOp, [&]() -> ffi::Error {
    GatedMlpParams p{};
    XLA_GPU_RETURN_IF_ERROR(GetParams(args, attributes, &p));
    XLA_GPU_RETURN_IF_ERROR(
        CheckDType(kGatedMlpOp, "result", out, args.get<ffi::AnyBuffer>(gated_mlp_operand::kX)->element_type()));
    XLA_GPU_RETURN_IF_ERROR(CheckShape(kGatedMlpOp, "result", out, {p.down.rows, p.down.n}));
    p.down.out = out.untyped_data();
    const int64_t bytes = PlaceGatedMlp(&p, scratch.untyped_data());
    XLA_GPU_RETURN_IF_ERROR(CheckScratch(kGatedMlpOp, scratch, bytes));
    for (const auto& [names, part] : {std::pair(kGateUpNames, p.gate_up), std::pair(kDownNames, p.down)}) {
      if (part.zero_point != nullptr) XLA_GPU_RETURN_IF_ERROR(ToError(check(names, part)));
    }
    if (p.down.rows == 0) return ffi::Error::Success();
    return ToError(run(p));
  });
}

ffi::Error GatedMlpHost(CallContext context, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> out,
                        ffi::Result<ffi::AnyBuffer> scratch, GatedMlpAttributes attributes) {
  return GatedMlp(
      args, *out, *scratch, attributes,
      [](const LinearNames& names, const LinearParams& part) { return CheckZeroPoints(names, part, part.zero_point); },
      [&](const GatedMlpParams& p) { return RunGatedMlp(p, XlaExecutor(context)); });
}

ffi::Error GatedMlpScratch(ffi::RemainingArgs args, ffi::Result<ffi::BufferR0<ffi::S64>> bytes,
                           GatedMlpAttributes attributes) {
  return NoThrow(kGatedMlpOp, [&]() -> ffi::Error {
    GatedMlpParams p{};
    XLA_GPU_RETURN_IF_ERROR(GetParams(args, attributes, &p));
    *bytes->typed_data() = PlaceGatedMlp(&p, nullptr);
    return ffi::Error::Success();
  });
}

#ifdef XLA_GPU_WITH_CUDA
ffi::Error GatedMlpCuda(CallContext context, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> out,
                        ffi::Result<ffi::AnyBuffer> scratch, GatedMlpAttributes attributes) {
  return GatedMlp(
      args, *out, *scratch, attributes,
      [&](const LinearNames& names, const LinearParams& part) {
        return attributes.check_inputs ? CheckZeroPointsOnDevice(names, part, context.stream()) : Status::Ok();
      },
      [&](const GatedMlpParams& p) { return LaunchGatedMlp(p, context.stream()); });
}
#endif

}  // namespace

#define XLA_GPU_GATED_MLP_SIGNATURE \
  RemainingArgs().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attrs<GatedMlpAttributes>()

XLA_GPU_DEFINE_HANDLER(xla_gpu_gated_mlp_host, GatedMlpHost, XLA_GPU_BIND().XLA_GPU_GATED_MLP_SIGNATURE);
XLA_GPU_DEFINE_SCRATCH(xla_gpu_gated_mlp_scratch_bytes, GatedMlpScratch,
                       ffi::Ffi::Bind().RemainingArgs().Ret<ffi::BufferR0<ffi::S64>>().Attrs<GatedMlpAttributes>());
#ifdef XLA_GPU_WITH_CUDA
XLA_GPU_DEFINE_HANDLER(xla_gpu_gated_mlp_cuda, GatedMlpCuda, XLA_GPU_BIND().XLA_GPU_GATED_MLP_SIGNATURE,
                       CaptureTraits());
#endif

}  // namespace xla_gpu
