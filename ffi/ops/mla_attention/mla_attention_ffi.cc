// mla_attention and mla_attention_with_lse: checks and bindings of the host and CUDA handlers.
#include <cstddef>
#include <cstdint>

#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/ops/mla_attention/as_paged_attention.h"
#include "ffi/ops/mla_attention/mla_attention.h"
#include "ffi/ops/paged_attention/paged_attention_ffi.h"

namespace xla_gpu {

struct MlaAttentionAttributes {
  float scale;
  int64_t value_dim;
  bool check_inputs;
};

}  // namespace xla_gpu

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::xla_gpu::MlaAttentionAttributes, StructMember<float>("scale"),
                                      StructMember<int64_t>("value_dim"), StructMember<bool>("check_inputs"));

namespace xla_gpu {
namespace {

struct MlaBuffers {
  ffi::AnyBuffer query;
  ffi::AnyBuffer kv_cache;
  ffi::AnyBuffer context_lens;
  ffi::AnyBuffer block_tables;
  ffi::AnyBuffer query_start_loc;
  ffi::AnyBuffer num_seqs;
};

constexpr const char* MlaOpName(bool with_lse) { return with_lse ? "mla_attention_with_lse" : "mla_attention"; }

// Reads the shapes and pointers of the query and of the cache.
ffi::Error GetQueryAndLatents(const char* op, const MlaBuffers& buffers, int64_t value_dim,
                              MlaAttentionParams* params) {
  MlaAttentionParams& p = *params;
  const ffi::AnyBuffer &query = buffers.query, &kv_cache = buffers.kv_cache;
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(op, "query", query, &p.dtype));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(op, "query", query, 3));
  p.num_tokens = query.dimensions()[0];
  p.num_heads = query.dimensions()[1];
  p.head_dim = query.dimensions()[2];
  if (p.head_dim < 8 || p.head_dim > kMaxMlaHeadDim || p.head_dim % 8 != 0) {
    return Mismatch(op, "query", StrCat("head_dim a multiple of 8 from 8 to ", kMaxMlaHeadDim), StrCat(p.head_dim));
  }
  if (p.num_heads < 1) return Mismatch(op, "query", "num_heads >= 1", StrCat(p.num_heads));
  XLA_GPU_RETURN_IF_ERROR(CheckDType(op, "kv_cache", kv_cache, query.element_type()));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(op, "kv_cache", kv_cache, 3));
  XLA_GPU_RETURN_IF_ERROR(CheckShape(op, "kv_cache", kv_cache, {-1, -1, p.head_dim}));
  p.num_pages = kv_cache.dimensions()[0];
  p.page_size = kv_cache.dimensions()[1];
  if (p.page_size < 1) return Mismatch(op, "kv_cache", "page_size >= 1", StrCat(p.page_size));
  const int64_t max_value_dim = p.head_dim < kMaxMlaValueDim ? p.head_dim : kMaxMlaValueDim;
  if (value_dim < 8 || value_dim > max_value_dim || value_dim % 8 != 0) {
    return Mismatch(op, "value_dim", StrCat("a multiple of 8 from 8 to ", max_value_dim), StrCat(value_dim));
  }
  p.value_dim = value_dim;
  p.query = query.untyped_data();
  p.kv_cache = kv_cache.untyped_data();
  return ffi::Error::Success();
}

ffi::Error GetParams(const char* op, const MlaBuffers& buffers, const MlaAttentionAttributes& attributes,
                     MlaAttentionParams* params) {
  MlaAttentionParams& p = *params;
  XLA_GPU_RETURN_IF_ERROR(GetQueryAndLatents(op, buffers, attributes.value_dim, params));
  AttentionOperands operands;
  operands[kContextLens] = buffers.context_lens;
  operands[kBlockTables] = buffers.block_tables;
  operands[kQueryStartLoc] = buffers.query_start_loc;
  operands[kNumSeqs] = buffers.num_seqs;
  PagedAttentionParams metadata{};
  XLA_GPU_RETURN_IF_ERROR(GetAttentionMetadata(op, operands, &metadata));
  XLA_GPU_RETURN_IF_ERROR(CheckAttentionNumbers(op, {attributes.scale, /*sliding_window=*/0, /*soft_cap=*/0}));
  p.context_lens = metadata.context_lens;
  p.block_tables = metadata.block_tables;
  p.query_start_loc = metadata.query_start_loc;
  p.num_seqs = metadata.num_seqs;
  p.max_seqs = metadata.max_seqs;
  p.pages_per_seq = metadata.pages_per_seq;
  p.scale = attributes.scale;
  return ffi::Error::Success();
}

