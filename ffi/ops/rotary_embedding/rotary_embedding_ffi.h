// The checks of rotary_and_cache, for every handler that stores keys and values as it does.
#ifndef XLA_GPU_OPS_ROTARY_EMBEDDING_ROTARY_EMBEDDING_FFI_H_
#define XLA_GPU_OPS_ROTARY_EMBEDDING_ROTARY_EMBEDDING_FFI_H_

#include <cstdint>
#include <optional>

#include "ffi/handlers/check.h"
#include "ffi/ops/rotary_embedding/rotary_embedding.h"

namespace xla_gpu {

struct RotaryAndCacheOperands {
  ffi::AnyBuffer positions, table, kv_cache, slot_mapping;
  ffi::AnyBuffer cache_out;  // the result, which is what is written
  std::optional<ffi::AnyBuffer> k_scale, v_scale, q_norm_weight, k_norm_weight;
};

// Reads the operands for qkv of [params->num_tokens, width] and params->dtype. `qkv` is the argument that errors about
// the width name. Leaves pointers to qkv, query_out and the bias, and the norms' numbers, to the caller.
ffi::Error GetRotaryAndCacheParams(const char* op, const char* qkv, int64_t width,
                                   const RotaryAndCacheOperands& operands, bool interleaved,
                                   RotaryAndCacheParams* params);

// Positions and slots: errors for those out of range, of host memory and of copies of device memory.
Status CheckRotaryAndCacheValues(const char* op, const RotaryAndCacheParams& params);
#ifdef XLA_GPU_WITH_CUDA
Status CheckRotaryAndCacheValuesOnDevice(const char* op, const RotaryAndCacheParams& params, Stream stream);
#endif

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_ROTARY_EMBEDDING_ROTARY_EMBEDDING_FFI_H_
