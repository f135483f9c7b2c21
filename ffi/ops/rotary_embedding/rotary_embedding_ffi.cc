// rotary_embedding and rotary_and_cache: checks and bindings of the host and CUDA handlers.
#include "ffi/ops/rotary_embedding/rotary_embedding_ffi.h"

#include <cmath>
#include <optional>
#include <vector>

#include "ffi/device/host_copy.h"
#include "ffi/handlers/cache_layout.h"
#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/ops/rotary_embedding/rotary_embedding.h"

namespace xla_gpu {
namespace {

constexpr char kEmbedding[] = "rotary_embedding";
constexpr char kAndCache[] = "rotary_and_cache";

ffi::Error GetRotation(const char* op, const ffi::AnyBuffer& positions, const ffi::AnyBuffer& table, bool interleaved,
                       int64_t num_tokens, int64_t head_dim, Rotation* rotation) {
  XLA_GPU_RETURN_IF_ERROR(CheckDType(op, "positions", positions, ffi::DataType::S32));
  XLA_GPU_RETURN_IF_ERROR(CheckShape(op, "positions", positions, {num_tokens}));
  XLA_GPU_RETURN_IF_ERROR(CheckDType(op, "table", table, ffi::DataType::F32));
  XLA_GPU_RETURN_IF_ERROR(CheckShape(op, "table", table, {-1, -1, 2}));
  auto dims = table.dimensions();
  if (2 * dims[1] > head_dim) {
    return Mismatch(op, "table", StrCat("at most head_dim / 2 = ", head_dim / 2, " angles"),
                    StrCat("shape ", ShapeText(dims)));
  }
  *rotation = {static_cast<const int32_t*>(positions.untyped_data()), static_cast<const float*>(table.untyped_data()),
               dims[0], dims[1], interleaved};
  return ffi::Error::Success();
}

// CheckPositions on a copy of the positions, for XLA_GPU_CHECK_INPUTS=1.
template <typename Copy>
Status CheckCopiedPositions(const char* op, const Rotation& rotation, int64_t num_tokens, const Copy& copy) {
  if (num_tokens == 0) return Status::Ok();
  std::vector<int32_t> positions(static_cast<size_t>(num_tokens));
  Status status = copy(positions.data(), rotation.positions, positions.size() * sizeof(int32_t));
  if (!status.ok()) return status;
  Rotation on_host = rotation;
  on_host.positions = positions.data();
  return CheckPositions(op, on_host, num_tokens);
}

// ---- rotary_embedding ----

struct EmbeddingBuffers {
  ffi::AnyBuffer query, key, positions, table, query_out, key_out;
};

ffi::Error GetParams(const EmbeddingBuffers& b, bool interleaved, RotaryEmbeddingParams* params) {
  RotaryEmbeddingParams& p = *params;
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(kEmbedding, "query", b.query, &p.dtype));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(kEmbedding, "query", b.query, 3));
  auto q = b.query.dimensions();
  XLA_GPU_RETURN_IF_ERROR(CheckDType(kEmbedding, "key", b.key, b.query.element_type()));
  XLA_GPU_RETURN_IF_ERROR(CheckShape(kEmbedding, "key", b.key, {q[0], -1, q[2]}));
  XLA_GPU_RETURN_IF_ERROR(CheckSame(kEmbedding, "query_out", b.query_out, "query", b.query));
  XLA_GPU_RETURN_IF_ERROR(CheckSame(kEmbedding, "key_out", b.key_out, "key", b.key));
  XLA_GPU_RETURN_IF_ERROR(GetRotation(kEmbedding, b.positions, b.table, interleaved, q[0], q[2], &p.rotation));
  p.query = b.query.untyped_data();
  p.key = b.key.untyped_data();
  p.query_out = b.query_out.untyped_data();
  p.key_out = b.key_out.untyped_data();
  p.num_tokens = q[0];
  p.num_heads = q[1];
  p.num_kv_heads = b.key.dimensions()[1];
  p.head_dim = q[2];
  return ffi::Error::Success();
}

