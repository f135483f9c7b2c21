// reshape_and_cache: stores new keys and values into slots of a paged KV cache, in place.
#ifndef XLA_GPU_OPS_RESHAPE_AND_CACHE_RESHAPE_AND_CACHE_H_
#define XLA_GPU_OPS_RESHAPE_AND_CACHE_RESHAPE_AND_CACHE_H_

#include <cstdint>

#include "ffi/base/dtype.h"
#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/host/executor.h"

namespace xla_gpu {

struct ReshapeAndCacheParams {
  const void* key;           // T[num_tokens, num_kv_heads, head_dim]
  const void* value;         // T[num_tokens, num_kv_heads, head_dim]
  const void* slot_mapping;  // i32 or i64 [num_slots], num_slots <= num_tokens
  bool slots_are_64_bit;
  const float* k_scale;  // [1] or [num_kv_heads]: key / k_scale is stored, saturated; null unless C is a float8 type
  const float* v_scale;  // as k_scale, for V
  void* k_cache;         // C, element (0, 0, 0, 0) of K; strides as in PagedAttentionParams
  void* v_cache;         // C, element (0, 0, 0, 0) of V

  int64_t page_stride;  // elements, as the next two
  int64_t slot_stride;
  int64_t head_stride;

  int64_t num_slots;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t num_pages;
  int64_t page_size;
  DType dtype;        // T
  DType cache_dtype;  // C: T, or a float8 type
  bool scale_per_head;
};

// Returns InvalidArgument, naming the token, for a slot past the cache. Reads `slot_mapping` as host memory.
Status CheckReshapeAndCacheSlots(const ReshapeAndCacheParams& params);

// Expects slots that CheckReshapeAndCacheSlots accepts. Of duplicate slots the last token's values stay, on every run.
Status RunReshapeAndCache(const ReshapeAndCacheParams& params, const Executor& executor);
// Slots past the cache are skipped; of duplicate slots one wins, whole.
Status LaunchReshapeAndCache(const ReshapeAndCacheParams& params, Stream stream);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_RESHAPE_AND_CACHE_RESHAPE_AND_CACHE_H_
