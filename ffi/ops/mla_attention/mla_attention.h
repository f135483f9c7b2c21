// mla_attention: multi-head latent attention of the new tokens of a ragged batch over a paged cache of latents.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_MLA_ATTENTION_H_
#define XLA_GPU_OPS_MLA_ATTENTION_MLA_ATTENTION_H_

#include <cstdint>

#include "ffi/base/dtype.h"
#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/host/executor.h"

namespace xla_gpu {

struct MlaAttentionParams {
  const void* query;               // T[num_tokens, num_heads, head_dim]
  const void* kv_cache;            // T[num_pages, page_size, head_dim]; a key's first value_dim elements are its value
  const int32_t* context_lens;     // [max_seqs]
  const int32_t* block_tables;     // [max_seqs, pages_per_seq]
  const int32_t* query_start_loc;  // [max_seqs + 1]
  const int32_t* num_seqs;         // [1]
  void* out;                       // T[num_tokens, num_heads, value_dim]
  float* lse;                      // [num_tokens, num_heads], natural log of the softmax's sum; null: not requested
  void* scratch;                   // [scratch_bytes]; undefined contents; CUDA only
  int64_t scratch_bytes;

  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_dim;
  int64_t value_dim;
  int64_t num_pages;
  int64_t page_size;
  int64_t max_seqs;
  int64_t pages_per_seq;

  float scale;
  DType dtype;  // T
};

// Any multiple of 8 up to these is supported.
inline constexpr int64_t kMaxMlaHeadDim = 576;
inline constexpr int64_t kMaxMlaValueDim = 512;

// Bytes of scratch that LaunchMlaAttention needs. Depends on shapes and dtype alone (never on the values in device
// memory, nor on the GPU), so that it can be a result of the custom call.
int64_t MlaAttentionScratchBytes(const MlaAttentionParams& shapes);

// Returns InvalidArgument, naming the operator and the sequence, for metadata that the operator excludes. Reads the
// metadata alone, as host memory: for CUDA the caller passes copies.
Status CheckMlaAttentionMetadata(const MlaAttentionParams& params, const char* op);

// Expects metadata that CheckMlaAttentionMetadata accepts.
Status RunMlaAttention(const MlaAttentionParams& params, const Executor& executor);

// Wrong values in device memory are never followed: they make the rows of that sequence NaN, or all rows where
// query_start_loc or num_seqs are wrong as in paged_attention. The bits of a sequence's rows do not depend on its page
// numbers.
Status LaunchMlaAttention(const MlaAttentionParams& params, Stream stream);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_MLA_ATTENTION_MLA_ATTENTION_H_