template <typename Check, typename Run>
ffi::Error Embed(const EmbeddingBuffers& buffers, bool interleaved, Check&& check, Run&& run) {
  return NoThrow(kEmbedding, [&]() -> ffi::Error {
    RotaryEmbeddingParams params;
    XLA_GPU_RETURN_IF_ERROR(GetParams(buffers, interleaved, &params));
    XLA_GPU_RETURN_IF_ERROR(ToError(check(params)));
    return ToError(run(params));
  });
}

ffi::Error EmbedHost(CallContext context, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer positions,
                     ffi::AnyBuffer table, ffi::Result<ffi::AnyBuffer> query_out, ffi::Result<ffi::AnyBuffer> key_out,
                     bool interleaved, bool /*check_inputs*/) {
  return Embed(
      {query, key, positions, table, *query_out, *key_out}, interleaved,
      [](const auto& params) { return CheckPositions(kEmbedding, params.rotation, params.num_tokens); },
      [&](const auto& params) { return RunRotaryEmbedding(params, XlaExecutor(context)); });
}

#ifdef XLA_GPU_WITH_CUDA
ffi::Error EmbedCuda(CallContext context, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer positions,
                     ffi::AnyBuffer table, ffi::Result<ffi::AnyBuffer> query_out, ffi::Result<ffi::AnyBuffer> key_out,
                     bool interleaved, bool check_inputs) {
  return Embed(
      {query, key, positions, table, *query_out, *key_out}, interleaved,
      [&](const auto& params) {
        if (!check_inputs) return Status::Ok();
        return CheckCopiedPositions(kEmbedding, params.rotation, params.num_tokens,
                                    [&](auto... copy) { return CopyToHost(copy..., context.stream()); });
      },
      [&](const auto& params) { return LaunchRotaryEmbedding(params, context.stream()); });
}
#endif

// ---- rotary_and_cache ----

// An optional T[size]; null where it is not given.
ffi::Error GetVector(const char* op, const char* name, const std::optional<ffi::AnyBuffer>& buffer, DType dtype,
                     int64_t size, const void** pointer) {
  *pointer = nullptr;
  if (!buffer) return ffi::Error::Success();
  XLA_GPU_RETURN_IF_ERROR(CheckDType(op, name, *buffer, FloatType(dtype)));
  XLA_GPU_RETURN_IF_ERROR(CheckShape(op, name, *buffer, {size}));
  *pointer = buffer->untyped_data();
  return ffi::Error::Success();
}

}  // namespace

