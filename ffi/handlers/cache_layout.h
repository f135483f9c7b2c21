// The two layouts of a KV cache, told apart by rank, as base pointers and strides.
#ifndef XLA_GPU_HANDLERS_CACHE_LAYOUT_H_
#define XLA_GPU_HANDLERS_CACHE_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "ffi/handlers/check.h"

namespace xla_gpu {

struct CacheLayout {
  char* k;  // element (page 0, slot 0, head 0, 0)
  char* v;
  int64_t page_stride;  // elements, as the next two
  int64_t slot_stride;
  int64_t head_stride;
  int64_t num_pages;
  int64_t page_size;
  int64_t num_kv_heads;
  int64_t head_dim;
  DType dtype;
};

// Reads rank 4 [num_pages, page_size, 2 * num_kv_heads, head_dim] (K of head h at 2h, V at 2h + 1) or rank 5
// [2, num_pages, page_size, num_kv_heads, head_dim].
ffi::Error GetCacheLayout(const char* op, const ffi::AnyBuffer& kv_cache, CacheLayout* layout);

// Slots for the tokens' keys and values: int32 or int64 [num_slots], at most num_tokens.
ffi::Error CheckSlotMapping(const char* op, const ffi::AnyBuffer& slot_mapping, int64_t num_tokens);

// The scales that a float8 cache needs and no other may have.
struct CacheScales {
  const float* k = nullptr;
  const float* v = nullptr;
  bool per_head = false;
};

ffi::Error GetCacheScales(const char* op, const CacheLayout& cache, const std::optional<ffi::AnyBuffer>& k_scale,
                          const std::optional<ffi::AnyBuffer>& v_scale, CacheScales* scales);

// Gives the result's buffer the operand's contents by copy(destination, source, size), where they are two: a runtime
// that honours the alias passes one, and one that does not still gets the right result.
template <typename Copy>
ffi::Error CopyUnlessAliased(const ffi::AnyBuffer& result, const ffi::AnyBuffer& operand, Copy&& copy) {
  if (result.untyped_data() == operand.untyped_data() || operand.size_bytes() == 0) return ffi::Error::Success();
  return ToError(copy(result.untyped_data(), operand.untyped_data(), operand.size_bytes()));
}

// Such a copy in host memory.
Status CopyOnHost(void* destination, const void* source, size_t size);

}  // namespace xla_gpu

#endif  // XLA_GPU_HANDLERS_CACHE_LAYOUT_H_
