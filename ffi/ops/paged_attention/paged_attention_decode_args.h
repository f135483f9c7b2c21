// What the decode kernels are launched with, beside the operator's own parameters.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_ARGS_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_ARGS_H_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "ffi/ops/paged_attention/paged_attention.h"
#include "ffi/ops/paged_attention/paged_attention_decode.h"

namespace xla_gpu::decode {

#define XLA_GPU_DECODE_CHECK(expression)                                                                         \
  do {                                                                                                           \
    if (const cudaError_t error_ = (expression); error_ != cudaSuccess) {                                        \
      return Status::Internal(std::string(__FILE__) + ":" + std::to_string(__LINE__) + ": " #expression + ": " + \
                              cudaGetErrorString(error_));                                                       \
    }                                                                                                            \
  } while (false)

inline constexpr int kGroups = int{kMaxDecodeGroups};  // of a unit, at most
inline constexpr int kRows = 16;                       // query rows of a matrix tile: (query, head) pairs
inline constexpr int kWindow = 128;                    // sequences that are put in order at a time: one a thread

struct DecodeArgs {
  PagedAttentionParams params;
  int group;               // query heads per kv head
  int team;                // blocks of a team: a power of two, at most kGroups
  bool mixed;              // short units are computed by single blocks
  int block_slots;         // blocks that are resident at a time
  int num_teams;           // gridDim.x / team
  int stages;              // of the ring in shared memory
  int seq_begin, seq_end;  // the sequences of this launch
  bool cluster;            // teams are clusters and merge through shared memory; if not, through the scratch
  bool fill_unowned;       // write the rows that no sequence owns
  int part_quads;          // fours of columns of a row that one block of a team merges
  uint32_t part_magic;     // quad / part_quads = quad * part_magic >> 16
  int box_keys;            // keys that the copy engine fetches at a time, all of one page; 0: copies by threads
  int64_t scratch_rows;    // query rows that the scratch has room for
  bool slot_by_sequence;   // scratch rows are counted from seq_begin, kMaxDecodeRows a sequence, not by token
  uint64_t page_magic;     // token / page_size = token * page_magic >> page_shift
  int page_shift;

  __device__ int PartOf(int quad) const { return static_cast<int>(quad * part_magic >> 16); }
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
  args.group = static_cast<int>(params.num_heads / params.num_kv_heads);
  args.fill_unowned = params.num_tokens <= kMaxDecodeRows;
  args.scratch_rows = DecodeScratchRows(params);
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