ffi::Error GetRotaryAndCacheParams(const char* op, const char* qkv, int64_t width,
                                   const RotaryAndCacheOperands& operands, bool interleaved,
                                   RotaryAndCacheParams* params) {
  RotaryAndCacheParams& p = *params;
  // ---- cache: the result's buffer is what is written
  CacheLayout cache;
  XLA_GPU_RETURN_IF_ERROR(GetCacheLayout(op, operands.kv_cache, &cache));
  XLA_GPU_RETURN_IF_ERROR(CheckSame(op, "result", operands.cache_out, "kv_cache", operands.kv_cache));
  XLA_GPU_RETURN_IF_ERROR(GetCacheLayout(op, operands.cache_out, &cache));
  if (cache.dtype != p.dtype && !IsFloat8(cache.dtype)) {
    return Mismatch(op, "kv_cache", StrCat(DTypeText(FloatType(p.dtype)), " as ", qkv, ", or a float8 dtype"),
                    DTypeText(operands.kv_cache.element_type()));
  }
  if (cache.head_dim < 1 || cache.head_dim > kMaxRotaryHeadDim) {
    return Mismatch(op, "kv_cache", StrCat("a head_dim from 1 to ", kMaxRotaryHeadDim),
                    StrCat("shape ", ShapeText(operands.kv_cache.dimensions())));
  }
  const int64_t heads = width / cache.head_dim;
  if (width % cache.head_dim != 0 || heads <= 2 * cache.num_kv_heads) {
    return Mismatch(op, qkv,
                    StrCat("(num_heads + 2 * num_kv_heads) * head_dim features with num_kv_heads ", cache.num_kv_heads,
                           " and head_dim ", cache.head_dim, " as in kv_cache"),
                    StrCat(width, " in shape [", p.num_tokens, ", ", width, "]"));
  }
  p.num_kv_heads = cache.num_kv_heads;
  p.num_heads = heads - 2 * cache.num_kv_heads;
  p.head_dim = cache.head_dim;
  XLA_GPU_RETURN_IF_ERROR(
      GetRotation(op, operands.positions, operands.table, interleaved, p.num_tokens, p.head_dim, &p.rotation));
  CacheScales scales;
  XLA_GPU_RETURN_IF_ERROR(GetCacheScales(op, cache, operands.k_scale, operands.v_scale, &scales));
  p.k_scale = scales.k;
  p.v_scale = scales.v;
  p.scale_per_head = scales.per_head;
  XLA_GPU_RETURN_IF_ERROR(
      GetVector(op, "q_norm_weight", operands.q_norm_weight, p.dtype, p.head_dim, &p.q_norm_weight));
  XLA_GPU_RETURN_IF_ERROR(
      GetVector(op, "k_norm_weight", operands.k_norm_weight, p.dtype, p.head_dim, &p.k_norm_weight));
  // ---- slots
  XLA_GPU_RETURN_IF_ERROR(CheckSlotMapping(op, operands.slot_mapping, p.num_tokens));
  p.num_slots = operands.slot_mapping.dimensions()[0];
  p.slot_mapping = operands.slot_mapping.untyped_data();
  p.slots_are_64_bit = operands.slot_mapping.element_type() == ffi::DataType::S64;
  p.k_cache = cache.k;
  p.v_cache = cache.v;
  p.page_stride = cache.page_stride;
  p.slot_stride = cache.slot_stride;
  p.head_stride = cache.head_stride;
  p.num_pages = cache.num_pages;
  p.page_size = cache.page_size;
  p.cache_dtype = cache.dtype;
  return ffi::Error::Success();
}

Status CheckRotaryAndCacheValues(const char* op, const RotaryAndCacheParams& params) {
  Status status = CheckPositions(op, params.rotation, params.num_tokens);
  return status.ok() ? CheckRotaryAndCacheSlots(op, params) : status;
}

#ifdef XLA_GPU_WITH_CUDA
Status CheckRotaryAndCacheValuesOnDevice(const char* op, const RotaryAndCacheParams& params, Stream stream) {
  const auto to_host = [&](auto... copy) { return CopyToHost(copy..., stream); };
  Status status = CheckCopiedPositions(op, params.rotation, params.num_tokens, to_host);
  if (!status.ok() || params.num_slots == 0) return status;
  std::vector<char> slots(static_cast<size_t>(params.num_slots) * (params.slots_are_64_bit ? 8 : 4));
  status = to_host(slots.data(), params.slot_mapping, slots.size());
  if (!status.ok()) return status;
  RotaryAndCacheParams on_host = params;
  on_host.slot_mapping = slots.data();
  return CheckRotaryAndCacheSlots(op, on_host);
}
#endif