// The results: out, lse with mla_attention_with_lse alone, scratch.
ffi::Error GetResults(const char* op, bool with_lse, const MlaBuffers& buffers, const ffi::RemainingRets& rets,
                      MlaAttentionParams* params) {
  MlaAttentionParams& p = *params;
  const size_t count = with_lse ? 3 : 2;
  if (rets.size() != count) return Mismatch(op, "results", StrCat(count), StrCat(rets.size()));
  const ffi::AnyBuffer out = **rets.get<ffi::AnyBuffer>(0), scratch = **rets.get<ffi::AnyBuffer>(count - 1);
  XLA_GPU_RETURN_IF_ERROR(CheckDType(op, "out", out, buffers.query.element_type()));
  XLA_GPU_RETURN_IF_ERROR(CheckShape(op, "out", out, {p.num_tokens, p.num_heads, p.value_dim}));
  p.out = out.untyped_data();
  if (with_lse) {
    const ffi::AnyBuffer lse = **rets.get<ffi::AnyBuffer>(1);
    XLA_GPU_RETURN_IF_ERROR(CheckDType(op, "lse", lse, ffi::DataType::F32));
    XLA_GPU_RETURN_IF_ERROR(CheckShape(op, "lse", lse, {p.num_tokens, p.num_heads}));
    p.lse = static_cast<float*>(lse.untyped_data());
  }
  XLA_GPU_RETURN_IF_ERROR(CheckScratch(op, scratch, MlaAttentionScratchBytes(p)));
  p.scratch = scratch.untyped_data();
  p.scratch_bytes = static_cast<int64_t>(scratch.size_bytes());
  return ffi::Error::Success();
}

// `check` looks at the metadata's values, `run` computes on the host's threads or on a CUDA stream.
template <typename Check, typename Run>
ffi::Error MlaAttention(bool with_lse, const MlaBuffers& buffers, const ffi::RemainingRets& rets,
                        const MlaAttentionAttributes& attributes, Check&& check, Run&& run) {
  const char* op = MlaOpName(with_lse);
  return NoThrow(op, [&]() -> ffi::Error {
    MlaAttentionParams params{};
    XLA_GPU_RETURN_IF_ERROR(GetParams(op, buffers, attributes, &params));
    XLA_GPU_RETURN_IF_ERROR(GetResults(op, with_lse, buffers, rets, &params));
    XLA_GPU_RETURN_IF_ERROR(ToError(check(params, op)));
    return ToError(run(params));
  });
}

template <bool kWithLse>
ffi::Error MlaAttentionHost(CallContext context, ffi::AnyBuffer query, ffi::AnyBuffer kv_cache,
                            ffi::AnyBuffer context_lens, ffi::AnyBuffer block_tables, ffi::AnyBuffer query_start_loc,
                            ffi::AnyBuffer num_seqs, ffi::RemainingRets rets, MlaAttentionAttributes attributes) {
  return MlaAttention(kWithLse, {query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs}, rets,
                      attributes, CheckMlaAttentionMetadata,
                      [&](const auto& params) { return RunMlaAttention(params, XlaExecutor(context)); });
}

