// attention_block: norm, QKV projection, rotary embedding and cache update, attention, output projection and residual
// as one call. It is made of the operators rms_norm, linear, rotary_and_cache and paged_attention; what one hands to
// the next lies in scratch memory.
#ifndef XLA_GPU_OPS_ATTENTION_BLOCK_ATTENTION_BLOCK_H_
#define XLA_GPU_OPS_ATTENTION_BLOCK_ATTENTION_BLOCK_H_

#include <algorithm>
#include <cstdint>

#include "ffi/base/scratch_layout.h"
#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/host/executor.h"
#include "ffi/ops/linear/linear.h"
#include "ffi/ops/paged_attention/paged_attention.h"
#include "ffi/ops/rms_norm/rms_norm.h"
#include "ffi/ops/rotary_embedding/rotary_embedding.h"

namespace xla_gpu {

struct AttentionBlockParams {
  RmsNormParams norm;  // weight is null without a norm
  LinearParams qkv;    // x is the call's where there is no norm
  RotaryAndCacheParams rotary;
  PagedAttentionCall attention;
  LinearParams out;  // with the residual; out.out is the call's
  // Without the first product x is its result, without the second one attention's rows are the call's.
  bool has_qkv_product;
  bool has_out_product;
};

// Points the parts at one another's results, which lie in `scratch`. Returns the bytes of scratch memory.
inline int64_t PlaceAttentionBlock(AttentionBlockParams* params, void* scratch) {
  AttentionBlockParams& p = *params;
  ScratchLayout layout(scratch);
  const auto item = static_cast<int64_t>(SizeOf(p.qkv.dtype));
  const int64_t rows = p.qkv.rows;
  if (p.norm.weight != nullptr) p.qkv.x = p.norm.out = layout.Take(rows * p.qkv.k * item);
  p.rotary.qkv = p.qkv.x;
  if (p.has_qkv_product) p.rotary.qkv = p.qkv.out = layout.Take(rows * p.qkv.n * item);
  p.attention.query = p.rotary.query_out = layout.Take(rows * p.out.k * item);
  p.attention.out = p.out.out;
  if (p.has_out_product) p.out.x = p.attention.out = layout.Take(rows * p.out.k * item);
  p.attention.scratch_bytes = PagedAttentionScratchBytes(p.attention);
  p.attention.scratch = layout.Take(p.attention.scratch_bytes);
  p.qkv.scratch = p.out.scratch = layout.Take(
      std::max(p.has_qkv_product ? LinearScratchBytes(p.qkv) : 0, p.has_out_product ? LinearScratchBytes(p.out) : 0));
  return layout.bytes();
}

Status RunAttentionBlock(const AttentionBlockParams& params, const Executor& executor);
Status LaunchAttentionBlock(const AttentionBlockParams& params, Stream stream);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_ATTENTION_BLOCK_ATTENTION_BLOCK_H_
