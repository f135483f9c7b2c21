// bidirectional_attention on the host: paged_attention's tiles over keys and values where they lie.
#include <cstdint>
#include <vector>

#include "ffi/ops/bidirectional_attention/as_paged_attention.h"
#include "ffi/ops/bidirectional_attention/bidirectional_attention.h"

namespace xla_gpu {
namespace {

// Of all max_seqs sequences, whatever the numbers are: only those of checked sequences are used.
std::vector<int32_t> SequenceLengths(const BidirectionalAttentionParams& params) {
  std::vector<int32_t> lengths(params.max_seqs);
  for (int64_t s = 0; s < params.max_seqs; ++s) {
    const int64_t begin = params.query_start_loc[s];
    lengths[s] = static_cast<int32_t>(params.query_start_loc[s + 1] - begin);
  }
  return lengths;
}

}  // namespace

Status CheckBidirectionalAttentionMetadata(const BidirectionalAttentionParams& params) {
  const std::vector<int32_t> lengths = SequenceLengths(params);
  return CheckPagedAttentionMetadata(bidirectional::AsPagedAttention(params, lengths.data()),
                                     "bidirectional_attention");
}

Status RunBidirectionalAttention(const BidirectionalAttentionParams& params, const Executor& executor) {
  const std::vector<int32_t> lengths = SequenceLengths(params);
  return RunPagedAttention(bidirectional::AsPagedAttention(params, lengths.data()), executor);
}

}  // namespace xla_gpu
