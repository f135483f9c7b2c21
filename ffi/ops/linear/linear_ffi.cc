// linear: checks and bindings of the host and CUDA handlers.
#include "ffi/ops/linear/linear_ffi.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/device/host_copy.h"
#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/ops/linear/linear.h"

namespace xla_gpu {

// `optional` operands follow x and weight in this order, those that are given.
struct LinearAttributes {
  std::string_view activation;
  bool bias;
  bool check_inputs;
  bool residual;
  bool weight_scale;
  bool weight_zero_point;
};

}  // namespace xla_gpu

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(xla_gpu::LinearAttributes,
                                      ::xla::ffi::StructMember<std::string_view>("activation"),
                                      ::xla::ffi::StructMember<bool>("bias"),
                                      ::xla::ffi::StructMember<bool>("check_inputs"),
                                      ::xla::ffi::StructMember<bool>("residual"),
                                      ::xla::ffi::StructMember<bool>("weight_scale"),
                                      ::xla::ffi::StructMember<bool>("weight_zero_point"));

namespace xla_gpu {
namespace {

constexpr char kOp[] = "linear";
constexpr int64_t kMultiple = 16;  // of n and k
constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();

constexpr LinearNames kNames = {kOp, "x", "weight", "weight_scale", "weight_zero_point", "bias"};

ffi::Error GetFormat(const LinearNames& names, const ffi::AnyBuffer& weight, LinearParams* params) {
  LinearParams& p = *params;
  XLA_GPU_RETURN_IF_ERROR(CheckRank(names.op, names.weight, weight, 2));
  p.n = weight.dimensions()[0];
  const std::optional<DType> stored = ToDType(weight.element_type());
  if (stored == p.dtype) {
    p.format = WeightFormat::kPlain;
  } else if (weight.element_type() == ffi::DataType::F8E4M3FN) {
    p.format = WeightFormat::kFloat8;
  } else if (weight.element_type() == ffi::DataType::S8) {
    p.format = WeightFormat::kInt8;
  } else if (weight.element_type() == ffi::DataType::U8) {
    p.format = WeightFormat::kInt4;
  } else {
    return Mismatch(names.op, names.weight,
                    StrCat(DTypeText(FloatType(p.dtype)), " (as x), float8_e4m3fn, int8 or uint8 (packed int4)"),
                    DTypeText(weight.element_type()));
  }
  const bool int4 = p.format == WeightFormat::kInt4;
  const int64_t multiple = int4 ? kQuantGroup : kMultiple;
  if (p.k < multiple || p.k % multiple != 0) {
    return Mismatch(names.op, names.k, StrCat("k a multiple of ", multiple), StrCat("k = ", p.k));
  }
  if (p.k > kMaxSize) return Mismatch(names.op, names.k, StrCat("k up to ", kMaxSize), StrCat("k = ", p.k));
  const std::string shape = StrCat("shape ", ShapeText(weight.dimensions()));
  if (p.n < kMultiple || p.n % kMultiple != 0) {
    return Mismatch(names.op, names.weight, StrCat("n a multiple of ", kMultiple), shape);
  }
  if (p.n > kMaxSize) return Mismatch(names.op, names.weight, StrCat("n up to ", kMaxSize), shape);
  return CheckShape(names.op, names.weight, weight, {p.n, int4 ? p.k / 2 : p.k});
}

ffi::Error GetScale(const LinearNames& names, const std::optional<ffi::AnyBuffer>& scale,
                    const std::optional<ffi::AnyBuffer>& zero_point, LinearParams* params) {
  LinearParams& p = *params;
  p.scale = WeightScale::kNone;
  if (zero_point && p.format != WeightFormat::kInt4) {
    return Mismatch(names.op, names.zero_point, "none, since weight is not packed int4", "an array");
  }
  if (p.format == WeightFormat::kPlain) {
    return scale ? Mismatch(names.op, names.scale, "none, since weight is of x's dtype", "an array")
                 : ffi::Error::Success();
  }
  if (!scale) return Mismatch(names.op, names.scale, "an array, since weight is quantised", "none");
  p.weight_scale = scale->untyped_data();
  const int64_t groups = (p.k + kQuantGroup - 1) / kQuantGroup, blocks = (p.n + kQuantGroup - 1) / kQuantGroup;
  if (p.format == WeightFormat::kInt4) {
    p.scale = WeightScale::kGroup;
    XLA_GPU_RETURN_IF_ERROR(CheckDType(names.op, names.scale, *scale, FloatType(p.dtype)));
    XLA_GPU_RETURN_IF_ERROR(CheckShape(names.op, names.scale, *scale, {p.n, groups}));
    if (!zero_point) return ffi::Error::Success();
    XLA_GPU_RETURN_IF_ERROR(CheckDType(names.op, names.zero_point, *zero_point, ffi::DataType::U8));
    XLA_GPU_RETURN_IF_ERROR(CheckShape(names.op, names.zero_point, *zero_point, {p.n, groups}));
    p.zero_point = static_cast<const uint8_t*>(zero_point->untyped_data());
    return ffi::Error::Success();
  }
  XLA_GPU_RETURN_IF_ERROR(CheckDType(names.op, names.scale, *scale, ffi::DataType::F32));
  auto dims = scale->dimensions();
  if (dims.size() == 1 && dims[0] == p.n) {
    p.scale = WeightScale::kChannel;
  } else if (p.format == WeightFormat::kFloat8 && dims.size() == 1 && dims[0] == 1) {
    p.scale = WeightScale::kTensor;
  } else if (p.format == WeightFormat::kFloat8 && dims.size() == 2 && dims[0] == blocks && dims[1] == groups) {
    p.scale = WeightScale::kBlock;
  } else {
    const std::string others = StrCat("shape [1], [", p.n, "] or [", blocks, ", ", groups, "]");
    return Mismatch(names.op, names.scale, p.format == WeightFormat::kFloat8 ? others : StrCat("shape [", p.n, "]"),
                    StrCat("shape ", ShapeText(dims)));
  }
  return ffi::Error::Success();
}

ffi::Error GetParams(const ffi::RemainingArgs& args, const LinearAttributes& attributes, LinearParams* params) {
  LinearParams& p = *params;
  const bool given[] = {attributes.weight_scale, attributes.weight_zero_point, attributes.bias, attributes.residual};
  const size_t count = 2 + std::count(std::begin(given), std::end(given), true);
  if (args.size() != count)
    return Mismatch(kOp, "operands", StrCat(count, " for these attributes"), StrCat(args.size()));
  size_t next = 2;
  std::optional<ffi::AnyBuffer> optional[4];
  for (size_t i = 0; i < 4; ++i) {
    if (given[i]) optional[i] = *args.get<ffi::AnyBuffer>(next++);
  }
  const auto& [scale, zero_point, bias, residual] = optional;
  const ffi::AnyBuffer x = *args.get<ffi::AnyBuffer>(0);
  XLA_GPU_RETURN_IF_ERROR(GetActivation(kOp, attributes.activation, &p.activation));
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(kOp, "x", x, &p.dtype));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(kOp, "x", x, 2));
  p.rows = x.dimensions()[0];
  p.k = x.dimensions()[1];
  p.x = x.untyped_data();
  XLA_GPU_RETURN_IF_ERROR(GetLinearWeight(kNames, {*args.get<ffi::AnyBuffer>(1), scale, zero_point, bias}, &p));
  if (residual) {
    XLA_GPU_RETURN_IF_ERROR(CheckDType(kOp, "residual", *residual, x.element_type()));
    XLA_GPU_RETURN_IF_ERROR(CheckShape(kOp, "residual", *residual, {p.rows, p.out_features()}));
    p.residual = residual->untyped_data();
  }
  return ffi::Error::Success();
}

}  // namespace

