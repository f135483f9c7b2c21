// paged_attention and paged_attention_with_lse: checks and bindings of the host and CUDA handlers.
#include "ffi/ops/paged_attention/paged_attention_ffi.h"

#include <array>
#include <cmath>
#include <vector>

#include "ffi/device/host_copy.h"
#include "ffi/handlers/cache_layout.h"
#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu {

struct PagedAttentionAttributes {
  float scale;
  int64_t sliding_window;
  float soft_cap;
  bool check_inputs;
  bool kv_scales;
  bool has_sinks;
};

}  // namespace xla_gpu

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::xla_gpu::PagedAttentionAttributes, StructMember<float>("scale"),
                                      StructMember<int64_t>("sliding_window"), StructMember<float>("soft_cap"),
                                      StructMember<bool>("check_inputs"), StructMember<bool>("kv_scales"),
                                      StructMember<bool>("has_sinks"));

namespace xla_gpu {
namespace {

// k_scale and v_scale are given if kv_scales is set, sinks if has_sinks is set, and tree_mask if there is one operand
// more: programs from before it have no attribute for it.
constexpr const char* kOperandNames[] = {"query",    "kv_cache", "context_lens", "block_tables", "query_start_loc",
                                         "num_seqs", "k_scale",  "v_scale",      "sinks",        "tree_mask"};
using Operands = AttentionOperands;

ffi::Error GetOperands(const char* op, const ffi::RemainingArgs& args, const PagedAttentionAttributes& attributes,
                       Operands* operands) {
  size_t count = 0;
  for (size_t i = 0; i < kNumAttentionOperands; ++i) {
    const bool given = i < kKScale || (i == kTreeMask ? args.size() > count
                                       : i == kSinks  ? attributes.has_sinks
                                                      : attributes.kv_scales);
    if (!given) continue;
    const auto buffer = args.get<ffi::AnyBuffer>(count++);
    if (!buffer) return Mismatch(op, kOperandNames[i], "an array", "none");
    (*operands)[i] = *buffer;
  }
  if (args.size() == count) return ffi::Error::Success();
  return Mismatch(op, "operands", StrCat(count, " at most for these attributes"), StrCat(args.size()));
}

// Reads the shapes and pointers of the query and of the cache.
ffi::Error GetQueryAndCache(const char* op, const Operands& operands, PagedAttentionParams* params) {
  PagedAttentionParams& p = *params;
  const ffi::AnyBuffer &query = *operands[kQuery], &kv_cache = *operands[kKvCache];
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(op, "query", query, &p.dtype));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(op, "query", query, 3));
  p.query = query.untyped_data();
  p.num_tokens = query.dimensions()[0];
  p.num_heads = query.dimensions()[1];
  p.head_dim = query.dimensions()[2];
  if (p.head_dim < 8 || p.head_dim > kMaxHeadDim || p.head_dim % 8 != 0) {
    return Mismatch(op, "query", StrCat("head_dim a multiple of 8 from 8 to ", kMaxHeadDim), StrCat(p.head_dim));
  }
  CacheLayout cache;
  XLA_GPU_RETURN_IF_ERROR(GetCacheLayout(op, kv_cache, &cache));
  if (cache.dtype != p.dtype && !IsFloat8(cache.dtype)) {
    return Mismatch(op, "kv_cache", StrCat("query's dtype ", DTypeText(query.element_type()), " or a float8 dtype"),
                    DTypeText(kv_cache.element_type()));
  }
  if (cache.head_dim != p.head_dim) {
    return Mismatch(op, "kv_cache", StrCat("head_dim ", p.head_dim, " as in query"),
                    StrCat("shape ", ShapeText(kv_cache.dimensions())));
  }
  if (p.num_heads < 1 || p.num_heads % cache.num_kv_heads != 0) {
    return Mismatch(op, "query", StrCat("num_heads a multiple of num_kv_heads = ", cache.num_kv_heads),
                    StrCat(p.num_heads));
  }
  CacheScales scales;
  XLA_GPU_RETURN_IF_ERROR(GetCacheScales(op, cache, operands[kKScale], operands[kVScale], &scales));
  p.k_cache = cache.k;
  p.v_cache = cache.v;
  p.page_stride = cache.page_stride;
  p.slot_stride = cache.slot_stride;
  p.head_stride = cache.head_stride;
  p.num_kv_heads = cache.num_kv_heads;
  p.num_pages = cache.num_pages;
  p.page_size = cache.page_size;
  p.cache_dtype = cache.dtype;
  p.k_scale = scales.k;
  p.v_scale = scales.v;
  p.scale_per_head = scales.per_head;
  return ffi::Error::Success();
}

