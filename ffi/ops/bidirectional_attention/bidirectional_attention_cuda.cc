// bidirectional_attention on a GPU: checks what the kernels rely on, and chooses one. The launch depends on shapes
// alone.
#include <cstdint>
#include <string>

#include "ffi/ops/bidirectional_attention/bidirectional_attention.h"
#include "ffi/ops/bidirectional_attention/portable.h"

namespace xla_gpu {
namespace {

// Positions are counted in 32 bits up to the end of a sequence's last key tile, of at most 128 keys.
constexpr int64_t kMostTokens = (int64_t{1} << 31) - 129;

// Vectors of 16 bytes are read and written whole. Rows are counted in 32 bits.
Status CheckLayout(const BidirectionalAttentionParams& params) {
  const struct {
    const char* name;
    const void* pointer;
  } arrays[] = {{"query", params.query}, {"key", params.key}, {"value", params.value}, {"out", params.out}};
  for (const auto& array : arrays) {
    if (reinterpret_cast<uintptr_t>(array.pointer) % 16 != 0) {
      return Status::InvalidArgument(std::string("bidirectional_attention: ") + array.name +
                                     ": expected an address aligned to 16 bytes, got one that is not");
    }
  }
  if (const int64_t rows = params.num_tokens * params.num_heads; rows >= int64_t{1} << 31) {
    return Status::InvalidArgument("bidirectional_attention: query: expected fewer than 2^31 rows of head_dim, got " +
                                   std::to_string(rows));
  }
  if (params.num_tokens > kMostTokens) {
    return Status::InvalidArgument("bidirectional_attention: query: expected at most " + std::to_string(kMostTokens) +
                                   " tokens, got " + std::to_string(params.num_tokens));
  }
  if (params.max_seqs >= int64_t{1} << 30) {
    return Status::InvalidArgument("bidirectional_attention: query_start_loc: expected max_seqs below 2^30, got " +
                                   std::to_string(params.max_seqs));
  }
  return Status::Ok();
}

}  // namespace

Status LaunchBidirectionalAttention(const BidirectionalAttentionParams& params, Stream stream) {
  if (params.num_tokens == 0 || params.num_heads == 0) return Status::Ok();
  if (Status status = CheckLayout(params); !status.ok()) return status;
  if (params.dtype == DType::kF32) return bidirectional::LaunchPortableF32(params, stream);
  bool suits = false;
  if (Status status = bidirectional::SuitsSm90(params, &suits); !status.ok()) return status;
  return suits ? bidirectional::LaunchSm90(params, stream) : bidirectional::LaunchPortable16Bit(params, stream);
}

}  // namespace xla_gpu