template <bool kWithLse>
ffi::Error MlaAttentionScratch(ffi::AnyBuffer query, ffi::AnyBuffer kv_cache, ffi::AnyBuffer context_lens,
                               ffi::AnyBuffer block_tables, ffi::AnyBuffer query_start_loc, ffi::AnyBuffer num_seqs,
                               ffi::Result<ffi::BufferR0<ffi::S64>> bytes, MlaAttentionAttributes attributes) {
  const char* op = MlaOpName(kWithLse);
  return NoThrow(op, [&]() -> ffi::Error {
    MlaAttentionParams params{};
    XLA_GPU_RETURN_IF_ERROR(
        GetParams(op, {query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs}, attributes, &params));
    *bytes->typed_data() = MlaAttentionScratchBytes(params);
    return ffi::Error::Success();
  });
}

#ifdef XLA_GPU_WITH_CUDA
template <bool kWithLse>
ffi::Error MlaAttentionCuda(CallContext context, ffi::AnyBuffer query, ffi::AnyBuffer kv_cache,
                            ffi::AnyBuffer context_lens, ffi::AnyBuffer block_tables, ffi::AnyBuffer query_start_loc,
                            ffi::AnyBuffer num_seqs, ffi::RemainingRets rets, MlaAttentionAttributes attributes) {
  const auto check = [&](const MlaAttentionParams& params, const char* op) {
    if (!attributes.check_inputs) return Status::Ok();
    return CheckPagedAttentionMetadataOnDevice(mla::AsPagedAttention(params), op, context.stream());
  };
  return MlaAttention(kWithLse, {query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs}, rets,
                      attributes, check,
                      [&](const auto& params) { return LaunchMlaAttention(params, context.stream()); });
}
#endif

}  // namespace

// clang-format off
#define XLA_GPU_MLA_ATTENTION_OPERANDS                \
       Arg<ffi::AnyBuffer>()  /* query */             \
      .Arg<ffi::AnyBuffer>()  /* kv_cache */          \
      .Arg<ffi::AnyBuffer>()  /* context_lens */      \
      .Arg<ffi::AnyBuffer>()  /* block_tables */      \
      .Arg<ffi::AnyBuffer>()  /* query_start_loc */   \
      .Arg<ffi::AnyBuffer>()  /* num_seqs */
// clang-format on
#define XLA_GPU_MLA_ATTENTION_SIGNATURE XLA_GPU_MLA_ATTENTION_OPERANDS.RemainingRets().Attrs<MlaAttentionAttributes>()
#define XLA_GPU_MLA_ATTENTION_SCRATCH_BINDING \
  ffi::Ffi::Bind().XLA_GPU_MLA_ATTENTION_OPERANDS.Ret<ffi::BufferR0<ffi::S64>>().Attrs<MlaAttentionAttributes>()

XLA_GPU_DEFINE_HANDLER(xla_gpu_mla_attention_host, MlaAttentionHost<false>,
                       XLA_GPU_BIND().XLA_GPU_MLA_ATTENTION_SIGNATURE);
XLA_GPU_DEFINE_HANDLER(xla_gpu_mla_attention_with_lse_host, MlaAttentionHost<true>,
                       XLA_GPU_BIND().XLA_GPU_MLA_ATTENTION_SIGNATURE);
XLA_GPU_DEFINE_SCRATCH(xla_gpu_mla_attention_scratch_bytes, MlaAttentionScratch<false>,
                       XLA_GPU_MLA_ATTENTION_SCRATCH_BINDING);
XLA_GPU_DEFINE_SCRATCH(xla_gpu_mla_attention_with_lse_scratch_bytes, MlaAttentionScratch<true>,
                       XLA_GPU_MLA_ATTENTION_SCRATCH_BINDING);
#ifdef XLA_GPU_WITH_CUDA
XLA_GPU_DEFINE_HANDLER(xla_gpu_mla_attention_cuda, MlaAttentionCuda<false>,
                       XLA_GPU_BIND().XLA_GPU_MLA_ATTENTION_SIGNATURE, CaptureTraits());
XLA_GPU_DEFINE_HANDLER(xla_gpu_mla_attention_with_lse_cuda, MlaAttentionCuda<true>,
                       XLA_GPU_BIND().XLA_GPU_MLA_ATTENTION_SIGNATURE, CaptureTraits());
#endif

}  // namespace xla_gpu