// The sequences' metadata: the operands from context_lens to num_seqs.
struct Metadata {
  AttentionOperand operand;
  size_t rank;
  const int32_t* PagedAttentionParams::* pointer;
};
constexpr Metadata kMetadata[] = {{kContextLens, 1, &PagedAttentionParams::context_lens},
                                  {kBlockTables, 2, &PagedAttentionParams::block_tables},
                                  {kQueryStartLoc, 1, &PagedAttentionParams::query_start_loc},
                                  {kNumSeqs, 1, &PagedAttentionParams::num_seqs}};

}  // namespace

ffi::Error GetAttentionMetadata(const char* op, const AttentionOperands& operands, PagedAttentionParams* p) {
  for (const Metadata& m : kMetadata) {
    const ffi::AnyBuffer& buffer = *operands[m.operand];
    XLA_GPU_RETURN_IF_ERROR(CheckDType(op, kOperandNames[m.operand], buffer, ffi::DataType::S32));
    XLA_GPU_RETURN_IF_ERROR(CheckRank(op, kOperandNames[m.operand], buffer, m.rank));
    p->*m.pointer = static_cast<const int32_t*>(buffer.untyped_data());
  }
  p->max_seqs = operands[kContextLens]->dimensions()[0];
  p->pages_per_seq = operands[kBlockTables]->dimensions()[1];
  XLA_GPU_RETURN_IF_ERROR(CheckShape(op, "block_tables", *operands[kBlockTables], {p->max_seqs, p->pages_per_seq}));
  XLA_GPU_RETURN_IF_ERROR(CheckShape(op, "query_start_loc", *operands[kQueryStartLoc], {p->max_seqs + 1}));
  return CheckShape(op, "num_seqs", *operands[kNumSeqs], {1});
}

ffi::Error CheckAttentionNumbers(const char* op, const AttentionNumbers& numbers) {
  if (!std::isfinite(numbers.scale)) {
    return Mismatch(op, "scale", "a finite number", StrCat(numbers.scale));
  }
  if (numbers.sliding_window < 0) {
    return Mismatch(op, "sliding_window", "at least 1, or 0 for none", StrCat(numbers.sliding_window));
  }
  // Kernels compute it within 1e-7 of the cap: above, scores would be lost. Below, scores / cap would overflow.
  if (numbers.soft_cap != 0 && !(numbers.soft_cap >= 0x1p-100f && numbers.soft_cap <= 0x1p13f)) {
    return Mismatch(op, "soft_cap", "a number from 2^-100 to 2^13, or 0 for none", StrCat(numbers.soft_cap));
  }
  return ffi::Error::Success();
}

ffi::Error GetPagedAttentionParams(const char* op, const AttentionOperands& operands, const AttentionNumbers& numbers,
                                   PagedAttentionCall* params) {
  PagedAttentionCall& p = *params;
  XLA_GPU_RETURN_IF_ERROR(GetQueryAndCache(op, operands, params));
  XLA_GPU_RETURN_IF_ERROR(GetAttentionMetadata(op, operands, params));
  if (const auto& sinks = operands[kSinks]) {
    XLA_GPU_RETURN_IF_ERROR(CheckDType(op, "sinks", *sinks, ffi::DataType::F32));
    XLA_GPU_RETURN_IF_ERROR(CheckShape(op, "sinks", *sinks, {p.num_heads}));
    p.sinks = static_cast<const float*>(sinks->untyped_data());
  }
  if (const auto& tree_mask = operands[kTreeMask]) {
    XLA_GPU_RETURN_IF_ERROR(CheckDType(op, "tree_mask", *tree_mask, ffi::DataType::U32));
    XLA_GPU_RETURN_IF_ERROR(CheckRank(op, "tree_mask", *tree_mask, 2));
    p.tree_words = tree_mask->dimensions()[1];
    if (tree_mask->dimensions()[0] != p.num_tokens || p.tree_words < 1 || p.tree_words > 2) {
      return Mismatch(op, "tree_mask", StrCat("shape [", p.num_tokens, ", 1] or [", p.num_tokens, ", 2]"),
                      StrCat("shape ", ShapeText(tree_mask->dimensions())));
    }
    p.tree_mask = static_cast<const uint32_t*>(tree_mask->untyped_data());
  }
  XLA_GPU_RETURN_IF_ERROR(CheckAttentionNumbers(op, numbers));
  p.scale = numbers.scale;
  p.sliding_window = numbers.sliding_window;
  p.soft_cap = numbers.soft_cap;
  return ffi::Error::Success();
}

