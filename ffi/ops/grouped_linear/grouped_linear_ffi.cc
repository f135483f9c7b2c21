// grouped_linear: checks and bindings of the host and CUDA handlers.
#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <string>

#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/ops/grouped_linear/grouped_linear.h"

namespace xla_gpu {

// `optional` operands follow x, weight and group_sizes in this order, those that are given.
struct GroupedLinearAttributes {
  bool bias;
  bool weight_scale;
  bool weight_zero_point;
};

}  // namespace xla_gpu

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(xla_gpu::GroupedLinearAttributes, ::xla::ffi::StructMember<bool>("bias"),
                                      ::xla::ffi::StructMember<bool>("weight_scale"),
                                      ::xla::ffi::StructMember<bool>("weight_zero_point"));

namespace xla_gpu {
namespace {

constexpr char kGroupedOp[] = "grouped_linear";
constexpr int64_t kGroupedMultiple = 16;  // of n and k
constexpr int64_t kGroupedMaxRows = (1 << 30) - 1;
constexpr int64_t kGroupedMaxSize = std::numeric_limits<int32_t>::max() / 4;  // of n and k

using OptionalBuffer = std::optional<ffi::AnyBuffer>;

// Reads the format, which follows from the dtypes, and the sizes.
ffi::Error GetGroupedFormat(const ffi::AnyBuffer& weight, const OptionalBuffer& scale, GroupedLinearParams* params) {
  GroupedLinearParams& p = *params;
  const ffi::DataType stored = weight.element_type();
  const bool bytes_scale = scale && scale->element_type() == ffi::DataType::U8;
  XLA_GPU_RETURN_IF_ERROR(CheckRank(kGroupedOp, "weight", weight, 3));
  if (ToDType(stored) == p.dtype) {
    p.format = GroupedFormat::kPlain;
  } else if (stored == ffi::DataType::F8E4M3FN) {
    p.format = GroupedFormat::kFloat8;
  } else if (stored == ffi::DataType::S8) {
    p.format = GroupedFormat::kInt8;
  } else if (stored == ffi::DataType::U8) {
    p.format = bytes_scale ? GroupedFormat::kMxfp4 : GroupedFormat::kInt4;
  } else {
    return Mismatch(
        kGroupedOp, "weight",
        StrCat(DTypeText(FloatType(p.dtype)), " (as x), float8_e4m3fn, int8 or uint8 (packed int4 or mxfp4)"),
        DTypeText(stored));
  }
  const int64_t multiple = p.format == GroupedFormat::kInt4    ? kQuantGroup
                           : p.format == GroupedFormat::kMxfp4 ? kMxfp4Group
                                                               : kGroupedMultiple;
  if (p.k < multiple || p.k % multiple != 0) {
    return Mismatch(kGroupedOp, "x", StrCat("k a multiple of ", multiple), StrCat("k = ", p.k));
  }
  if (p.k > kGroupedMaxSize) return Mismatch(kGroupedOp, "x", StrCat("k up to ", kGroupedMaxSize), StrCat("k = ", p.k));
  p.num_groups = weight.dimensions()[0];
  p.n = weight.dimensions()[1];
  const std::string shape = StrCat("shape ", ShapeText(weight.dimensions()));
  if (p.num_groups < 1 || p.num_groups > kMaxGroups) {
    return Mismatch(kGroupedOp, "weight", StrCat("1 to ", kMaxGroups, " groups"), shape);
  }
  if (p.n < kGroupedMultiple || p.n % kGroupedMultiple != 0) {
    return Mismatch(kGroupedOp, "weight", StrCat("n a multiple of ", kGroupedMultiple), shape);
  }
  if (p.n > kGroupedMaxSize) return Mismatch(kGroupedOp, "weight", StrCat("n up to ", kGroupedMaxSize), shape);
  p.weight = weight.untyped_data();
  return CheckShape(kGroupedOp, "weight", weight, {p.num_groups, p.n, stored == ffi::DataType::U8 ? p.k / 2 : p.k});
}

ffi::Error GetGroupedZeroPoint(const ffi::AnyBuffer& zero_point, GroupedLinearParams* params) {
  GroupedLinearParams& p = *params;
  if (p.format != GroupedFormat::kInt4) {
    return Mismatch(kGroupedOp, "weight_zero_point", "none, since weight is not packed int4", "an array");
  }
  XLA_GPU_RETURN_IF_ERROR(CheckDType(kGroupedOp, "weight_zero_point", zero_point, ffi::DataType::U8));
  XLA_GPU_RETURN_IF_ERROR(
      CheckShape(kGroupedOp, "weight_zero_point", zero_point, {p.num_groups, p.n, p.k / kQuantGroup}));
  p.zero_point = static_cast<const uint8_t*>(zero_point.untyped_data());
  return ffi::Error::Success();
}

ffi::Error GetGroupedScale(const OptionalBuffer& scale, GroupedLinearParams* params) {
  constexpr char kName[] = "weight_scale";
  GroupedLinearParams& p = *params;
  p.scale = WeightScale::kNone;
  if (p.format == GroupedFormat::kPlain) {
    return scale ? Mismatch(kGroupedOp, kName, "none, since weight is of x's dtype", "an array")
                 : ffi::Error::Success();
  }
  if (!scale) return Mismatch(kGroupedOp, kName, "an array, since weight is quantised", "none");
  p.weight_scale = scale->untyped_data();
  if (p.format == GroupedFormat::kMxfp4) {
    p.scale = WeightScale::kGroup;
    return CheckShape(kGroupedOp, kName, *scale, {p.num_groups, p.n, p.k / kMxfp4Group});
  }
  if (p.format == GroupedFormat::kInt4) {
    p.scale = WeightScale::kGroup;
    if (scale->element_type() != FloatType(p.dtype)) {
      return Mismatch(kGroupedOp, kName,
                      StrCat(DTypeText(FloatType(p.dtype)), " (as x) of packed int4, uint8 of mxfp4"),
                      DTypeText(scale->element_type()));
    }
    return CheckShape(kGroupedOp, kName, *scale, {p.num_groups, p.n, p.k / kQuantGroup});
  }
  XLA_GPU_RETURN_IF_ERROR(CheckDType(kGroupedOp, kName, *scale, ffi::DataType::F32));
  if (p.format == GroupedFormat::kFloat8 && scale->dimensions().size() == 3) {
    p.scale = WeightScale::kBlock;
    const int64_t blocks = (p.n + kQuantGroup - 1) / kQuantGroup, groups = (p.k + kQuantGroup - 1) / kQuantGroup;
    return CheckShape(kGroupedOp, kName, *scale, {p.num_groups, blocks, groups});
  }
  p.scale = WeightScale::kChannel;
  return CheckShape(kGroupedOp, kName, *scale, {p.num_groups, p.n});
}

ffi::Error GetParams(const ffi::RemainingArgs& args, const GroupedLinearAttributes& attributes,
                     GroupedLinearParams* params) {
  GroupedLinearParams& p = *params;
  const bool given[] = {attributes.weight_scale, attributes.weight_zero_point, attributes.bias};
  const size_t count = 3 + std::count(std::begin(given), std::end(given), true);
  if (args.size() != count) {
    return Mismatch(kGroupedOp, "operands", StrCat(count, " for these attributes"), StrCat(args.size()));
  }
  size_t next = 3;
  OptionalBuffer optional[3];
  for (size_t i = 0; i < 3; ++i) {
    if (given[i]) optional[i] = *args.get<ffi::AnyBuffer>(next++);
  }
  const auto& [scale, zero_point, bias] = optional;
  const ffi::AnyBuffer x = *args.get<ffi::AnyBuffer>(0), sizes = *args.get<ffi::AnyBuffer>(2);
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(kGroupedOp, "x", x, &p.dtype));
  if (p.dtype == DType::kF32) return Mismatch(kGroupedOp, "x", "float16 or bfloat16", "float32");
  XLA_GPU_RETURN_IF_ERROR(CheckRank(kGroupedOp, "x", x, 2));
  p.rows = x.dimensions()[0];
  p.k = x.dimensions()[1];
  p.x = x.untyped_data();
  if (p.rows > kGroupedMaxRows) {
    return Mismatch(kGroupedOp, "x", StrCat("up to ", kGroupedMaxRows, " rows"), StrCat(p.rows));
  }
  XLA_GPU_RETURN_IF_ERROR(GetGroupedFormat(*args.get<ffi::AnyBuffer>(1), scale, &p));
  XLA_GPU_RETURN_IF_ERROR(CheckDType(kGroupedOp, "group_sizes", sizes, ffi::DataType::S32));
  XLA_GPU_RETURN_IF_ERROR(CheckShape(kGroupedOp, "group_sizes", sizes, {p.num_groups}));
  p.group_sizes = static_cast<const int32_t*>(sizes.untyped_data());
  XLA_GPU_RETURN_IF_ERROR(GetGroupedScale(scale, &p));
  if (zero_point) XLA_GPU_RETURN_IF_ERROR(GetGroupedZeroPoint(*zero_point, &p));
  if (bias) {
    XLA_GPU_RETURN_IF_ERROR(CheckDType(kGroupedOp, "bias", *bias, x.element_type()));
    XLA_GPU_RETURN_IF_ERROR(CheckShape(kGroupedOp, "bias", *bias, {p.num_groups, p.n}));
    p.bias = bias->untyped_data();
  }
  return ffi::Error::Success();
}

// On the host alone: on a GPU zero points past 127 make the features that use them NaN.
Status CheckGroupedZeroPoints(const GroupedLinearParams& p) {
  const int64_t scales = p.k / kQuantGroup;
  for (int64_t i = 0; p.zero_point != nullptr && i < p.num_groups * p.n * scales; ++i) {
    if (p.zero_point[i] <= 127) continue;
    return Status::InvalidArgument(StrCat(kGroupedOp, ": weight_zero_point: expected values of 0 to 127, got ",
                                          int{p.zero_point[i]}, " at [", i / scales / p.n, ", ", i / scales % p.n, ", ",
                                          i % scales, "]"));
  }
  return Status::Ok();
}

template <typename Run>
ffi::Error GroupedLinear(const ffi::RemainingArgs& args, const ffi::AnyBuffer& out,
                         const GroupedLinearAttributes& attributes, Run&& run) {
  return NoThrow(kGroupedOp, [&]() -> ffi::Error {
    GroupedLinearParams p{};
    XLA_GPU_RETURN_IF_ERROR(GetParams(args, attributes, &p));
    XLA_GPU_RETURN_IF_ERROR(CheckDType(kGroupedOp, "result", out, FloatType(p.dtype)));
    XLA_GPU_RETURN_IF_ERROR(CheckShape(kGroupedOp, "result", out, {p.rows, p.n}));
    p.out = out.untyped_data();
    return ToError(run(p));
  });
}

ffi::Error GroupedLinearHost(CallContext context, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> out,
                             GroupedLinearAttributes attributes) {
  return GroupedLinear(args, *out, attributes, [&](const GroupedLinearParams& p) {
    const Status status = CheckGroupedZeroPoints(p);
    return status.ok() ? RunGroupedLinear(p, XlaExecutor(context)) : status;
  });
}

#ifdef XLA_GPU_WITH_CUDA
ffi::Error GroupedLinearCuda(CallContext context, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> out,
                             GroupedLinearAttributes attributes) {
  return GroupedLinear(args, *out, attributes,
                       [&](const GroupedLinearParams& p) { return LaunchGroupedLinear(p, context.stream()); });
}
#endif

}  // namespace

#define XLA_GPU_GROUPED_LINEAR_SIGNATURE RemainingArgs().Ret<ffi::AnyBuffer>().Attrs<GroupedLinearAttributes>()

XLA_GPU_DEFINE_HANDLER(xla_gpu_grouped_linear_host, GroupedLinearHost, XLA_GPU_BIND().XLA_GPU_GROUPED_LINEAR_SIGNATURE);
#ifdef XLA_GPU_WITH_CUDA
XLA_GPU_DEFINE_HANDLER(xla_gpu_grouped_linear_cuda, GroupedLinearCuda, XLA_GPU_BIND().XLA_GPU_GROUPED_LINEAR_SIGNATURE,
                       CaptureTraits());
#endif

}  // namespace xla_gpu
