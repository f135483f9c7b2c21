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

// 0, which the compiler does not know: what is added to it, or masked by it, is in a register.
__device__ inline uint32_t ZeroUnknown(const Sm90Int4Args& args) { return args.parts < 0 ? 1 : 0; }

// Shared memory: the weights of all parts' stages, and their x behind them.
struct Int4Stages {
  int weight_bytes;  // of a stage
  int x_bytes;       // of a stage
  int stages;        // of a part
  int x_start;
  int bytes;  // of all this

  __device__ Int4Stages(const Sm90Int4Args& args, int features)
      : weight_bytes(features * 128),
        x_bytes(Int4XBytes(args.x_rows)),
        stages(args.stages),
        x_start(args.parts * args.stages * weight_bytes),
        bytes(x_start + args.parts * args.stages * x_bytes) {}

  // From the start of shared memory.
  __device__ int Weights(int part, int stage) const { return (part * stages + stage) * weight_bytes; }
  __device__ int X(int index) const { return x_start + index * x_bytes; }
  __device__ int X(int part, int stage) const { return X(part * stages + stage); }
};

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_INT4_RANGE_CUH_
