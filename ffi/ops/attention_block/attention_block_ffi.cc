// attention_block: checks and bindings of the host and CUDA handlers.
#include <initializer_list>
#include <utility>

#include "ffi/device/host_copy.h"
#include "ffi/handlers/cache_layout.h"
#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/handlers/optional_operands.h"
#include "ffi/ops/attention_block/attention_block.h"
#include "ffi/ops/linear/linear_ffi.h"
#include "ffi/ops/paged_attention/paged_attention_ffi.h"
#include "ffi/ops/rms_norm/rms_norm_ffi.h"
#include "ffi/ops/rotary_embedding/rotary_embedding_ffi.h"

namespace xla_gpu {

struct AttentionBlockAttributes {
  bool check_inputs;
  float eps;
  int64_t given;  // of the optional operands, a bit each in their order
  bool interleaved;
  bool round_once;
  float scale;
  int64_t sliding_window;
  float soft_cap;
  float weight_offset;
};

}  // namespace xla_gpu

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    xla_gpu::AttentionBlockAttributes, ::xla::ffi::StructMember<bool>("check_inputs"),
    ::xla::ffi::StructMember<float>("eps"), ::xla::ffi::StructMember<int64_t>("given"),
    ::xla::ffi::StructMember<bool>("interleaved"), ::xla::ffi::StructMember<bool>("round_once"),
    ::xla::ffi::StructMember<float>("scale"), ::xla::ffi::StructMember<int64_t>("sliding_window"),
    ::xla::ffi::StructMember<float>("soft_cap"), ::xla::ffi::StructMember<float>("weight_offset"));

namespace xla_gpu {
namespace {

constexpr char kAttentionBlockOp[] = "attention_block";
constexpr LinearNames kQkvNames = {kAttentionBlockOp, "x", "qkv_weight", "qkv_scale", "qkv_zero_point", "qkv_bias"};
// `k`: the operand that says how many values of k there are.
constexpr LinearNames OutNames(const char* k) {
  return {kAttentionBlockOp, k, "out_weight", "out_scale", "out_zero_point", "out_bias"};
}

namespace attention_block_operand {
enum {
  kX,
  kQkvWeight,  // optional, as the next one
  kOutWeight,
  kPositions,
  kTable,
  kCache,
  kSlotMapping,
  kContextLens,
  kBlockTables,
  kQueryStartLoc,
  kNumSeqs,
  kNormWeight,  // optional, as all that follow
  kResidual,
  kQkvScale,
  kQkvZeroPoint,
  kQkvBias,
  kQNormWeight,
  kKNormWeight,
  kKScale,
  kVScale,
  kSinks,
  kOutScale,
  kOutZeroPoint,
  kOutBias,
  kNumOperands,
};
}  // namespace attention_block_operand
using AttentionBlockOperands =
    OptionalOperands<attention_block_operand::kNumOperands, attention_block_operand::kQkvWeight>;

// Operands that belong to a product, where the call has none.
ffi::Error CheckAbsent(const AttentionBlockOperands& operands, const char* weight,
                       std::initializer_list<std::pair<int, const char*>> names) {
  for (const auto& [index, name] : names) {
    if (operands[index]) return Mismatch(kAttentionBlockOp, name, StrCat("none without ", weight), "an array");
  }
  return ffi::Error::Success();
}

// From rows of x to rows of query, and the cache.
ffi::Error GetProjection(const AttentionBlockOperands& operands, const ffi::AnyBuffer& cache_out,
                         const AttentionBlockAttributes& attributes, AttentionBlockParams* params) {
  namespace operand = attention_block_operand;
  AttentionBlockParams& p = *params;
  const ffi::AnyBuffer& x = *operands[operand::kX];
  DType dtype;
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(kAttentionBlockOp, "x", x, &dtype));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(kAttentionBlockOp, "x", x, 2));
  p.qkv.dtype = p.out.dtype = p.rotary.dtype = dtype;
  p.qkv.rows = p.out.rows = p.rotary.num_tokens = x.dimensions()[0];
  p.qkv.k = x.dimensions()[1];
  p.qkv.x = x.untyped_data();
  const NormAttributes norm = {attributes.eps, attributes.weight_offset, attributes.round_once};
  p.has_qkv_product = operands[operand::kQkvWeight].has_value();
  if (p.has_qkv_product) {
    XLA_GPU_RETURN_IF_ERROR(GetNorm(kAttentionBlockOp, x, operands[operand::kNormWeight], norm, &p.norm));
    XLA_GPU_RETURN_IF_ERROR(GetLinearWeight(kQkvNames,
                                            {*operands[operand::kQkvWeight], operands[operand::kQkvScale],
                                             operands[operand::kQkvZeroPoint], operands[operand::kQkvBias]},
                                            &p.qkv));
  } else {
    XLA_GPU_RETURN_IF_ERROR(GetNormAttributes(kAttentionBlockOp, norm, &p.norm));
    XLA_GPU_RETURN_IF_ERROR(CheckAbsent(operands, "qkv_weight",
                                        {{operand::kNormWeight, "norm_weight"},
                                         {operand::kQkvScale, "qkv_scale"},
                                         {operand::kQkvZeroPoint, "qkv_zero_point"},
                                         {operand::kQkvBias, "qkv_bias"}}));
  }
  XLA_GPU_RETURN_IF_ERROR(GetRotaryAndCacheParams(
      kAttentionBlockOp, p.has_qkv_product ? "qkv_weight" : "x", p.has_qkv_product ? p.qkv.n : p.qkv.k,
      {*operands[operand::kPositions], *operands[operand::kTable], *operands[operand::kCache],
       *operands[operand::kSlotMapping], cache_out, operands[operand::kKScale], operands[operand::kVScale],
       operands[operand::kQNormWeight], operands[operand::kKNormWeight]},
      attributes.interleaved, &p.rotary));
  p.rotary.norm_eps = attributes.eps;
  p.rotary.weight_offset = attributes.weight_offset;
  p.rotary.round_once = attributes.round_once;
  return ffi::Error::Success();
}

