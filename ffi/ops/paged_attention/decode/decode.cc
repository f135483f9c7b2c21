// The entry of the decode path: which kernels serve which dtypes.
#include "ffi/ops/paged_attention/decode/decode.h"

#include <cstdint>
#include <string>

#include "ffi/ops/paged_attention/decode/formats.h"
#include "ffi/ops/paged_attention/decode/params.h"

namespace xla_gpu {

Status CheckSlotCounts(const PagedAttentionParams& params) {
  if (params.page_stride != params.page_size * params.slot_stride || params.slot_stride >= int64_t{1} << 31 ||
      params.num_pages * params.page_size >= int64_t{1} << 32) {
    return Status::InvalidArgument(
        "paged_attention: kv_cache: expected fewer than 2^32 slots of fewer than 2^31 elements, one after the other, "
        "got " +
        std::to_string(params.num_pages) + " pages of " + std::to_string(params.page_size) + " slots, " +
        std::to_string(params.page_stride) + " elements from page to page and " + std::to_string(params.slot_stride) +
        " from slot to slot");
  }
  return Status::Ok();
}

Status LaunchDecode(const PagedAttentionCall& params, Stream stream) {
  // NOTE: with max_seqs == 0 all rows are padding rows, which the kernels still write.
  if (params.num_tokens == 0 || params.num_heads == 0) return Status::Ok();
  if (params.dtype == DType::kF32 || (params.tree_mask != nullptr && !decode::HasWideTiles(params))) {
    return decode::LaunchSimt(params, stream);
  }
  if (Status status = CheckSlotCounts(params); !status.ok()) return status;
  if (params.cache_dtype == DType::kF8E4M3FN) return decode::LaunchE4M3(params, stream);
  if (params.cache_dtype == DType::kF8E5M2) return decode::LaunchE5M2(params, stream);
  return params.dtype == DType::kBF16 ? decode::LaunchBF16(params, stream) : decode::LaunchF16(params, stream);
}

}  // namespace xla_gpu