namespace {

struct CacheBuffers {
  ffi::AnyBuffer qkv, positions, table, kv_cache, slot_mapping, query_out, cache_out;
};

struct CacheAttributes {
  bool check_inputs, kv_scales, has_q_norm, has_k_norm, has_bias, interleaved, round_once;
  float norm_eps, weight_offset;
};

ffi::Error GetOptional(const ffi::RemainingArgs& rest, const CacheAttributes& a, RotaryAndCacheOperands* operands,
                       std::optional<ffi::AnyBuffer>* bias) {
  const size_t expected =
      (a.kv_scales ? 2 : 0) + (a.has_q_norm ? 1 : 0) + (a.has_k_norm ? 1 : 0) + (a.has_bias ? 1 : 0);
  if (rest.size() != expected) {
    return Mismatch(kAndCache, "operands", StrCat(5 + expected, " for these attributes"), StrCat(5 + rest.size()));
  }
  size_t next = 0;
  const struct {
    bool given;
    std::optional<ffi::AnyBuffer>* buffer;
  } optional[] = {{a.kv_scales, &operands->k_scale},
                  {a.kv_scales, &operands->v_scale},
                  {a.has_q_norm, &operands->q_norm_weight},
                  {a.has_k_norm, &operands->k_norm_weight},
                  {a.has_bias, bias}};
  for (const auto& [given, buffer] : optional) {
    if (given) *buffer = *rest.get<ffi::AnyBuffer>(next++);
  }
  return ffi::Error::Success();
}

ffi::Error GetParams(const CacheBuffers& b, const ffi::RemainingArgs& rest, const CacheAttributes& a,
                     RotaryAndCacheParams* params) {
  RotaryAndCacheParams& p = *params;
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(kAndCache, "qkv", b.qkv, &p.dtype));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(kAndCache, "qkv", b.qkv, 2));
  p.num_tokens = b.qkv.dimensions()[0];
  const int64_t width = b.qkv.dimensions()[1];
  RotaryAndCacheOperands operands = {b.positions, b.table, b.kv_cache, b.slot_mapping, b.cache_out, {}, {}, {}, {}};
  std::optional<ffi::AnyBuffer> bias;
  XLA_GPU_RETURN_IF_ERROR(GetOptional(rest, a, &operands, &bias));
  XLA_GPU_RETURN_IF_ERROR(GetRotaryAndCacheParams(kAndCache, "qkv", width, operands, a.interleaved, &p));
  XLA_GPU_RETURN_IF_ERROR(CheckDType(kAndCache, "query", b.query_out, b.qkv.element_type()));
  XLA_GPU_RETURN_IF_ERROR(CheckShape(kAndCache, "query", b.query_out, {p.num_tokens, p.num_heads, p.head_dim}));
  XLA_GPU_RETURN_IF_ERROR(GetVector(kAndCache, "bias", bias, p.dtype, width, &p.bias));
  if (!std::isfinite(a.norm_eps) || a.norm_eps < 0.0f) {
    return Mismatch(kAndCache, "norm_eps", "a finite number >= 0", StrCat(a.norm_eps));
  }
  if (!std::isfinite(a.weight_offset)) {
    return Mismatch(kAndCache, "weight_offset", "a finite number", StrCat(a.weight_offset));
  }
  p.qkv = b.qkv.untyped_data();
  p.query_out = b.query_out.untyped_data();
  p.norm_eps = a.norm_eps;
  p.weight_offset = a.weight_offset;
  p.round_once = a.round_once;
  return ffi::Error::Success();
}

template <typename Check, typename Copy, typename Run>
ffi::Error AndCache(const CacheBuffers& b, const ffi::RemainingArgs& rest, const CacheAttributes& attributes,
                    Check&& check, Copy&& copy, Run&& run) {
  return NoThrow(kAndCache, [&]() -> ffi::Error {
    RotaryAndCacheParams params;
    XLA_GPU_RETURN_IF_ERROR(GetParams(b, rest, attributes, &params));
    XLA_GPU_RETURN_IF_ERROR(ToError(check(params)));
    XLA_GPU_RETURN_IF_ERROR(CopyUnlessAliased(b.cache_out, b.kv_cache, copy));
    return ToError(run(params));
  });
}

ffi::Error AndCacheHost(CallContext context, ffi::AnyBuffer qkv, ffi::AnyBuffer positions, ffi::AnyBuffer table,
                        ffi::AnyBuffer kv_cache, ffi::AnyBuffer slot_mapping, ffi::RemainingArgs rest,
                        ffi::Result<ffi::AnyBuffer> query, ffi::Result<ffi::AnyBuffer> cache_out, bool check_inputs,
                        bool kv_scales, bool has_q_norm, bool has_k_norm, bool has_bias, bool interleaved,
                        bool round_once, float norm_eps, float weight_offset) {
  return AndCache(
      {qkv, positions, table, kv_cache, slot_mapping, *query, *cache_out}, rest,
      {check_inputs, kv_scales, has_q_norm, has_k_norm, has_bias, interleaved, round_once, norm_eps, weight_offset},
      [](const RotaryAndCacheParams& params) { return CheckRotaryAndCacheValues(kAndCache, params); }, CopyOnHost,
      [&](const auto& params) { return RunRotaryAndCache(params, XlaExecutor(context)); });
}

