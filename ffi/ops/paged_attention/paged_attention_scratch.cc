// The scratch memory of paged_attention, as the sum of what its paths need. Compiled in every build: a program exported
// on a machine without CUDA has the same result shapes.
#include "ffi/ops/paged_attention/paged_attention.h"
#include "ffi/ops/paged_attention/paged_attention_decode.h"
#include "ffi/ops/paged_attention/paged_attention_prefill.h"

namespace xla_gpu {

int64_t PagedAttentionScratchBytes(const PagedAttentionParams& shapes) {
  return DecodeScratchBytes(shapes) + PrefillScratchBytes(shapes);
}

}  // namespace xla_gpu
