// bidirectional_attention: checks and bindings of the host and CUDA handlers.
#include <cstdint>
#include <vector>

#include "ffi/device/host_copy.h"
#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/ops/bidirectional_attention/bidirectional_attention.h"
#include "ffi/ops/paged_attention/paged_attention_ffi.h"

namespace xla_gpu {

struct BidirectionalAttentionAttributes {
  float scale;
  int64_t sliding_window;
  float soft_cap;
  bool check_inputs;
};

}  // namespace xla_gpu

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::xla_gpu::BidirectionalAttentionAttributes, StructMember<float>("scale"),
                                      StructMember<int64_t>("sliding_window"), StructMember<float>("soft_cap"),
                                      StructMember<bool>("check_inputs"));

namespace xla_gpu {
namespace {

constexpr char kBidirectionalOp[] = "bidirectional_attention";

struct BidirectionalBuffers {
  ffi::AnyBuffer query;
  ffi::AnyBuffer key;
  ffi::AnyBuffer value;
  ffi::AnyBuffer query_start_loc;
  ffi::AnyBuffer num_seqs;
  ffi::AnyBuffer out;
};

// Reads the shapes and pointers of the query, the keys and the values.
ffi::Error GetTokens(const BidirectionalBuffers& buffers, BidirectionalAttentionParams* params) {
  BidirectionalAttentionParams& p = *params;
  constexpr const char* op = kBidirectionalOp;
  const ffi::AnyBuffer &query = buffers.query, &key = buffers.key, &value = buffers.value;
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(op, "query", query, &p.dtype));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(op, "query", query, 3));
  p.num_tokens = query.dimensions()[0];
  p.num_heads = query.dimensions()[1];
  p.head_dim = query.dimensions()[2];
  if (p.head_dim < 8 || p.head_dim > kMaxHeadDim || p.head_dim % 8 != 0) {
    return Mismatch(op, "query", StrCat("head_dim a multiple of 8 from 8 to ", kMaxHeadDim), StrCat(p.head_dim));
  }
  XLA_GPU_RETURN_IF_ERROR(CheckDType(op, "key", key, query.element_type()));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(op, "key", key, 3));
  p.num_kv_heads = key.dimensions()[1];
  XLA_GPU_RETURN_IF_ERROR(CheckShape(op, "key", key, {p.num_tokens, -1, p.head_dim}));
  XLA_GPU_RETURN_IF_ERROR(CheckSame(op, "value", value, "key", key));
  if (p.num_kv_heads < 1) return Mismatch(op, "key", "num_kv_heads >= 1", StrCat(p.num_kv_heads));
  if (p.num_heads < 1 || p.num_heads % p.num_kv_heads != 0) {
    return Mismatch(op, "query", StrCat("num_heads a multiple of num_kv_heads = ", p.num_kv_heads),
                    StrCat(p.num_heads));
  }
  p.query = query.untyped_data();
  p.key = key.untyped_data();
  p.value = value.untyped_data();
  return ffi::Error::Success();
}

ffi::Error GetParams(const BidirectionalBuffers& buffers, const BidirectionalAttentionAttributes& attributes,
                     BidirectionalAttentionParams* params) {
  BidirectionalAttentionParams& p = *params;
  constexpr const char* op = kBidirectionalOp;
  const ffi::AnyBuffer &starts = buffers.query_start_loc, &num_seqs = buffers.num_seqs;
  XLA_GPU_RETURN_IF_ERROR(GetTokens(buffers, params));
  XLA_GPU_RETURN_IF_ERROR(CheckDType(op, "query_start_loc", starts, ffi::DataType::S32));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(op, "query_start_loc", starts, 1));
  if (starts.dimensions()[0] < 1) return Mismatch(op, "query_start_loc", "shape [max_seqs + 1]", "shape [0]");
  XLA_GPU_RETURN_IF_ERROR(CheckDType(op, "num_seqs", num_seqs, ffi::DataType::S32));
  XLA_GPU_RETURN_IF_ERROR(CheckShape(op, "num_seqs", num_seqs, {1}));
  XLA_GPU_RETURN_IF_ERROR(CheckSame(op, "out", buffers.out, "query", buffers.query));
  XLA_GPU_RETURN_IF_ERROR(
      CheckAttentionNumbers(op, {attributes.scale, attributes.sliding_window, attributes.soft_cap}));
  p.max_seqs = starts.dimensions()[0] - 1;
  p.query_start_loc = static_cast<const int32_t*>(starts.untyped_data());
  p.num_seqs = static_cast<const int32_t*>(num_seqs.untyped_data());
  p.out = buffers.out.untyped_data();
  p.scale = attributes.scale;
  p.sliding_window = attributes.sliding_window;
  p.soft_cap = attributes.soft_cap;
  return ffi::Error::Success();
}

