// paged_attention and paged_attention_with_lse: checks and bindings of the host and CUDA handlers.
#include <cmath>
#include <optional>
#include <vector>

#include "ffi/device/host_copy.h"
#include "ffi/handlers/cache_layout.h"
#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/ops/paged_attention/paged_attention.h"
#include "ffi/runtime/xla_gpu.h"

namespace xla_gpu {
namespace {

struct Operands {
  ffi::AnyBuffer query;
  ffi::AnyBuffer kv_cache;
  ffi::AnyBuffer context_lens;
  ffi::AnyBuffer block_tables;
  ffi::AnyBuffer query_start_loc;
  ffi::AnyBuffer num_seqs;
  ffi::RemainingArgs rest;  // k_scale, v_scale where kv_scales; then sinks where has_sinks
};

struct Results {
  ffi::AnyBuffer out;
  std::optional<ffi::AnyBuffer> lse;
  ffi::AnyBuffer scratch;
};

struct Attributes {
  float scale;
  int64_t sliding_window;
  float soft_cap;
  bool check_inputs;
  bool kv_scales;
  bool has_sinks;
};

ffi::Error CheckAttributes(const char* op, const Attributes& attributes) {
  if (!std::isfinite(attributes.scale)) {
    return Mismatch(op, "scale", "a finite number", StrCat(attributes.scale));
  }
  if (attributes.sliding_window < 0) {
    return Mismatch(op, "sliding_window", "at least 1, or 0 for none", StrCat(attributes.sliding_window));
  }
  if (!(attributes.soft_cap >= 0) || !std::isfinite(attributes.soft_cap)) {
    return Mismatch(op, "soft_cap", "a finite number above 0, or 0 for none", StrCat(attributes.soft_cap));
  }
  return ffi::Error::Success();
}

// Reads the shapes and pointers of the sequences' metadata.
ffi::Error GetMetadata(const char* op, const Operands& operands, PagedAttentionParams* p) {
  struct Metadata {
    const char* name;
    const ffi::AnyBuffer& buffer;
    size_t rank;
    const int32_t** pointer;
  } all[] = {{"context_lens", operands.context_lens, 1, &p->context_lens},
             {"block_tables", operands.block_tables, 2, &p->block_tables},
             {"query_start_loc", operands.query_start_loc, 1, &p->query_start_loc},
             {"num_seqs", operands.num_seqs, 1, &p->num_seqs}};
  for (const Metadata& m : all) {
    XLA_GPU_RETURN_IF_ERROR(CheckDType(op, m.name, m.buffer, ffi::DataType::S32));
    XLA_GPU_RETURN_IF_ERROR(CheckRank(op, m.name, m.buffer, m.rank));
    *m.pointer = static_cast<const int32_t*>(m.buffer.untyped_data());
  }
  p->max_seqs = operands.context_lens.dimensions()[0];
  p->pages_per_seq = operands.block_tables.dimensions()[1];
  XLA_GPU_RETURN_IF_ERROR(CheckShape(op, "block_tables", operands.block_tables, {p->max_seqs, p->pages_per_seq}));
  XLA_GPU_RETURN_IF_ERROR(CheckShape(op, "query_start_loc", operands.query_start_loc, {p->max_seqs + 1}));
  return CheckShape(op, "num_seqs", operands.num_seqs, {1});
}

ffi::Error GetParams(const char* op, const Operands& operands, const Results& results, const Attributes& attributes,
                     PagedAttentionParams* params) {
  PagedAttentionParams& p = *params;
  // ---- query
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(op, "query", operands.query, &p.dtype));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(op, "query", operands.query, 3));
  auto query = operands.query.dimensions();
  p.num_tokens = query[0];
  p.num_heads = query[1];
  p.head_dim = query[2];
  if (p.head_dim < 8 || p.head_dim > kMaxHeadDim || p.head_dim % 8 != 0) {
    return Mismatch(op, "query", StrCat("head_dim a multiple of 8 from 8 to ", kMaxHeadDim), StrCat(p.head_dim));
  }
  // ---- cache
  CacheLayout cache;
  XLA_GPU_RETURN_IF_ERROR(GetCacheLayout(op, operands.kv_cache, &cache));
  if (cache.dtype != p.dtype && !IsFloat8(cache.dtype)) {
    return Mismatch(op, "kv_cache",
                    StrCat("query's dtype ", DTypeText(operands.query.element_type()), " or a float8 dtype"),
                    DTypeText(operands.kv_cache.element_type()));
  }
  if (cache.head_dim != p.head_dim) {
    return Mismatch(op, "kv_cache", StrCat("head_dim ", p.head_dim, " as in query"),
                    StrCat("shape ", ShapeText(operands.kv_cache.dimensions())));
  }
  if (p.num_heads < 1 || p.num_heads % cache.num_kv_heads != 0) {
    return Mismatch(op, "query", StrCat("num_heads a multiple of num_kv_heads = ", cache.num_kv_heads),
                    StrCat(p.num_heads));
  }
  CacheScales scales;
  XLA_GPU_RETURN_IF_ERROR(GetCacheScales(op, cache, attributes.kv_scales, operands.rest, &scales));
  p.query = operands.query.untyped_data();
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
  // ---- sequences
  XLA_GPU_RETURN_IF_ERROR(GetMetadata(op, operands, params));
  // ---- sinks
  const size_t num_scales = attributes.kv_scales ? 2 : 0;
  const size_t expected_rest = num_scales + (attributes.has_sinks ? 1 : 0);
  if (operands.rest.size() != expected_rest) {
    return Mismatch(op, "operands", StrCat(6 + expected_rest, " for these attributes"),
                    StrCat(6 + operands.rest.size()));
  }
  p.sinks = nullptr;
  if (attributes.has_sinks) {
    const auto sinks = operands.rest.get<ffi::AnyBuffer>(num_scales);
    if (!sinks) return Mismatch(op, "sinks", "an operand", "none");
    XLA_GPU_RETURN_IF_ERROR(CheckDType(op, "sinks", *sinks, ffi::DataType::F32));
    XLA_GPU_RETURN_IF_ERROR(CheckShape(op, "sinks", *sinks, {p.num_heads}));
    p.sinks = static_cast<const float*>(sinks->untyped_data());
  }
  // ---- results
  XLA_GPU_RETURN_IF_ERROR(CheckSame(op, "out", results.out, "query", operands.query));
  p.out = results.out.untyped_data();
  p.lse = nullptr;
  if (results.lse) {
    XLA_GPU_RETURN_IF_ERROR(CheckDType(op, "lse", *results.lse, ffi::DataType::F32));
    XLA_GPU_RETURN_IF_ERROR(CheckShape(op, "lse", *results.lse, {p.num_tokens, p.num_heads}));
    p.lse = static_cast<float*>(results.lse->untyped_data());
  }
  // ---- attributes
  XLA_GPU_RETURN_IF_ERROR(CheckAttributes(op, attributes));
  p.scale = attributes.scale;
  p.sliding_window = attributes.sliding_window;
  p.soft_cap = attributes.soft_cap;
  // ---- scratch
  XLA_GPU_RETURN_IF_ERROR(CheckDType(op, "scratch", results.scratch, ffi::DataType::U8));
  p.scratch = results.scratch.untyped_data();
  p.scratch_bytes = static_cast<int64_t>(results.scratch.size_bytes());
  if (p.scratch_bytes < PagedAttentionScratchBytes(p)) {
    return Mismatch(op, "scratch", StrCat("at least ", PagedAttentionScratchBytes(p), " bytes"),
                    StrCat(p.scratch_bytes));
  }
  return ffi::Error::Success();
}