ffi::Error GetActivation(const char* op, std::string_view name, Activation* activation) {
  if (name == "none") {
    *activation = Activation::kNone;
  } else if (name == "silu_and_mul") {
    *activation = Activation::kSiluAndMul;
  } else if (name == "gelu_and_mul") {
    *activation = Activation::kGeluAndMul;
  } else {
    return Mismatch(op, "activation", "none, silu_and_mul or gelu_and_mul", StrCat("'", std::string(name), "'"));
  }
  return ffi::Error::Success();
}

ffi::Error GetLinearWeight(const LinearNames& names, const LinearWeightOperands& operands, LinearParams* params) {
  XLA_GPU_RETURN_IF_ERROR(GetFormat(names, operands.weight, params));
  XLA_GPU_RETURN_IF_ERROR(GetScale(names, operands.scale, operands.zero_point, params));
  params->weight = operands.weight.untyped_data();
  if (const auto& bias = operands.bias) {
    XLA_GPU_RETURN_IF_ERROR(CheckDType(names.op, names.bias, *bias, FloatType(params->dtype)));
    XLA_GPU_RETURN_IF_ERROR(CheckShape(names.op, names.bias, *bias, {params->n}));
    params->bias = bias->untyped_data();
  }
  return ffi::Error::Success();
}

