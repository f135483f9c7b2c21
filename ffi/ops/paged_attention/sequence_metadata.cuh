// Which sequence owns which query rows. Every kernel of paged_attention decides it by the same rules.
//
// The metadata lives in device memory and may be wrong. Under these rules each row is written by exactly one kernel,
// and a wrong entry affects as few sequences as possible:
//  - num_seqs outside [0, max_seqs]: no sequence is live; every row is NaN.
//  - A live sequence s owns the rows [b, e) = [query_start_loc[s], query_start_loc[s + 1]) iff
//    0 <= b <= e <= num_tokens and b is at least every earlier entry that itself lies in [0, num_tokens]. Two sequences
//    never own the same row: for s < t, t's first row is at least query_start_loc[s + 1].
//  - Owned rows are written by the path that q_len selects (decode up to max_decode_tokens, prefill above). They are
//    NaN if context_len is negative or over pages_per_seq * page_size, or if a page number that a query of the
//    sequence sees is outside [0, num_pages).
//  - Rows that no live sequence owns are padding rows (padding_rows.cuh): 0 from query_start_loc[num_seqs] on, if that
//    entry lies in [0, num_tokens], and before query_start_loc[0], if all entries are in order; NaN otherwise.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_SEQUENCE_METADATA_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_SEQUENCE_METADATA_CUH_

#include <cstdint>

#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu {

struct SequenceInfo {
  int32_t q_begin;      // first row
  int32_t q_len;        // rows; 0 where the sequence owns none
  int32_t context_len;  // keys, the new ones included; 0 where !valid
  bool valid;           // context_len is in range; if not, the owned rows are NaN
  bool owned;           // the sequence owns its rows: the range is in bounds and in order
};

// The number of live sequences, or -1 where num_seqs is outside [0, max_seqs].
__device__ inline int32_t LiveSequences(const PagedAttentionParams& params) {
  const int32_t n = __ldg(params.num_seqs);
  return n >= 0 && n <= params.max_seqs ? n : -1;
}

// True iff the ranges of sequences [0, num_live) are all in order and in bounds, so that LoadSequence need not look at
// earlier entries. Called by all threads of a CTA, with the same arguments.
__device__ inline bool QueryStartsInOrder(const PagedAttentionParams& params, int32_t num_live) {
  bool ok = true;
  for (int32_t s = threadIdx.x; s < num_live; s += blockDim.x) {
    const int32_t begin = __ldg(params.query_start_loc + s);
    const int32_t end = __ldg(params.query_start_loc + s + 1);
    ok = ok && 0 <= begin && begin <= end && end <= params.num_tokens;
  }
  return __syncthreads_and(ok);
}

// True iff no entry of query_start_loc before s that is in bounds lies above `begin`.
// NOTE: not inlined, since it only runs on wrong metadata.
__device__ __noinline__ static bool NoEarlierStartAbove(const int32_t* query_start_loc, int64_t num_tokens, int32_t s,
                                                        int32_t begin) {
  for (int32_t i = 0; i < s; ++i) {
    const int32_t earlier = __ldg(query_start_loc + i);
    if (earlier >= 0 && earlier <= num_tokens && earlier > begin) return false;
  }
  return true;
}

// Live sequence s. `in_order` is what QueryStartsInOrder returned.
__device__ inline SequenceInfo LoadSequence(const PagedAttentionParams& params, int32_t s, bool in_order) {
  const int32_t begin = __ldg(params.query_start_loc + s);
  const int32_t end = __ldg(params.query_start_loc + s + 1);
  const int32_t context_len = __ldg(params.context_lens + s);
  bool owns = 0 <= begin && begin <= end && end <= params.num_tokens;
  if (!in_order) owns = owns && NoEarlierStartAbove(params.query_start_loc, params.num_tokens, s, begin);
  const bool valid = context_len >= 0 && context_len <= params.pages_per_seq * params.page_size;
  return {begin, owns ? end - begin : 0, valid ? context_len : 0, valid, owns};
}

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_SEQUENCE_METADATA_CUH_