ffi::Error OnHost(const char* op, ffi::ThreadPool pool, const Operands& operands, const Results& results,
                  const Attributes& attributes) {
  return NoThrow(op, [&]() -> ffi::Error {
    PagedAttentionParams params;
    XLA_GPU_RETURN_IF_ERROR(GetParams(op, operands, results, attributes, &params));
    XLA_GPU_RETURN_IF_ERROR(ToError(CheckPagedAttentionMetadata(params, op)));
    return ToError(RunPagedAttention(params, XlaExecutor(pool)));
  });
}

ffi::Error PagedAttentionHost(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer kv_cache,
                              ffi::AnyBuffer context_lens, ffi::AnyBuffer block_tables, ffi::AnyBuffer query_start_loc,
                              ffi::AnyBuffer num_seqs, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                              ffi::Result<ffi::AnyBuffer> scratch, float scale, int64_t sliding_window, float soft_cap,
                              bool check_inputs, bool kv_scales, bool has_sinks) {
  return OnHost("paged_attention", pool, {query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs, rest},
                {*out, std::nullopt, *scratch}, {scale, sliding_window, soft_cap, check_inputs, kv_scales, has_sinks});
}

ffi::Error PagedAttentionWithLseHost(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer kv_cache,
                                     ffi::AnyBuffer context_lens, ffi::AnyBuffer block_tables,
                                     ffi::AnyBuffer query_start_loc, ffi::AnyBuffer num_seqs, ffi::RemainingArgs rest,
                                     ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                                     ffi::Result<ffi::AnyBuffer> scratch, float scale, int64_t sliding_window,
                                     float soft_cap, bool check_inputs, bool kv_scales, bool has_sinks) {
  return OnHost("paged_attention_with_lse", pool,
                {query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs, rest}, {*out, *lse, *scratch},
                {scale, sliding_window, soft_cap, check_inputs, kv_scales, has_sinks});
}

