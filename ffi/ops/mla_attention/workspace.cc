// The size of mla_attention's scratch memory. Compiled in every build, so that a program exported on a machine without
// CUDA has the same result shapes.
#include <cstdint>

#include "ffi/ops/mla_attention/mla_attention.h"
#include "ffi/ops/mla_attention/split_layout.h"

namespace xla_gpu {

int64_t MlaAttentionScratchBytes(const MlaAttentionParams& shapes) {
  // In the other kernels a CTA sees all keys of a row.
  if (!mla::HasSm90Shape(shapes) || shapes.num_tokens <= 0 || shapes.num_heads <= 0) return 0;
  return mla::SplitLayout::Of(shapes).Bytes();
}

}  // namespace xla_gpu