ffi::Error GetBlockOperands(const ffi::RemainingArgs& args, const AttentionBlockAttributes& attributes,
                            AttentionBlockOperands* given) {
  namespace operand = attention_block_operand;
  AttentionBlockOperands& operands = *given;
  XLA_GPU_RETURN_IF_ERROR(operands.Get(kAttentionBlockOp, args, attributes.given));
  for (int i = operand::kPositions; i <= operand::kNumSeqs; ++i) {
    if (!operands[i]) {
      return Mismatch(kAttentionBlockOp, "given", StrCat("the bit of operand ", i), StrCat(attributes.given));
    }
  }
  return ffi::Error::Success();
}

ffi::Error GetParams(const AttentionBlockOperands& operands, const ffi::AnyBuffer* cache_out,
                     const AttentionBlockAttributes& attributes, AttentionBlockParams* params) {
  namespace operand = attention_block_operand;
  AttentionBlockParams& p = *params;
  const ffi::AnyBuffer& cache = cache_out != nullptr ? *cache_out : *operands[operand::kCache];
  XLA_GPU_RETURN_IF_ERROR(GetProjection(operands, cache, attributes, params));
  // ---- attention: of a query in scratch memory
  const int64_t head_dim = p.rotary.head_dim, num_heads = p.rotary.num_heads;
  const char* const heads_of = p.has_qkv_product ? "qkv_weight" : "x";
  if (head_dim < 8 || head_dim > kMaxHeadDim || head_dim % 8 != 0) {
    return Mismatch(kAttentionBlockOp, "kv_cache", StrCat("head_dim a multiple of 8 from 8 to ", kMaxHeadDim),
                    StrCat(head_dim));
  }
  if (num_heads % p.rotary.num_kv_heads != 0) {
    return Mismatch(kAttentionBlockOp, heads_of,
                    StrCat("num_heads a multiple of num_kv_heads = ", p.rotary.num_kv_heads), StrCat(num_heads));
  }
  int64_t dims[] = {p.qkv.rows, num_heads, head_dim};
  XLA_FFI_Buffer query = {};
  query.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
  query.dtype = static_cast<XLA_FFI_DataType>(operands[operand::kX]->element_type());
  query.rank = 3;
  query.dims = dims;
  AttentionOperands attention = {ffi::AnyBuffer(&query),
                                 cache,
                                 operands[operand::kContextLens],
                                 operands[operand::kBlockTables],
                                 operands[operand::kQueryStartLoc],
                                 operands[operand::kNumSeqs],
                                 operands[operand::kKScale],
                                 operands[operand::kVScale],
                                 operands[operand::kSinks],
                                 std::nullopt};
  XLA_GPU_RETURN_IF_ERROR(GetPagedAttentionParams(
      kAttentionBlockOp, attention, {attributes.scale, attributes.sliding_window, attributes.soft_cap}, &p.attention));
  // ---- output projection
  p.out.k = num_heads * head_dim;
  p.has_out_product = operands[operand::kOutWeight].has_value();
  if (!p.has_out_product) {
    p.out.n = p.out.k;
    return CheckAbsent(operands, "out_weight",
                       {{operand::kResidual, "residual"},
                        {operand::kOutScale, "out_scale"},
                        {operand::kOutZeroPoint, "out_zero_point"},
                        {operand::kOutBias, "out_bias"}});
  }
  XLA_GPU_RETURN_IF_ERROR(GetLinearWeight(OutNames(heads_of),
                                          {*operands[operand::kOutWeight], operands[operand::kOutScale],
                                           operands[operand::kOutZeroPoint], operands[operand::kOutBias]},
                                          &p.out));
  if (const auto& residual = operands[operand::kResidual]) {
    XLA_GPU_RETURN_IF_ERROR(
        CheckDType(kAttentionBlockOp, "residual", *residual, operands[operand::kX]->element_type()));
    XLA_GPU_RETURN_IF_ERROR(CheckShape(kAttentionBlockOp, "residual", *residual, {p.out.rows, p.out.n}));
    p.out.residual = residual->untyped_data();
  }
  return ffi::Error::Success();
}

