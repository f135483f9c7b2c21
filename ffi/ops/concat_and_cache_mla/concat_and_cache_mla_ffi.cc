// concat_and_cache_mla: checks and bindings of the host and CUDA handlers.
#include <cstdint>
#include <vector>

#include "ffi/device/host_copy.h"
#include "ffi/handlers/cache_layout.h"
#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/ops/concat_and_cache_mla/concat_and_cache_mla.h"

namespace xla_gpu {
namespace {

constexpr char kConcatOp[] = "concat_and_cache_mla";

struct ConcatBuffers {
  ffi::AnyBuffer kv_c;
  ffi::AnyBuffer k_pe;
  ffi::AnyBuffer kv_cache;
  ffi::AnyBuffer slot_mapping;
  ffi::AnyBuffer out;
};

// A row's elements: a positive multiple of 8.
ffi::Error CheckWidth(const char* argument, const char* name, int64_t width) {
  if (width >= 8 && width % 8 == 0) return ffi::Error::Success();
  return Mismatch(kConcatOp, argument, StrCat(name, " a positive multiple of 8"), StrCat(width));
}

ffi::Error GetParams(const ConcatBuffers& buffers, ConcatAndCacheMlaParams* params) {
  ConcatAndCacheMlaParams& p = *params;
  const ffi::AnyBuffer &kv_c = buffers.kv_c, &k_pe = buffers.k_pe, &kv_cache = buffers.kv_cache;
  // ---- what is stored
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(kConcatOp, "kv_c", kv_c, &p.dtype));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(kConcatOp, "kv_c", kv_c, 2));
  const int64_t num_tokens = kv_c.dimensions()[0];
  p.kv_lora_rank = kv_c.dimensions()[1];
  XLA_GPU_RETURN_IF_ERROR(CheckWidth("kv_c", "kv_lora_rank", p.kv_lora_rank));
  XLA_GPU_RETURN_IF_ERROR(CheckDType(kConcatOp, "k_pe", k_pe, kv_c.element_type()));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(kConcatOp, "k_pe", k_pe, 2));
  XLA_GPU_RETURN_IF_ERROR(CheckShape(kConcatOp, "k_pe", k_pe, {num_tokens, -1}));
  p.rope_dim = k_pe.dimensions()[1];
  XLA_GPU_RETURN_IF_ERROR(CheckWidth("k_pe", "rope_dim", p.rope_dim));
  // ---- cache: the result's buffer is what is written
  XLA_GPU_RETURN_IF_ERROR(CheckDType(kConcatOp, "kv_cache", kv_cache, kv_c.element_type()));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(kConcatOp, "kv_cache", kv_cache, 3));
  XLA_GPU_RETURN_IF_ERROR(CheckShape(kConcatOp, "kv_cache", kv_cache, {-1, -1, p.kv_lora_rank + p.rope_dim}));
  p.num_pages = kv_cache.dimensions()[0];
  p.page_size = kv_cache.dimensions()[1];
  if (p.page_size < 1) return Mismatch(kConcatOp, "kv_cache", "page_size >= 1", StrCat(p.page_size));
  XLA_GPU_RETURN_IF_ERROR(CheckSame(kConcatOp, "result", buffers.out, "kv_cache", kv_cache));
  // ---- slots
  XLA_GPU_RETURN_IF_ERROR(CheckSlotMapping(kConcatOp, buffers.slot_mapping, num_tokens));
  p.kv_c = kv_c.untyped_data();
  p.k_pe = k_pe.untyped_data();
  p.slot_mapping = buffers.slot_mapping.untyped_data();
  p.slots_are_64_bit = buffers.slot_mapping.element_type() == ffi::DataType::S64;
  p.kv_cache = buffers.out.untyped_data();
  p.num_slots = buffers.slot_mapping.dimensions()[0];
  return ffi::Error::Success();
}

template <typename Check, typename Copy, typename Run>
ffi::Error ConcatAndCacheMla(const ConcatBuffers& buffers, Check&& check, Copy&& copy, Run&& run) {
  return NoThrow(kConcatOp, [&]() -> ffi::Error {
    ConcatAndCacheMlaParams params{};
    XLA_GPU_RETURN_IF_ERROR(GetParams(buffers, &params));
    XLA_GPU_RETURN_IF_ERROR(ToError(check(params)));
    XLA_GPU_RETURN_IF_ERROR(CopyUnlessAliased(buffers.out, buffers.kv_cache, copy));
    return ToError(run(params));
  });
}

ffi::Error ConcatAndCacheMlaHost(CallContext context, ffi::AnyBuffer kv_c, ffi::AnyBuffer k_pe, ffi::AnyBuffer kv_cache,
                                 ffi::AnyBuffer slot_mapping, ffi::Result<ffi::AnyBuffer> out, bool /*check_inputs*/) {
  return ConcatAndCacheMla({kv_c, k_pe, kv_cache, slot_mapping, *out}, CheckConcatAndCacheMlaSlots, CopyOnHost,
                           [&](const auto& params) { return RunConcatAndCacheMla(params, XlaExecutor(context)); });
}

#ifdef XLA_GPU_WITH_CUDA
ffi::Error ConcatAndCacheMlaCuda(CallContext context, ffi::AnyBuffer kv_c, ffi::AnyBuffer k_pe, ffi::AnyBuffer kv_cache,
                                 ffi::AnyBuffer slot_mapping, ffi::Result<ffi::AnyBuffer> out, bool check_inputs) {
  const auto check = [&](const ConcatAndCacheMlaParams& params) {
    if (!check_inputs || params.num_slots == 0) return Status::Ok();
    std::vector<char> slots(slot_mapping.size_bytes());
    Status status = CopyToHost(slots.data(), params.slot_mapping, slots.size(), context.stream());
    if (!status.ok()) return status;
    ConcatAndCacheMlaParams on_host = params;
    on_host.slot_mapping = slots.data();
    return CheckConcatAndCacheMlaSlots(on_host);
  };
  return ConcatAndCacheMla(
      {kv_c, k_pe, kv_cache, slot_mapping, *out}, check,
      [&](auto... copy) { return CopyOnDevice(copy..., context.stream()); },
      [&](const auto& params) { return LaunchConcatAndCacheMla(params, context.stream()); });
}
#endif

}  // namespace

// clang-format off
#define XLA_GPU_CONCAT_AND_CACHE_MLA_SIGNATURE    \
       Arg<ffi::AnyBuffer>()   /* kv_c */         \
      .Arg<ffi::AnyBuffer>()   /* k_pe */         \
      .Arg<ffi::AnyBuffer>()   /* kv_cache */     \
      .Arg<ffi::AnyBuffer>()   /* slot_mapping */ \
      .Ret<ffi::AnyBuffer>()   /* kv_cache */     \
      .Attr<bool>("check_inputs")
// clang-format on

XLA_GPU_DEFINE_HANDLER(xla_gpu_concat_and_cache_mla_host, ConcatAndCacheMlaHost,
                       XLA_GPU_BIND().XLA_GPU_CONCAT_AND_CACHE_MLA_SIGNATURE);
#ifdef XLA_GPU_WITH_CUDA
XLA_GPU_DEFINE_HANDLER(xla_gpu_concat_and_cache_mla_cuda, ConcatAndCacheMlaCuda,
                       XLA_GPU_BIND().XLA_GPU_CONCAT_AND_CACHE_MLA_SIGNATURE, CaptureTraits());
#endif

}  // namespace xla_gpu
