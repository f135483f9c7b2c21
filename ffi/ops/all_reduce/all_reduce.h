// all_reduce: the sum over the GPUs of a group; all_reduce_add_rms_norm: the same, a residual added, and the RMS norm.
//
// The summands are either gathered (`parts`, all ranks' values in this process's memory: XLA's all-gather put them
// there) or exchanged by the kernel itself with the peers of a device group (`group`, CUDA only). Both add in the order
// of ranks, in float32, and round once: the bits are the same.
#ifndef XLA_GPU_OPS_ALL_REDUCE_ALL_REDUCE_H_
#define XLA_GPU_OPS_ALL_REDUCE_ALL_REDUCE_H_

#include <cstdint>

#include "ffi/base/dtype.h"
#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/host/executor.h"

namespace xla_gpu {

struct GroupView;

struct AllReduceParams {
  const void* x;           // T[size] of this rank with a group, else T[ranks, size]
  void* out;               // T[size]
  int64_t size;            // elements of the result
  int64_t ranks;           // parts in x; 1 with a group
  DType dtype;             // T
  const GroupView* group;  // nullptr: x is gathered
};

struct AllReduceAddRmsNormParams {
  const void* x;         // T[num_rows, hidden] of this rank with a group, else T[ranks, num_rows, hidden]
  const void* residual;  // T[num_rows, hidden]
  const void* weight;    // T[hidden]
  void* out;             // T[num_rows, hidden]
  void* sum;             // T[num_rows, hidden]
  int64_t num_rows;
  int64_t hidden;
  int64_t ranks;  // parts in x; 1 with a group
  float eps;
  DType dtype;
  const GroupView* group;
};

Status RunAllReduce(const AllReduceParams& params, const Executor& executor);
Status RunAllReduceAddRmsNorm(const AllReduceAddRmsNormParams& params, const Executor& executor);

Status LaunchAllReduce(const AllReduceParams& params, Stream stream);
Status LaunchAllReduceAddRmsNorm(const AllReduceAddRmsNormParams& params, Stream stream);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_ALL_REDUCE_ALL_REDUCE_H_