Status CheckZeroPoints(const LinearNames& names, const LinearParams& p, const uint8_t* zero_points) {
  const int64_t groups = p.k / kQuantGroup;
  for (int64_t i = 0; i < p.n * groups; ++i) {
    if (zero_points[i] > 127) {
      return Status::InvalidArgument(StrCat(names.op, ": ", names.zero_point, ": expected values of 0 to 127, got ",
                                            int{zero_points[i]}, " for row ", i / groups, ", group ", i % groups));
    }
  }
  return Status::Ok();
}

#ifdef XLA_GPU_WITH_CUDA
Status CheckZeroPointsOnDevice(const LinearNames& names, const LinearParams& p, Stream stream) {
  std::vector<uint8_t> zero_points(p.n * (p.k / kQuantGroup));
  Status status = CopyToHost(zero_points.data(), p.zero_point, zero_points.size(), stream);
  return status.ok() ? CheckZeroPoints(names, p, zero_points.data()) : status;
}
#endif

namespace {

template <typename Check, typename Run>
ffi::Error Linear(const ffi::RemainingArgs& args, const ffi::AnyBuffer& out, const ffi::AnyBuffer& scratch,
                  const LinearAttributes& attributes, Check&& check, Run&& run) {
  return NoThrow(kOp, [&]() -> ffi::Error {
    LinearParams p{};
    XLA_GPU_RETURN_IF_ERROR(GetParams(args, attributes, &p));
    XLA_GPU_RETURN_IF_ERROR(CheckDType(kOp, "result", out, args.get<ffi::AnyBuffer>(0)->element_type()));
    XLA_GPU_RETURN_IF_ERROR(CheckShape(kOp, "result", out, {p.rows, p.out_features()}));
    p.out = out.untyped_data();
    XLA_GPU_RETURN_IF_ERROR(CheckScratch(kOp, scratch, LinearScratchBytes(p)));
    p.scratch = scratch.untyped_data();
    if (p.zero_point != nullptr) XLA_GPU_RETURN_IF_ERROR(ToError(check(p)));
    return ToError(run(p));
  });
}

ffi::Error LinearHost(CallContext context, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> out,
                      ffi::Result<ffi::AnyBuffer> scratch, LinearAttributes attributes) {
  return Linear(
      args, *out, *scratch, attributes, [](const LinearParams& p) { return CheckZeroPoints(kNames, p, p.zero_point); },
      [&](const LinearParams& p) { return RunLinear(p, XlaExecutor(context)); });
}

ffi::Error LinearScratch(ffi::RemainingArgs args, ffi::Result<ffi::BufferR0<ffi::S64>> bytes,
                         LinearAttributes attributes) {
  return NoThrow(kOp, [&]() -> ffi::Error {
    LinearParams p{};
    XLA_GPU_RETURN_IF_ERROR(GetParams(args, attributes, &p));
    *bytes->typed_data() = LinearScratchBytes(p);
    return ffi::Error::Success();
  });
}

#ifdef XLA_GPU_WITH_CUDA
ffi::Error LinearCuda(CallContext context, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> out,
                      ffi::Result<ffi::AnyBuffer> scratch, LinearAttributes attributes) {
  const auto check = [&](const LinearParams& p) {
    return attributes.check_inputs ? CheckZeroPointsOnDevice(kNames, p, context.stream()) : Status::Ok();
  };
  return Linear(args, *out, *scratch, attributes, check,
                [&](const LinearParams& p) { return LaunchLinear(p, context.stream()); });
}
#endif

}  // namespace

#define XLA_GPU_LINEAR_SIGNATURE RemainingArgs().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attrs<LinearAttributes>()

XLA_GPU_DEFINE_HANDLER(xla_gpu_linear_host, LinearHost, XLA_GPU_BIND().XLA_GPU_LINEAR_SIGNATURE);
XLA_GPU_DEFINE_SCRATCH(xla_gpu_linear_scratch_bytes, LinearScratch,
                       ffi::Ffi::Bind().RemainingArgs().Ret<ffi::BufferR0<ffi::S64>>().Attrs<LinearAttributes>());
#ifdef XLA_GPU_WITH_CUDA
XLA_GPU_DEFINE_HANDLER(xla_gpu_linear_cuda, LinearCuda, XLA_GPU_BIND().XLA_GPU_LINEAR_SIGNATURE, CaptureTraits());
#endif

}  // namespace xla_gpu
