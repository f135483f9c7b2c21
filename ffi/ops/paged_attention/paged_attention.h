// paged_attention: attention of the new tokens of a ragged batch over a paged KV cache.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_H_

#include <cstdint>

#include "ffi/base/dtype.h"
#include "ffi/base/status.h"
#include "ffi/device/launch_order.h"
#include "ffi/device/stream.h"
#include "ffi/host/executor.h"

namespace xla_gpu {

struct PagedAttentionParams {
  // Both cache layouts reach the kernels as two base pointers and three strides: element (page, slot, head, d) of K is
  // k_cache[page * page_stride + slot * slot_stride + head * head_stride + d], and of V likewise.
  const void* query;               // T[num_tokens, num_heads, head_dim]
  const void* k_cache;             // C, element (0, 0, 0, 0) of K
  const void* v_cache;             // C, element (0, 0, 0, 0) of V
  const int32_t* context_lens;     // [max_seqs]
  const int32_t* block_tables;     // [max_seqs, pages_per_seq]
  const int32_t* query_start_loc;  // [max_seqs + 1]
  const int32_t* num_seqs;         // [1]
  const float* k_scale;            // [1] or [num_kv_heads]: K is stored * k_scale; null unless C is a float8 type
  const float* v_scale;            // as k_scale, for V
  const float* sinks;              // [num_heads], a logit that joins the softmax's sum and has no value; null: none
  void* out;                       // T[num_tokens, num_heads, head_dim]
  float* lse;                      // [num_tokens, num_heads], natural log of the softmax's sum; null: not requested
  void* scratch;                   // [scratch_bytes]; undefined contents; CUDA only
  int64_t scratch_bytes;

  int64_t page_stride;  // elements, as the next two
  int64_t slot_stride;
  int64_t head_stride;

  int64_t num_tokens;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t num_pages;
  int64_t page_size;
  int64_t max_seqs;
  int64_t pages_per_seq;

  float scale;
  int64_t sliding_window;  // keys that a query sees, itself included; 0: all
  float soft_cap;          // 0: off
  DType dtype;             // T
  DType cache_dtype;       // C: T, or a float8 type
  bool scale_per_head;     // k_scale and v_scale have num_kv_heads elements
  int max_decode_tokens;   // CUDA: sequences of up to so many new tokens belong to the decode path (decode.h)
};

namespace decode {
struct SharedCall;
struct RareDecodeRows;
}  // namespace decode

// The kernels that a launch of the prefill path launches: its combine kernel may come later than the others.
enum class PrefillKernels { kAll, kAllButCombine, kCombine };

// A call: beside what all kernels take, what those take that speculative trees are computed with.
struct PagedAttentionCall : PagedAttentionParams {
  // [num_tokens, tree_words], 1 or 2 words: bit j of row i of a sequence: the row sees the sequence's new token j. The
  // context before the new tokens it sees always. Null: causal.
  const uint32_t* tree_mask;
  int64_t tree_words;
  // CUDA: kDependent behind the kernel of the same call that writes `query` and the new tokens' keys and values. All
  // other operands, and the cache's other slots, are complete then when that kernel starts.
  LaunchOrder order;
  PrefillKernels prefill_kernels;  // CUDA
  // CUDA: where not null, kernels of the prefill path do work of the decode path.
  decode::SharedCall* decode_work = nullptr;
  // CUDA: where not null, LaunchPrefill may take the sequences of the decode path too.
  decode::RareDecodeRows* rare_decode_rows = nullptr;
  // Host: keys behind its own that each query sees too, where there is no tree_mask (bidirectional_attention).
  int64_t keys_behind = 0;
  // Host: elements of a value, and so of a row of `out`, at most head_dim and kMaxHostValueDim (mla_attention); 0: as
  // many as of a key. The host's tiles take any head_dim.
  int64_t value_dim = 0;

  int64_t ValueDim() const { return value_dim > 0 ? value_dim : head_dim; }

  // New tokens of a sequence, at most, where there is a tree_mask.
  int64_t MaxTreeTokens() const { return 32 * tree_words; }
};

// The largest head_dim; any multiple of 8 up to it is supported.
inline constexpr int64_t kMaxHeadDim = 256;
inline constexpr int64_t kMaxHostValueDim = 512;

// Bytes of scratch that LaunchPagedAttention needs. Depends on shapes and dtype alone (never on the values in device
// memory, nor on the GPU), so that it can be a result of the custom call.
int64_t PagedAttentionScratchBytes(const PagedAttentionCall& shapes);

// Returns InvalidArgument, naming the operator and the sequence, for metadata that paged_attention excludes. Reads the
// metadata alone, as host memory: for CUDA the caller passes copies.
Status CheckPagedAttentionMetadata(const PagedAttentionCall& params, const char* op);

// Expects metadata that CheckPagedAttentionMetadata accepts.
Status RunPagedAttention(const PagedAttentionCall& params, const Executor& executor);
Status LaunchPagedAttention(const PagedAttentionCall& params, Stream stream);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_H_