// `check` looks at values, `copy` copies the cache, `run` computes.
template <typename Check, typename Copy, typename Run>
ffi::Error AttentionBlock(const ffi::RemainingArgs& args, const ffi::AnyBuffer& out, const ffi::AnyBuffer& cache_out,
                          const ffi::AnyBuffer& scratch, const AttentionBlockAttributes& attributes, Check&& check,
                          Copy&& copy, Run&& run) {
  return NoThrow(kAttentionBlockOp, [&]() -> ffi::Error {
    AttentionBlockParams p{};
    AttentionBlockOperands operands;
    XLA_GPU_RETURN_IF_ERROR(GetBlockOperands(args, attributes, &operands));
    XLA_GPU_RETURN_IF_ERROR(GetParams(operands, &cache_out, attributes, &p));
    XLA_GPU_RETURN_IF_ERROR(
        CheckDType(kAttentionBlockOp, "result", out, operands[attention_block_operand::kX]->element_type()));
    XLA_GPU_RETURN_IF_ERROR(CheckShape(kAttentionBlockOp, "result", out, {p.out.rows, p.out.n}));
    p.out.out = out.untyped_data();
    const int64_t bytes = PlaceAttentionBlock(&p, scratch.untyped_data());
    XLA_GPU_RETURN_IF_ERROR(CheckScratch(kAttentionBlockOp, scratch, bytes));
    XLA_GPU_RETURN_IF_ERROR(ToError(check(p)));
    XLA_GPU_RETURN_IF_ERROR(CopyUnlessAliased(cache_out, *operands[attention_block_operand::kCache], copy));
    return p.out.rows == 0 ? ffi::Error::Success() : ToError(run(p));
  });
}

// What the checks of all parts say of host memory; `zero_points(names, part)` checks those of a weight.
template <typename ZeroPoints, typename Rotary, typename Metadata>
Status CheckParts(const AttentionBlockParams& p, const ZeroPoints& zero_points, const Rotary& rotary,
                  const Metadata& metadata) {
  Status status = rotary(p.rotary);
  if (status.ok()) status = metadata(p.attention);
  if (status.ok() && p.qkv.zero_point != nullptr) status = zero_points(kQkvNames, p.qkv);
  if (status.ok() && p.out.zero_point != nullptr) status = zero_points(OutNames("qkv_weight"), p.out);
  return status;
}

