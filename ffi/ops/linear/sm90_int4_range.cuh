// The chunks of a part of k, and where its ring is in shared memory, for the kernel of sm_90a for int4 weights.
#ifndef XLA_GPU_OPS_LINEAR_SM90_INT4_RANGE_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_INT4_RANGE_CUH_

#include "ffi/ops/linear/sm90_int4_traits.cuh"

namespace xla_gpu::linear {

// The chunks of k of one part.
struct ChunkRange {
  int begin;
  int end;

  __device__ ChunkRange(const Sm90Int4Args& args, int rank, int part)
      : begin(args.part_begin[rank * args.parts + part]), end(args.part_begin[rank * args.parts + part + 1]) {}
};

struct Int4Stages {
  int weight_bytes;  // of a stage
  int bytes;         // of a stage, with x
  int stages;        // of a part

  // From the start of shared memory.
  __device__ int Weights(int part, int stage) const { return (part * stages + stage) * bytes; }
  __device__ int X(int part, int stage) const { return Weights(part, stage) + weight_bytes; }
};

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_INT4_RANGE_CUH_