#ifdef XLA_GPU_WITH_CUDA
Status CheckPagedAttentionMetadataOnDevice(const PagedAttentionCall& params, const char* op, Stream stream) {
  const int64_t sizes[] = {params.max_seqs, params.max_seqs * params.pages_per_seq, params.max_seqs + 1, 1};
  std::array<std::vector<int32_t>, std::size(kMetadata)> copies;
  PagedAttentionCall on_host = params;
  for (size_t i = 0; i < copies.size(); ++i) {
    const int32_t*& pointer = on_host.*kMetadata[i].pointer;
    copies[i].resize(sizes[i]);
    Status status = CopyToHost(copies[i].data(), pointer, sizes[i] * sizeof(int32_t), stream);
    if (!status.ok()) return status;
    pointer = copies[i].data();
  }
  return CheckPagedAttentionMetadata(on_host, op);
}
#endif

namespace {

ffi::Error GetParams(const char* op, const ffi::RemainingArgs& args, const PagedAttentionAttributes& attributes,
                     PagedAttentionCall* params) {
  Operands operands;
  XLA_GPU_RETURN_IF_ERROR(GetOperands(op, args, attributes, &operands));
  return GetPagedAttentionParams(op, operands, {attributes.scale, attributes.sliding_window, attributes.soft_cap},
                                 params);
}

// The results: out, lse with paged_attention_with_lse alone, scratch.
ffi::Error GetResults(const char* op, bool with_lse, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                      PagedAttentionCall* params) {
  PagedAttentionCall& p = *params;
  const size_t count = with_lse ? 3 : 2;
  if (rets.size() != count) return Mismatch(op, "results", StrCat(count), StrCat(rets.size()));
  const ffi::AnyBuffer query = *args.get<ffi::AnyBuffer>(kQuery), out = **rets.get<ffi::AnyBuffer>(0),
                       scratch = **rets.get<ffi::AnyBuffer>(count - 1);
  XLA_GPU_RETURN_IF_ERROR(CheckSame(op, "out", out, "query", query));
  p.out = out.untyped_data();
  if (with_lse) {
    const ffi::AnyBuffer lse = **rets.get<ffi::AnyBuffer>(1);
    XLA_GPU_RETURN_IF_ERROR(CheckDType(op, "lse", lse, ffi::DataType::F32));
    XLA_GPU_RETURN_IF_ERROR(CheckShape(op, "lse", lse, {p.num_tokens, p.num_heads}));
    p.lse = static_cast<float*>(lse.untyped_data());
  }
  XLA_GPU_RETURN_IF_ERROR(CheckDType(op, "scratch", scratch, ffi::DataType::U8));
  p.scratch = scratch.untyped_data();
  p.scratch_bytes = static_cast<int64_t>(scratch.size_bytes());
  if (const int64_t needed = PagedAttentionScratchBytes(p); p.scratch_bytes < needed) {
    return Mismatch(op, "scratch", StrCat("at least ", needed, " bytes"), StrCat(p.scratch_bytes));
  }
  return ffi::Error::Success();
}

constexpr const char* OpName(bool with_lse) { return with_lse ? "paged_attention_with_lse" : "paged_attention"; }

// `check` looks at the metadata's values, `run` computes on the host's threads or on a CUDA stream.
template <typename Check, typename Run>
ffi::Error PagedAttention(bool with_lse, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                          const PagedAttentionAttributes& attributes, Check&& check, Run&& run) {
  const char* op = OpName(with_lse);
  return NoThrow(op, [&]() -> ffi::Error {
    PagedAttentionCall params{};
    XLA_GPU_RETURN_IF_ERROR(GetParams(op, args, attributes, &params));
    XLA_GPU_RETURN_IF_ERROR(GetResults(op, with_lse, args, rets, &params));
    XLA_GPU_RETURN_IF_ERROR(ToError(check(params, op)));
    return ToError(run(params));
  });
}

template <bool kWithLse>
ffi::Error PagedAttentionHost(CallContext context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                              PagedAttentionAttributes attributes) {
  return PagedAttention(kWithLse, args, rets, attributes, CheckPagedAttentionMetadata,
                        [&](const auto& params) { return RunPagedAttention(params, XlaExecutor(context)); });
}

template <bool kWithLse>
ffi::Error PagedAttentionScratch(ffi::RemainingArgs args, ffi::Result<ffi::BufferR0<ffi::S64>> bytes,
                                 PagedAttentionAttributes attributes) {
  return NoThrow(OpName(kWithLse), [&]() -> ffi::Error {
    PagedAttentionCall params{};
    XLA_GPU_RETURN_IF_ERROR(GetParams(OpName(kWithLse), args, attributes, &params));
    *bytes->typed_data() = PagedAttentionScratchBytes(params);
    return ffi::Error::Success();
  });
}

#ifdef XLA_GPU_WITH_CUDA
template <bool kWithLse>
ffi::Error PagedAttentionCuda(CallContext context, ffi::RemainingArgs args, ffi::RemainingRets rets,
                              PagedAttentionAttributes attributes) {
  const auto check = [&](const PagedAttentionCall& params, const char* op) {
    return attributes.check_inputs ? CheckPagedAttentionMetadataOnDevice(params, op, context.stream()) : Status::Ok();
  };
  return PagedAttention(kWithLse, args, rets, attributes, check,
                        [&](const auto& params) { return LaunchPagedAttention(params, context.stream()); });
}
#endif

}  // namespace

