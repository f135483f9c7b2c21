// reshape_and_cache: checks and bindings of the host and CUDA handlers.
#include <optional>
#include <vector>

#include "ffi/device/host_copy.h"
#include "ffi/handlers/cache_layout.h"
#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/ops/reshape_and_cache/reshape_and_cache.h"

namespace xla_gpu {
namespace {

constexpr char kReshapeOp[] = "reshape_and_cache";

ffi::Error GetParams(const ffi::AnyBuffer& key, const ffi::AnyBuffer& value, const ffi::AnyBuffer& kv_cache,
                     const ffi::AnyBuffer& slot_mapping, const ffi::RemainingArgs& rest, const ffi::AnyBuffer& out,
                     bool kv_scales, ReshapeAndCacheParams* params) {
  ReshapeAndCacheParams& p = *params;
  // ---- dtypes and ranks
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(kReshapeOp, "key", key, &p.dtype));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(kReshapeOp, "key", key, 3));
  auto k = key.dimensions();
  XLA_GPU_RETURN_IF_ERROR(CheckSame(kReshapeOp, "value", value, "key", key));
  // ---- cache: the result's buffer is what is written
  CacheLayout cache;
  XLA_GPU_RETURN_IF_ERROR(GetCacheLayout(kReshapeOp, kv_cache, &cache));
  XLA_GPU_RETURN_IF_ERROR(CheckSame(kReshapeOp, "result", out, "kv_cache", kv_cache));
  XLA_GPU_RETURN_IF_ERROR(GetCacheLayout(kReshapeOp, out, &cache));
  if (cache.dtype != p.dtype && !IsFloat8(cache.dtype)) {
    return Mismatch(kReshapeOp, "kv_cache", StrCat("key's dtype ", DTypeText(key.element_type()), " or a float8 dtype"),
                    DTypeText(kv_cache.element_type()));
  }
  if (cache.num_kv_heads != k[1] || cache.head_dim != k[2]) {
    return Mismatch(kReshapeOp, "kv_cache", StrCat("num_kv_heads ", k[1], " and head_dim ", k[2], " as in key"),
                    StrCat("shape ", ShapeText(kv_cache.dimensions())));
  }
  std::optional<ffi::AnyBuffer> k_scale, v_scale;
  if (kv_scales) {
    if (rest.size() != 2) return Mismatch(kReshapeOp, "operands", "6 for these attributes", StrCat(4 + rest.size()));
    k_scale = *rest.get<ffi::AnyBuffer>(0);
    v_scale = *rest.get<ffi::AnyBuffer>(1);
  } else if (rest.size() != 0) {
    return Mismatch(kReshapeOp, "operands", "4 for these attributes", StrCat(4 + rest.size()));
  }
  CacheScales scales;
  XLA_GPU_RETURN_IF_ERROR(GetCacheScales(kReshapeOp, cache, k_scale, v_scale, &scales));
  // ---- slots
  XLA_GPU_RETURN_IF_ERROR(CheckSlotMapping(kReshapeOp, slot_mapping, k[0]));
  p.key = key.untyped_data();
  p.value = value.untyped_data();
  p.slot_mapping = slot_mapping.untyped_data();
  p.slots_are_64_bit = slot_mapping.element_type() == ffi::DataType::S64;
  p.k_scale = scales.k;
  p.v_scale = scales.v;
  p.scale_per_head = scales.per_head;
  p.k_cache = cache.k;
  p.v_cache = cache.v;
  p.page_stride = cache.page_stride;
  p.slot_stride = cache.slot_stride;
  p.head_stride = cache.head_stride;
  p.num_slots = slot_mapping.dimensions()[0];
  p.num_kv_heads = cache.num_kv_heads;
  p.head_dim = cache.head_dim;
  p.num_pages = cache.num_pages;
  p.page_size = cache.page_size;
  p.cache_dtype = cache.dtype;
  return ffi::Error::Success();
}

