// concat_and_cache_mla: stores new latents and rotary keys into slots of a paged cache of latents, in place.
#ifndef XLA_GPU_OPS_CONCAT_AND_CACHE_MLA_CONCAT_AND_CACHE_MLA_H_
#define XLA_GPU_OPS_CONCAT_AND_CACHE_MLA_CONCAT_AND_CACHE_MLA_H_

#include <cstdint>

#include "ffi/base/dtype.h"
#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/host/executor.h"

namespace xla_gpu {

struct ConcatAndCacheMlaParams {
  const void* kv_c;          // T[num_tokens, kv_lora_rank]
  const void* k_pe;          // T[num_tokens, rope_dim]
  const void* slot_mapping;  // i32 or i64 [num_slots], num_slots <= num_tokens
  bool slots_are_64_bit;
  void* kv_cache;  // T[num_pages, page_size, kv_lora_rank + rope_dim]

  int64_t num_slots;
  int64_t kv_lora_rank;
  int64_t rope_dim;
  int64_t num_pages;
  int64_t page_size;
  DType dtype;  // T
};

// Returns InvalidArgument, naming the token, for a slot past the cache. Reads `slot_mapping` as host memory.
Status CheckConcatAndCacheMlaSlots(const ConcatAndCacheMlaParams& params);

// Expects slots that CheckConcatAndCacheMlaSlots accepts. Of duplicate slots the last token's values stay.
Status RunConcatAndCacheMla(const ConcatAndCacheMlaParams& params, const Executor& executor);
// Slots past the cache are skipped; of duplicate slots one wins, whole.
Status LaunchConcatAndCacheMla(const ConcatAndCacheMlaParams& params, Stream stream);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_CONCAT_AND_CACHE_MLA_CONCAT_AND_CACHE_MLA_H_