#ifdef XLA_GPU_WITH_CUDA
// XLA_GPU_CHECK_INPUTS=1: looks at copies of the metadata.
ffi::Error CheckOnDevice(const char* op, const PagedAttentionParams& params, Stream stream) {
  PagedAttentionParams on_host = params;
  std::vector<int32_t> context_lens(params.max_seqs), block_tables(params.max_seqs * params.pages_per_seq),
      query_start_loc(params.max_seqs + 1), num_seqs(1);
  struct {
    std::vector<int32_t>& copy;
    const int32_t** pointer;
  } all[] = {{context_lens, &on_host.context_lens},
             {block_tables, &on_host.block_tables},
             {query_start_loc, &on_host.query_start_loc},
             {num_seqs, &on_host.num_seqs}};
  for (auto& [copy, pointer] : all) {
    XLA_GPU_RETURN_IF_ERROR(ToError(CopyToHost(copy.data(), *pointer, copy.size() * sizeof(int32_t), stream)));
    *pointer = copy.data();
  }
  return ToError(CheckPagedAttentionMetadata(on_host, op));
}

ffi::Error OnCuda(const char* op, Stream stream, const Operands& operands, const Results& results,
                  const Attributes& attributes) {
  return NoThrow(op, [&]() -> ffi::Error {
    PagedAttentionParams params;
    XLA_GPU_RETURN_IF_ERROR(GetParams(op, operands, results, attributes, &params));
    if (attributes.check_inputs) XLA_GPU_RETURN_IF_ERROR(CheckOnDevice(op, params, stream));
    return ToError(LaunchPagedAttention(params, stream));
  });
}

ffi::Error PagedAttentionCuda(Stream stream, ffi::AnyBuffer query, ffi::AnyBuffer kv_cache, ffi::AnyBuffer context_lens,
                              ffi::AnyBuffer block_tables, ffi::AnyBuffer query_start_loc, ffi::AnyBuffer num_seqs,
                              ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                              ffi::Result<ffi::AnyBuffer> scratch, float scale, int64_t sliding_window, float soft_cap,
                              bool check_inputs, bool kv_scales, bool has_sinks) {
  return OnCuda("paged_attention", stream,
                {query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs, rest},
                {*out, std::nullopt, *scratch}, {scale, sliding_window, soft_cap, check_inputs, kv_scales, has_sinks});
}

ffi::Error PagedAttentionWithLseCuda(Stream stream, ffi::AnyBuffer query, ffi::AnyBuffer kv_cache,
                                     ffi::AnyBuffer context_lens, ffi::AnyBuffer block_tables,
                                     ffi::AnyBuffer query_start_loc, ffi::AnyBuffer num_seqs, ffi::RemainingArgs rest,
                                     ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                                     ffi::Result<ffi::AnyBuffer> scratch, float scale, int64_t sliding_window,
                                     float soft_cap, bool check_inputs, bool kv_scales, bool has_sinks) {
  return OnCuda("paged_attention_with_lse", stream,
                {query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs, rest}, {*out, *lse, *scratch},
                {scale, sliding_window, soft_cap, check_inputs, kv_scales, has_sinks});
}
#endif

}  // namespace

