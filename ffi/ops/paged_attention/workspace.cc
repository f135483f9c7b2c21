// The size of paged_attention's scratch memory: the sum of what its paths need. Compiled in every build, so that a
// program exported on a machine without CUDA has the same result shapes.
#include <algorithm>
#include <cstdint>

#include "ffi/ops/paged_attention/decode/decode.h"
#include "ffi/ops/paged_attention/decode/params.h"
#include "ffi/ops/paged_attention/paged_attention.h"
#include "ffi/ops/paged_attention/prefill/prefill.h"
#include "ffi/ops/paged_attention/prefill/split_kv.h"

namespace xla_gpu {

int64_t DecodeScratchBytes(const PagedAttentionCall& shapes) {
  // float32 needs none: a CTA sees all keys of a row.
  if (shapes.dtype == DType::kF32 || shapes.num_kv_heads == 0) return 0;
  if (shapes.tree_words > 0 && !decode::HasWideTiles(shapes)) return 0;
  const decode::KernelConfig config =
      shapes.tree_words > 0 ? decode::MakeWideKernelConfig(shapes) : decode::MakeKernelConfig(shapes);
  return config.accumulators * config.accum_rows * (shapes.head_dim + decode::kStateFloats) * int64_t{sizeof(float)};
}

int64_t PrefillScratchBegin(const PagedAttentionCall& shapes) {
  // Where they share it, the second path waits for the first one's end; with a tree_mask there is only one of them.
  return PathsShareScratch(shapes) || shapes.tree_words > 0 ? 0 : (DecodeScratchBytes(shapes) + 255) / 256 * 256;
}

int64_t PrefillScratchBytes(const PagedAttentionCall& shapes) {
  return prefill::SplitAccumulatorLayout::Of(shapes).Bytes(shapes.head_dim);
}

int64_t PagedAttentionScratchBytes(const PagedAttentionCall& shapes) {
  // The larger of both cache formats, so that the size does not depend on cache_dtype.
  int64_t bytes = 0;
  for (const DType cache : {shapes.dtype, DType::kF8E4M3FN}) {
    PagedAttentionCall call = shapes;
    call.cache_dtype = cache;
    const int64_t prefill = PrefillScratchBytes(call);
    bytes = std::max({bytes, DecodeScratchBytes(call), prefill == 0 ? 0 : PrefillScratchBegin(call) + prefill});
  }
  return bytes;
}

}  // namespace xla_gpu
