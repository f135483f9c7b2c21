#include <cstdint>
#include <cstring>

#include "ffi/host/cache_slots.h"
#include "ffi/host/parallel_for.h"
#include "ffi/ops/concat_and_cache_mla/concat_and_cache_mla.h"

namespace xla_gpu {
namespace {

// Below so many bytes a second thread's wake-up costs more than it saves.
constexpr int64_t kMinParallelLatentBytes = int64_t{1} << 17;

// Stores the tokens whose slot is `share` modulo `num_shares`, one after the other, so that of duplicate slots the last
// token's values stay.
void StoreLatents(const ConcatAndCacheMlaParams& params, int64_t share, int64_t num_shares) {
  const int64_t size = SizeOf(params.dtype);
  const int64_t latent_bytes = params.kv_lora_rank * size, rope_bytes = params.rope_dim * size;
  const auto* const kv_c = static_cast<const char*>(params.kv_c);
  const auto* const k_pe = static_cast<const char*>(params.k_pe);
  auto* const kv_cache = static_cast<char*>(params.kv_cache);
  for (int64_t token = 0; token < params.num_slots; ++token) {
    const int64_t slot = SlotAt(params.slot_mapping, params.slots_are_64_bit, token);
    if (slot < 0 || slot % num_shares != share) continue;
    char* const to = kv_cache + slot * (latent_bytes + rope_bytes);
    std::memcpy(to, kv_c + token * latent_bytes, latent_bytes);
    std::memcpy(to + latent_bytes, k_pe + token * rope_bytes, rope_bytes);
  }
}

}  // namespace

Status CheckConcatAndCacheMlaSlots(const ConcatAndCacheMlaParams& params) {
  return CheckSlots("concat_and_cache_mla", params.slot_mapping, params.slots_are_64_bit, params.num_slots,
                    params.num_pages * params.page_size);
}

Status RunConcatAndCacheMla(const ConcatAndCacheMlaParams& params, const Executor& executor) {
  const int64_t row = params.kv_lora_rank + params.rope_dim;
  const bool parallel = params.num_slots * row * static_cast<int64_t>(SizeOf(params.dtype)) >= kMinParallelLatentBytes;
  const int64_t shares = parallel ? executor.num_threads() + 1 : 1;
  ParallelFor(executor, shares, [&](int64_t share) { StoreLatents(params, share, shares); });
  return Status::Ok();
}

}  // namespace xla_gpu