#define XLA_GPU_PAGED_ATTENTION_SIGNATURE RemainingArgs().RemainingRets().Attrs<PagedAttentionAttributes>()
#define XLA_GPU_PAGED_ATTENTION_SCRATCH_BINDING \
  ffi::Ffi::Bind().RemainingArgs().Ret<ffi::BufferR0<ffi::S64>>().Attrs<PagedAttentionAttributes>()

XLA_GPU_DEFINE_HANDLER(xla_gpu_paged_attention_host, PagedAttentionHost<false>,
                       XLA_GPU_BIND().XLA_GPU_PAGED_ATTENTION_SIGNATURE);
XLA_GPU_DEFINE_HANDLER(xla_gpu_paged_attention_with_lse_host, PagedAttentionHost<true>,
                       XLA_GPU_BIND().XLA_GPU_PAGED_ATTENTION_SIGNATURE);
XLA_GPU_DEFINE_SCRATCH(xla_gpu_paged_attention_scratch_bytes, PagedAttentionScratch<false>,
                       XLA_GPU_PAGED_ATTENTION_SCRATCH_BINDING);
XLA_GPU_DEFINE_SCRATCH(xla_gpu_paged_attention_with_lse_scratch_bytes, PagedAttentionScratch<true>,
                       XLA_GPU_PAGED_ATTENTION_SCRATCH_BINDING);
#ifdef XLA_GPU_WITH_CUDA
XLA_GPU_DEFINE_HANDLER(xla_gpu_paged_attention_cuda, PagedAttentionCuda<false>,
                       XLA_GPU_BIND().XLA_GPU_PAGED_ATTENTION_SIGNATURE, CaptureTraits());
XLA_GPU_DEFINE_HANDLER(xla_gpu_paged_attention_with_lse_cuda, PagedAttentionCuda<true>,
                       XLA_GPU_BIND().XLA_GPU_PAGED_ATTENTION_SIGNATURE, CaptureTraits());
#endif

}  // namespace xla_gpu