// `check` looks at the metadata's values, `run` computes on the host's threads or on a CUDA stream.
template <typename Check, typename Run>
ffi::Error BidirectionalAttention(const BidirectionalBuffers& buffers,
                                  const BidirectionalAttentionAttributes& attributes, Check&& check, Run&& run) {
  return NoThrow(kBidirectionalOp, [&]() -> ffi::Error {
    BidirectionalAttentionParams params{};
    XLA_GPU_RETURN_IF_ERROR(GetParams(buffers, attributes, &params));
    XLA_GPU_RETURN_IF_ERROR(ToError(check(params)));
    return ToError(run(params));
  });
}

ffi::Error BidirectionalAttentionHost(CallContext context, ffi::AnyBuffer query, ffi::AnyBuffer key,
                                      ffi::AnyBuffer value, ffi::AnyBuffer query_start_loc, ffi::AnyBuffer num_seqs,
                                      ffi::Result<ffi::AnyBuffer> out, BidirectionalAttentionAttributes attributes) {
  return BidirectionalAttention(
      {query, key, value, query_start_loc, num_seqs, *out}, attributes, CheckBidirectionalAttentionMetadata,
      [&](const auto& params) { return RunBidirectionalAttention(params, XlaExecutor(context)); });
}

#ifdef XLA_GPU_WITH_CUDA
Status CheckMetadataOnDevice(const BidirectionalAttentionParams& params, Stream stream) {
  std::vector<int32_t> starts(params.max_seqs + 1);
  int32_t num_seqs = 0;
  for (const Status& status :
       {CopyToHost(starts.data(), params.query_start_loc, starts.size() * sizeof(int32_t), stream),
        CopyToHost(&num_seqs, params.num_seqs, sizeof(int32_t), stream)}) {
    if (!status.ok()) return status;
  }
  BidirectionalAttentionParams on_host = params;
  on_host.query_start_loc = starts.data();
  on_host.num_seqs = &num_seqs;
  return CheckBidirectionalAttentionMetadata(on_host);
}

ffi::Error BidirectionalAttentionCuda(CallContext context, ffi::AnyBuffer query, ffi::AnyBuffer key,
                                      ffi::AnyBuffer value, ffi::AnyBuffer query_start_loc, ffi::AnyBuffer num_seqs,
                                      ffi::Result<ffi::AnyBuffer> out, BidirectionalAttentionAttributes attributes) {
  const auto check = [&](const BidirectionalAttentionParams& params) {
    return attributes.check_inputs ? CheckMetadataOnDevice(params, context.stream()) : Status::Ok();
  };
  return BidirectionalAttention(
      {query, key, value, query_start_loc, num_seqs, *out}, attributes, check,
      [&](const auto& params) { return LaunchBidirectionalAttention(params, context.stream()); });
}
#endif

}  // namespace

// clang-format off
#define XLA_GPU_BIDIRECTIONAL_ATTENTION_SIGNATURE     \
       Arg<ffi::AnyBuffer>()  /* query */             \
      .Arg<ffi::AnyBuffer>()  /* key */               \
      .Arg<ffi::AnyBuffer>()  /* value */             \
      .Arg<ffi::AnyBuffer>()  /* query_start_loc */   \
      .Arg<ffi::AnyBuffer>()  /* num_seqs */          \
      .Ret<ffi::AnyBuffer>()  /* out */               \
      .Attrs<BidirectionalAttentionAttributes>()
// clang-format on

XLA_GPU_DEFINE_HANDLER(xla_gpu_bidirectional_attention_host, BidirectionalAttentionHost,
                       XLA_GPU_BIND().XLA_GPU_BIDIRECTIONAL_ATTENTION_SIGNATURE);
#ifdef XLA_GPU_WITH_CUDA
XLA_GPU_DEFINE_HANDLER(xla_gpu_bidirectional_attention_cuda, BidirectionalAttentionCuda,
                       XLA_GPU_BIND().XLA_GPU_BIDIRECTIONAL_ATTENTION_SIGNATURE, CaptureTraits());
#endif

}  // namespace xla_gpu