template <typename Check, typename Copy, typename Run>
ffi::Error ReshapeAndCache(const ffi::AnyBuffer& key, const ffi::AnyBuffer& value, const ffi::AnyBuffer& kv_cache,
                           const ffi::AnyBuffer& slot_mapping, const ffi::RemainingArgs& rest,
                           const ffi::AnyBuffer& out, bool kv_scales, Check&& check, Copy&& copy, Run&& run) {
  return NoThrow(kReshapeOp, [&]() -> ffi::Error {
    ReshapeAndCacheParams params;
    XLA_GPU_RETURN_IF_ERROR(GetParams(key, value, kv_cache, slot_mapping, rest, out, kv_scales, &params));
    XLA_GPU_RETURN_IF_ERROR(ToError(check(params)));
    XLA_GPU_RETURN_IF_ERROR(CopyUnlessAliased(out, kv_cache, copy));
    return ToError(run(params));
  });
}

ffi::Error ReshapeAndCacheHost(CallContext context, ffi::AnyBuffer key, ffi::AnyBuffer value, ffi::AnyBuffer kv_cache,
                               ffi::AnyBuffer slot_mapping, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                               bool /*check_inputs*/, bool kv_scales) {
  return ReshapeAndCache(key, value, kv_cache, slot_mapping, rest, *out, kv_scales, CheckReshapeAndCacheSlots,
                         CopyOnHost,
                         [&](const auto& params) { return RunReshapeAndCache(params, XlaExecutor(context)); });
}

#ifdef XLA_GPU_WITH_CUDA
ffi::Error ReshapeAndCacheCuda(CallContext context, ffi::AnyBuffer key, ffi::AnyBuffer value, ffi::AnyBuffer kv_cache,
                               ffi::AnyBuffer slot_mapping, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                               bool check_inputs, bool kv_scales) {
  const auto check = [&](const ReshapeAndCacheParams& params) {
    if (!check_inputs || params.num_slots == 0) return Status::Ok();
    std::vector<char> slots(slot_mapping.size_bytes());
    Status status = CopyToHost(slots.data(), params.slot_mapping, slots.size(), context.stream());
    if (!status.ok()) return status;
    ReshapeAndCacheParams on_host = params;
    on_host.slot_mapping = slots.data();
    return CheckReshapeAndCacheSlots(on_host);
  };
  return ReshapeAndCache(
      key, value, kv_cache, slot_mapping, rest, *out, kv_scales, check,
      [&](auto... copy) { return CopyOnDevice(copy..., context.stream()); },
      [&](const auto& params) { return LaunchReshapeAndCache(params, context.stream()); });
}
#endif

}  // namespace

// clang-format off
#define XLA_GPU_RESHAPE_AND_CACHE_SIGNATURE           \
       Arg<ffi::AnyBuffer>()   /* key */              \
      .Arg<ffi::AnyBuffer>()   /* value */            \
      .Arg<ffi::AnyBuffer>()   /* kv_cache */         \
      .Arg<ffi::AnyBuffer>()   /* slot_mapping */     \
      .RemainingArgs()         /* k_scale, v_scale */ \
      .Ret<ffi::AnyBuffer>()   /* kv_cache */         \
      .Attr<bool>("check_inputs")                     \
      .Attr<bool>("kv_scales")
// clang-format on

XLA_GPU_DEFINE_HANDLER(xla_gpu_reshape_and_cache_host, ReshapeAndCacheHost,
                       XLA_GPU_BIND().XLA_GPU_RESHAPE_AND_CACHE_SIGNATURE);
#ifdef XLA_GPU_WITH_CUDA
XLA_GPU_DEFINE_HANDLER(xla_gpu_reshape_and_cache_cuda, ReshapeAndCacheCuda,
                       XLA_GPU_BIND().XLA_GPU_RESHAPE_AND_CACHE_SIGNATURE, CaptureTraits());
#endif

}  // namespace xla_gpu
