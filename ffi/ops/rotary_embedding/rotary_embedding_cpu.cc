#include <cstring>
#include <string>

#include "ffi/host/cache_slots.h"
#include "ffi/host/float_mode.h"
#include "ffi/host/parallel_rows.h"
#include "ffi/host/rms_norm.h"
#include "ffi/ops/rotary_embedding/rotary_embedding.h"

namespace xla_gpu {
namespace {

// Elements of one work item: enough to outweigh a thread's wake-up.
constexpr int64_t kRotaryBlock = int64_t{1} << 14;

// Turns one head of a token; `out` may be `row`.
template <class Element>
void Rotate(const Rotation& rotation, int64_t token, const typename Element::Stored* row, typename Element::Stored* out,
            int64_t head_dim) {
  const float* const turns = rotation.table + rotation.positions[token] * rotation.half * 2;
  for (int64_t i = 0; i < rotation.half; ++i) {
    const int64_t first = rotation.interleaved ? 2 * i : i;
    const int64_t second = rotation.interleaved ? 2 * i + 1 : i + rotation.half;
    const float a = Element::Load(row[first]), b = Element::Load(row[second]);
    const float cos = turns[2 * i], sin = turns[2 * i + 1];
    out[first] = Element::Store(a * cos - b * sin);
    out[second] = Element::Store(b * cos + a * sin);
  }
  const int64_t rest = 2 * rotation.half;
  if (out != row) std::memcpy(out + rest, row + rest, (head_dim - rest) * sizeof(*row));
}

template <class Element>
Status Embed(const RotaryEmbeddingParams& p, const Executor& executor) {
  using Stored = typename Element::Stored;
  const int64_t heads = p.num_heads + p.num_kv_heads;
  ParallelForRows(executor, p.num_tokens, heads * p.head_dim, kRotaryBlock, [&](int64_t token) {
    for (int64_t head = 0; head < heads; ++head) {
      const bool is_query = head < p.num_heads;
      const int64_t at = is_query ? (token * p.num_heads + head) * p.head_dim
                                  : (token * p.num_kv_heads + head - p.num_heads) * p.head_dim;
      Rotate<Element>(p.rotation, token, static_cast<const Stored*>(is_query ? p.query : p.key) + at,
                      static_cast<Stored*>(is_query ? p.query_out : p.key_out) + at, p.head_dim);
    }
  });
  return Status::Ok();
}

// One head of all tokens, token after token, so that of duplicate slots the last one stays.
template <class Element>
void Head(const RotaryAndCacheParams& p, int64_t head, StoreRowFunction* store_row) {
  using Stored = typename Element::Stored;
  const int64_t heads = p.num_heads + 2 * p.num_kv_heads;
  const bool is_query = head < p.num_heads, is_value = head >= p.num_heads + p.num_kv_heads;
  const int64_t kv_head = is_query ? 0 : (head - p.num_heads) % p.num_kv_heads;
  const float* const scales = is_value ? p.v_scale : p.k_scale;
  const float scale = scales != nullptr ? scales[p.scale_per_head ? kv_head : 0] : 1.0f;
  const void* const norm = is_query ? p.q_norm_weight : is_value ? nullptr : p.k_norm_weight;
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    const int64_t slot = token < p.num_slots ? SlotAt(p.slot_mapping, p.slots_are_64_bit, token) : -1;
    if (!is_query && slot < 0) continue;
    Stored row[kMaxRotaryHeadDim];
    std::memcpy(row, static_cast<const Stored*>(p.qkv) + (token * heads + head) * p.head_dim,
                p.head_dim * sizeof(Stored));
    if (p.bias != nullptr) {
      const auto* bias = static_cast<const Stored*>(p.bias) + head * p.head_dim;
      for (int64_t d = 0; d < p.head_dim; ++d) row[d] = Element::Store(Element::Load(row[d]) + Element::Load(bias[d]));
    }
    if (norm != nullptr) {
      RmsNormRow<Element>(row, static_cast<const Stored*>(norm), row, p.head_dim, p.norm_eps,
                          {p.weight_offset, p.round_once});
    }
    if (!is_value) Rotate<Element>(p.rotation, token, row, row, p.head_dim);
    if (is_query) {
      std::memcpy(static_cast<Stored*>(p.query_out) + (token * p.num_heads + head) * p.head_dim, row,
                  p.head_dim * sizeof(Stored));
      continue;
    }
    const int64_t at =
        slot / p.page_size * p.page_stride + slot % p.page_size * p.slot_stride + kv_head * p.head_stride;
    char* const cache = static_cast<char*>(is_value ? p.v_cache : p.k_cache);
    store_row(row, scale, p.head_dim, cache + at * static_cast<int64_t>(SizeOf(p.cache_dtype)));
  }
}

template <class Element>
Status Heads(const RotaryAndCacheParams& p, const Executor& executor) {
  StoreRowFunction* const store_row = SelectStoreRow(p.dtype, p.cache_dtype);
  const int64_t heads = p.num_heads + 2 * p.num_kv_heads;
  const auto run = [&](int64_t head) {
    const ScopedFloatMode mode;
    Head<Element>(p, head, store_row);
  };
  if (p.num_tokens * heads * p.head_dim < 2 * kRotaryBlock) {
    for (int64_t head = 0; head < heads; ++head) run(head);
  } else {
    ParallelFor(executor, heads, run);
  }
  return Status::Ok();
}

}  // namespace

Status CheckPositions(const char* op, const Rotation& rotation, int64_t num_tokens) {
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int64_t position = rotation.positions[token];
    if (position >= 0 && position < rotation.max_positions) continue;
    return Status::InvalidArgument(std::string(op) + ": positions[" + std::to_string(token) +
                                   "]: expected a position from 0 to max_positions - 1 = " +
                                   std::to_string(rotation.max_positions - 1) + ", got " + std::to_string(position));
  }
  return Status::Ok();
}

Status CheckRotaryAndCacheSlots(const char* op, const RotaryAndCacheParams& params) {
  return CheckSlots(op, params.slot_mapping, params.slots_are_64_bit, params.num_slots,
                    params.num_pages * params.page_size);
}

Status RunRotaryEmbedding(const RotaryEmbeddingParams& params, const Executor& executor) {
  return WithElement(params.dtype, [&](auto element) { return Embed<decltype(element)>(params, executor); });
}

Status RunRotaryAndCache(const RotaryAndCacheParams& params, const Executor& executor) {
  return WithElement(params.dtype, [&](auto element) { return Heads<decltype(element)>(params, executor); });
}

}  // namespace xla_gpu
