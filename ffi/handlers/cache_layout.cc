#include "ffi/handlers/cache_layout.h"

#include <cstring>

namespace xla_gpu {

ffi::Error GetCacheLayout(const char* op, const ffi::AnyBuffer& kv_cache, CacheLayout* layout) {
  auto dims = kv_cache.dimensions();
  const std::optional<DType> dtype = ToDType(kv_cache.element_type());
  if (!dtype) {
    return Mismatch(op, "kv_cache", "float32, float16, bfloat16, float8_e4m3fn or float8_e5m2",
                    DTypeText(kv_cache.element_type()));
  }
  CacheLayout& l = *layout;
  l.dtype = *dtype;
  l.k = static_cast<char*>(kv_cache.untyped_data());
  int64_t v_offset;
  if (dims.size() == 4) {
    if (dims[2] % 2 != 0) {
      return Mismatch(op, "kv_cache", "an even number of heads, [num_pages, page_size, 2 * num_kv_heads, head_dim]",
                      StrCat("shape ", ShapeText(dims)));
    }
    l.num_pages = dims[0];
    l.page_size = dims[1];
    l.num_kv_heads = dims[2] / 2;
    l.head_dim = dims[3];
    l.slot_stride = dims[2] * dims[3];
    l.head_stride = 2 * dims[3];
    v_offset = dims[3];
  } else if (dims.size() == 5) {
    if (dims[0] != 2) {
      return Mismatch(op, "kv_cache", "shape [2, num_pages, page_size, num_kv_heads, head_dim]",
                      StrCat("shape ", ShapeText(dims)));
    }
    l.num_pages = dims[1];
    l.page_size = dims[2];
    l.num_kv_heads = dims[3];
    l.head_dim = dims[4];
    l.slot_stride = dims[3] * dims[4];
    l.head_stride = dims[4];
    v_offset = l.num_pages * l.page_size * l.slot_stride;
  } else {
    return Mismatch(op, "kv_cache", "rank 4 or 5", StrCat("rank ", dims.size(), " (shape ", ShapeText(dims), ")"));
  }
  l.page_stride = l.page_size * l.slot_stride;
  l.v = l.k == nullptr ? nullptr : l.k + v_offset * static_cast<int64_t>(SizeOf(l.dtype));
  if (l.page_size < 1) return Mismatch(op, "kv_cache", "page_size >= 1", StrCat("shape ", ShapeText(dims)));
  if (l.num_kv_heads < 1) return Mismatch(op, "kv_cache", "num_kv_heads >= 1", StrCat("shape ", ShapeText(dims)));
  return ffi::Error::Success();
}

ffi::Error GetCacheScales(const char* op, const CacheLayout& cache, const std::optional<ffi::AnyBuffer>& k_scale,
                          const std::optional<ffi::AnyBuffer>& v_scale, CacheScales* scales) {
  const bool given = k_scale && v_scale;
  if (given != IsFloat8(cache.dtype)) {
    return given ? Mismatch(op, "k_scale", "no scales, since kv_cache is not of a float8 dtype", "scales")
                 : Mismatch(op, "k_scale", "k_scale and v_scale, since kv_cache is of a float8 dtype", "none");
  }
  if (!given) return ffi::Error::Success();
  struct {
    const char* name;
    const ffi::AnyBuffer& buffer;
    const float** pointer;
  } both[] = {{"k_scale", *k_scale, &scales->k}, {"v_scale", *v_scale, &scales->v}};
  for (auto& [name, buffer, pointer] : both) {
    XLA_GPU_RETURN_IF_ERROR(CheckDType(op, name, buffer, ffi::DataType::F32));
    XLA_GPU_RETURN_IF_ERROR(CheckRank(op, name, buffer, 1));
    const int64_t size = buffer.dimensions()[0];
    if (size != 1 && size != cache.num_kv_heads) {
      return Mismatch(op, name, StrCat("shape [1] or [", cache.num_kv_heads, "]"),
                      StrCat("shape ", ShapeText(buffer.dimensions())));
    }
    *pointer = static_cast<const float*>(buffer.untyped_data());
  }
  const int64_t sizes[] = {k_scale->dimensions()[0], v_scale->dimensions()[0]};
  if (sizes[0] != sizes[1]) {
    return Mismatch(op, "v_scale", StrCat("the shape of k_scale, [", sizes[0], "]"), StrCat("[", sizes[1], "]"));
  }
  scales->per_head = sizes[0] == cache.num_kv_heads;
  return ffi::Error::Success();
}

ffi::Error CheckSlotMapping(const char* op, const ffi::AnyBuffer& slot_mapping, int64_t num_tokens) {
  const ffi::DataType dtype = slot_mapping.element_type();
  if (dtype != ffi::DataType::S32 && dtype != ffi::DataType::S64) {
    return Mismatch(op, "slot_mapping", "int32 or int64", DTypeText(dtype));
  }
  XLA_GPU_RETURN_IF_ERROR(CheckRank(op, "slot_mapping", slot_mapping, 1));
  const int64_t num_slots = slot_mapping.dimensions()[0];
  if (num_slots > num_tokens) {
    return Mismatch(op, "slot_mapping", StrCat("at most num_tokens = ", num_tokens, " slots"), StrCat(num_slots));
  }
  return ffi::Error::Success();
}

Status CopyOnHost(void* destination, const void* source, size_t size) {
  std::memcpy(destination, source, size);
  return Status::Ok();
}

}  // namespace xla_gpu