ffi::Error AttentionBlockHost(CallContext context, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> out,
                              ffi::Result<ffi::AnyBuffer> cache, ffi::Result<ffi::AnyBuffer> scratch,
                              AttentionBlockAttributes attributes) {
  const auto check = [](const AttentionBlockParams& p) {
    return CheckParts(
        p,
        [](const LinearNames& names, const LinearParams& part) {
          return CheckZeroPoints(names, part, part.zero_point);
        },
        [](const RotaryAndCacheParams& part) { return CheckRotaryAndCacheValues(kAttentionBlockOp, part); },
        [](const PagedAttentionCall& part) { return CheckPagedAttentionMetadata(part, kAttentionBlockOp); });
  };
  return AttentionBlock(args, *out, *cache, *scratch, attributes, check, CopyOnHost,
                        [&](const AttentionBlockParams& p) { return RunAttentionBlock(p, XlaExecutor(context)); });
}

ffi::Error AttentionBlockScratch(ffi::RemainingArgs args, ffi::Result<ffi::BufferR0<ffi::S64>> bytes,
                                 AttentionBlockAttributes attributes) {
  return NoThrow(kAttentionBlockOp, [&]() -> ffi::Error {
    AttentionBlockParams p{};
    AttentionBlockOperands operands;
    XLA_GPU_RETURN_IF_ERROR(GetBlockOperands(args, attributes, &operands));
    XLA_GPU_RETURN_IF_ERROR(GetParams(operands, nullptr, attributes, &p));
    *bytes->typed_data() = PlaceAttentionBlock(&p, nullptr);
    return ffi::Error::Success();
  });
}

#ifdef XLA_GPU_WITH_CUDA
ffi::Error AttentionBlockCuda(CallContext context, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> out,
                              ffi::Result<ffi::AnyBuffer> cache, ffi::Result<ffi::AnyBuffer> scratch,
                              AttentionBlockAttributes attributes) {
  const auto check = [&](const AttentionBlockParams& p) {
    if (!attributes.check_inputs) return Status::Ok();
    return CheckParts(
        p,
        [&](const auto& names, const LinearParams& part) {
          return CheckZeroPointsOnDevice(names, part, context.stream());
        },
        [&](const RotaryAndCacheParams& part) {
          return CheckRotaryAndCacheValuesOnDevice(kAttentionBlockOp, part, context.stream());
        },
        [&](const PagedAttentionCall& part) {
          return CheckPagedAttentionMetadataOnDevice(part, kAttentionBlockOp, context.stream());
        });
  };
  return AttentionBlock(
      args, *out, *cache, *scratch, attributes, check,
      [&](auto... copy) { return CopyOnDevice(copy..., context.stream()); },
      [&](const AttentionBlockParams& p) { return LaunchAttentionBlock(p, context.stream()); });
}
#endif

}  // namespace

// clang-format off
#define XLA_GPU_ATTENTION_BLOCK_SIGNATURE   \
       RemainingArgs()                      \
      .Ret<ffi::AnyBuffer>()  /* out */      \
      .Ret<ffi::AnyBuffer>()  /* kv_cache */ \
      .Ret<ffi::AnyBuffer>()  /* scratch */  \
      .Attrs<AttentionBlockAttributes>()
// clang-format on

XLA_GPU_DEFINE_HANDLER(xla_gpu_attention_block_host, AttentionBlockHost,
                       XLA_GPU_BIND().XLA_GPU_ATTENTION_BLOCK_SIGNATURE);
XLA_GPU_DEFINE_SCRATCH(
    xla_gpu_attention_block_scratch_bytes, AttentionBlockScratch,
    ffi::Ffi::Bind().RemainingArgs().Ret<ffi::BufferR0<ffi::S64>>().Attrs<AttentionBlockAttributes>());
#ifdef XLA_GPU_WITH_CUDA
XLA_GPU_DEFINE_HANDLER(xla_gpu_attention_block_cuda, AttentionBlockCuda,
                       XLA_GPU_BIND().XLA_GPU_ATTENTION_BLOCK_SIGNATURE, CaptureTraits());
#endif

}  // namespace xla_gpu
