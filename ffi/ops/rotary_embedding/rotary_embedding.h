// rotary_embedding turns query and key heads; rotary_and_cache does what stands between a layer's projection and its
// attention: bias, norms of heads, rotation, and K and V into the cache.
#ifndef XLA_GPU_OPS_ROTARY_EMBEDDING_ROTARY_EMBEDDING_H_
#define XLA_GPU_OPS_ROTARY_EMBEDDING_ROTARY_EMBEDDING_H_

#include <cstdint>

#include "ffi/base/dtype.h"
#include "ffi/base/status.h"
#include "ffi/device/launch_order.h"
#include "ffi/device/stream.h"
#include "ffi/host/executor.h"

namespace xla_gpu {

// Rotations by position, and where they are looked up.
struct Rotation {
  const int32_t* positions;  // [num_tokens]
  const float* table;        // [max_positions, half, 2]: cosine, sine
  int64_t max_positions;
  int64_t half;      // rotary_dim / 2
  bool interleaved;  // element 2i turns with 2i + 1; else i with i + half
};

struct RotaryEmbeddingParams {
  const void* query;  // T[num_tokens, num_heads, head_dim]
  const void* key;    // T[num_tokens, num_kv_heads, head_dim]
  void* query_out;    // as query
  void* key_out;      // as key
  Rotation rotation;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  DType dtype;  // T
};

// head_dim of rotary_and_cache: attention takes up to 256.
inline constexpr int64_t kMaxRotaryHeadDim = 512;

struct RotaryAndCacheParams {
  const void* qkv;            // T[num_tokens, num_heads + 2 * num_kv_heads, head_dim]
  const void* bias;           // T[num_heads + 2 * num_kv_heads, head_dim]; null: none
  const void* q_norm_weight;  // T[head_dim]; null: no norm
  const void* k_norm_weight;  // T[head_dim]; null: no norm
  const void* slot_mapping;   // i32 or i64 [num_slots], num_slots <= num_tokens
  const float* k_scale;       // [1] or [num_kv_heads]; null unless the cache is of a float8 type
  const float* v_scale;       // as k_scale
  void* query_out;            // T[num_tokens, num_heads, head_dim]
  void* k_cache;              // C, element (0, 0, 0, 0) of K
  void* v_cache;              // C, element (0, 0, 0, 0) of V
  Rotation rotation;

  int64_t page_stride;  // elements, as the next two
  int64_t slot_stride;
  int64_t head_stride;

  int64_t num_tokens;
  int64_t num_slots;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t num_pages;
  int64_t page_size;
  float norm_eps;
  float weight_offset;
  bool round_once;
  bool slots_are_64_bit;
  bool scale_per_head;
  DType dtype;        // T
  DType cache_dtype;  // C: T, or a float8 type
};

// Return InvalidArgument, naming the token, for a position past the table or a slot past the cache. They read host
// memory.
Status CheckPositions(const char* op, const Rotation& rotation, int64_t num_tokens);
Status CheckRotaryAndCacheSlots(const char* op, const RotaryAndCacheParams& params);

// Expect what the checks accept. Of duplicate slots the last token's values stay.
Status RunRotaryEmbedding(const RotaryEmbeddingParams& params, const Executor& executor);
Status RunRotaryAndCache(const RotaryAndCacheParams& params, const Executor& executor);

// A position past the table gives NaN; a slot past the cache is skipped.
Status LaunchRotaryEmbedding(const RotaryEmbeddingParams& params, Stream stream);
Status LaunchRotaryAndCache(const RotaryAndCacheParams& params, Stream stream, LaunchOrder order = LaunchOrder::kFirst);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_ROTARY_EMBEDDING_ROTARY_EMBEDDING_H_