#ifdef XLA_GPU_WITH_CUDA
ffi::Error AndCacheCuda(CallContext context, ffi::AnyBuffer qkv, ffi::AnyBuffer positions, ffi::AnyBuffer table,
                        ffi::AnyBuffer kv_cache, ffi::AnyBuffer slot_mapping, ffi::RemainingArgs rest,
                        ffi::Result<ffi::AnyBuffer> query, ffi::Result<ffi::AnyBuffer> cache_out, bool check_inputs,
                        bool kv_scales, bool has_q_norm, bool has_k_norm, bool has_bias, bool interleaved,
                        bool round_once, float norm_eps, float weight_offset) {
  const auto check = [&](const RotaryAndCacheParams& params) {
    return check_inputs ? CheckRotaryAndCacheValuesOnDevice(kAndCache, params, context.stream()) : Status::Ok();
  };
  return AndCache(
      {qkv, positions, table, kv_cache, slot_mapping, *query, *cache_out}, rest,
      {check_inputs, kv_scales, has_q_norm, has_k_norm, has_bias, interleaved, round_once, norm_eps, weight_offset},
      check, [&](auto... copy) { return CopyOnDevice(copy..., context.stream()); },
      [&](const auto& params) { return LaunchRotaryAndCache(params, context.stream()); });
}
#endif

}  // namespace

// clang-format off
#define XLA_GPU_ROTARY_EMBEDDING_SIGNATURE     \
       Arg<ffi::AnyBuffer>()  /* query */      \
      .Arg<ffi::AnyBuffer>()  /* key */        \
      .Arg<ffi::AnyBuffer>()  /* positions */  \
      .Arg<ffi::AnyBuffer>()  /* table */      \
      .Ret<ffi::AnyBuffer>()  /* query */      \
      .Ret<ffi::AnyBuffer>()  /* key */        \
      .Attr<bool>("interleaved")               \
      .Attr<bool>("check_inputs")

#define XLA_GPU_ROTARY_AND_CACHE_SIGNATURE        \
       Arg<ffi::AnyBuffer>()  /* qkv */           \
      .Arg<ffi::AnyBuffer>()  /* positions */     \
      .Arg<ffi::AnyBuffer>()  /* table */         \
      .Arg<ffi::AnyBuffer>()  /* kv_cache */      \
      .Arg<ffi::AnyBuffer>()  /* slot_mapping */  \
      .RemainingArgs() /* k_scale, v_scale, q_norm_weight, k_norm_weight, bias */ \
      .Ret<ffi::AnyBuffer>()  /* query */         \
      .Ret<ffi::AnyBuffer>()  /* kv_cache */      \
      .Attr<bool>("check_inputs")                 \
      .Attr<bool>("kv_scales")                    \
      .Attr<bool>("has_q_norm")                   \
      .Attr<bool>("has_k_norm")                   \
      .Attr<bool>("has_bias")                     \
      .Attr<bool>("interleaved")                  \
      .Attr<bool>("round_once")                   \
      .Attr<float>("norm_eps")                    \
      .Attr<float>("weight_offset")
// clang-format on

XLA_GPU_DEFINE_HANDLER(xla_gpu_rotary_embedding_host, EmbedHost, XLA_GPU_BIND().XLA_GPU_ROTARY_EMBEDDING_SIGNATURE);
XLA_GPU_DEFINE_HANDLER(xla_gpu_rotary_and_cache_host, AndCacheHost, XLA_GPU_BIND().XLA_GPU_ROTARY_AND_CACHE_SIGNATURE);
#ifdef XLA_GPU_WITH_CUDA
XLA_GPU_DEFINE_HANDLER(xla_gpu_rotary_embedding_cuda, EmbedCuda, XLA_GPU_BIND().XLA_GPU_ROTARY_EMBEDDING_SIGNATURE,
                       CaptureTraits());
XLA_GPU_DEFINE_HANDLER(xla_gpu_rotary_and_cache_cuda, AndCacheCuda, XLA_GPU_BIND().XLA_GPU_ROTARY_AND_CACHE_SIGNATURE,
                       CaptureTraits());
#endif

}  // namespace xla_gpu
