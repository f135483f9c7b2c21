// What the decode kernels are launched with, beside the operator's own parameters.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_ARGS_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_ARGS_H_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "ffi/common/cuda_status.h"
#include "ffi/ops/paged_attention/paged_attention.h"
#include "ffi/ops/paged_attention/paged_attention_decode.h"

namespace xla_gpu::decode {

inline constexpr int kTeam = int{kMaxDecodeGroups};  // blocks that share a unit
inline constexpr int kRows = 16;                     // query rows of a matrix tile: (query, head) pairs
inline constexpr int kWindow = 128;                  // sequences that are put in order at a time: one a thread

struct DecodeArgs {
  PagedAttentionParams params;
  int group;               // query heads per kv head
  int num_teams;           // gridDim.x / kTeam
  int stages;              // of the ring in shared memory
  int seq_begin, seq_end;  // the sequences of this launch
  bool cluster;            // teams are clusters and merge through shared memory; if not, through the scratch
  bool fill_unowned;       // write the rows that no sequence owns
  int box_keys;            // keys that the copy engine fetches at a time, all of one page; 0: copies by threads
  int64_t scratch_rows;    // DecodeScratchRows, which only the host may ask: it takes constants by reference
  bool slot_by_sequence;   // scratch rows are counted from seq_begin, kMaxDecodeRows a sequence, not by token
  uint64_t page_magic;     // token / page_size = token * page_magic >> page_shift
  int page_shift;

  __device__ int PageOf(int token) const { return static_cast<int>(token * page_magic >> page_shift); }
};

// K and V for the copy engine: boxes of box_keys keys by the width of a swizzled row. Unused where box_keys is 0.
struct TensorMaps {
  CUtensorMap k;
  CUtensorMap v;
};

// The arguments that follow from the parameters alone.
inline DecodeArgs MakeArgs(const PagedAttentionParams& params) {
  DecodeArgs args = {};
  args.params = params;
  args.scratch_rows = DecodeScratchRows(params);
  args.group = static_cast<int>(params.num_heads / params.num_kv_heads);
  args.fill_unowned = params.num_tokens <= kMaxDecodeRows;
  // token / page_size for tokens below 2^31, as a product and a shift.
  int log2 = 0;
  while ((int64_t{1} << log2) < params.page_size) ++log2;
  args.page_shift = 31 + log2;
  args.page_magic = ((uint64_t{1} << args.page_shift) + static_cast<uint64_t>(params.page_size) - 1) /
                    static_cast<uint64_t>(params.page_size);
  return args;
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_ARGS_H_