// clang-format off
#define XLA_GPU_PAGED_ATTENTION_OPERANDS               \
       Arg<ffi::AnyBuffer>()    /* query */            \
      .Arg<ffi::AnyBuffer>()    /* kv_cache */         \
      .Arg<ffi::AnyBuffer>()    /* context_lens */     \
      .Arg<ffi::AnyBuffer>()    /* block_tables */     \
      .Arg<ffi::AnyBuffer>()    /* query_start_loc */  \
      .Arg<ffi::AnyBuffer>()    /* num_seqs */         \
      .RemainingArgs()          /* k_scale, v_scale, sinks */
#define XLA_GPU_PAGED_ATTENTION_ATTRIBUTES             \
       Attr<float>("scale")                            \
      .Attr<int64_t>("sliding_window")                 \
      .Attr<float>("soft_cap")                         \
      .Attr<bool>("check_inputs")                      \
      .Attr<bool>("kv_scales")                         \
      .Attr<bool>("has_sinks")
#define XLA_GPU_PAGED_ATTENTION_SIGNATURE              \
       XLA_GPU_PAGED_ATTENTION_OPERANDS                \
      .Ret<ffi::AnyBuffer>()    /* out */              \
      .Ret<ffi::AnyBuffer>()    /* scratch */          \
      .XLA_GPU_PAGED_ATTENTION_ATTRIBUTES
#define XLA_GPU_PAGED_ATTENTION_WITH_LSE_SIGNATURE     \
       XLA_GPU_PAGED_ATTENTION_OPERANDS                \
      .Ret<ffi::AnyBuffer>()    /* out */              \
      .Ret<ffi::AnyBuffer>()    /* lse */              \
      .Ret<ffi::AnyBuffer>()    /* scratch */          \
      .XLA_GPU_PAGED_ATTENTION_ATTRIBUTES
// clang-format on

XLA_GPU_DEFINE_HANDLER(xla_gpu_paged_attention_host, PagedAttentionHost,
                       XLA_GPU_BIND_HOST().XLA_GPU_PAGED_ATTENTION_SIGNATURE);
XLA_GPU_DEFINE_HANDLER(xla_gpu_paged_attention_with_lse_host, PagedAttentionWithLseHost,
                       XLA_GPU_BIND_HOST().XLA_GPU_PAGED_ATTENTION_WITH_LSE_SIGNATURE);
#ifdef XLA_GPU_WITH_CUDA
XLA_GPU_DEFINE_HANDLER(xla_gpu_paged_attention_cuda, PagedAttentionCuda,
                       XLA_GPU_BIND_CUDA().XLA_GPU_PAGED_ATTENTION_SIGNATURE, {ffi::Traits::kCmdBufferCompatible});
XLA_GPU_DEFINE_HANDLER(xla_gpu_paged_attention_with_lse_cuda, PagedAttentionWithLseCuda,
                       XLA_GPU_BIND_CUDA().XLA_GPU_PAGED_ATTENTION_WITH_LSE_SIGNATURE,
                       {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace xla_gpu

// NOTE: at global scope. A definition inside the namespace does not inherit the header's visibility, and the name would
// stay inside the library.
extern "C" int64_t xla_gpu_paged_attention_scratch_bytes(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads,
                                                         int64_t head_dim, int64_t page_size, int64_t max_seqs,
                                                         int64_t pages_per_seq, int32_t dtype) {
  using namespace xla_gpu;
  const std::optional<DType> known = ToDType(static_cast<ffi::DataType>(dtype));
  if (!known) return 0;
  PagedAttentionParams shapes{};
  shapes.num_tokens = num_tokens;
  shapes.num_heads = num_heads;
  shapes.num_kv_heads = num_kv_heads;
  shapes.head_dim = head_dim;
  shapes.page_size = page_size;
  shapes.max_seqs = max_seqs;
  shapes.pages_per_seq = pages_per_seq;
  shapes.dtype = *known;
  return PagedAttentionScratchBytes(shapes);
}
