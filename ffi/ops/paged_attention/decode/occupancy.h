// How the split-KV kernels run on the devices of this process, looked up once for each.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_OCCUPANCY_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_OCCUPANCY_H_

#include "ffi/ops/paged_attention/decode/params.h"

namespace xla_gpu::decode {

// How a split-KV kernel runs on a device.
struct Occupancy {
  int sms = 0;
  int ctas = 0;  // that are resident at a time
  // The device's code has large shared memory (traits.cuh).
  bool large_shared_memory = false;
  bool dependent = false;  // the kernels' code is for sm_90 or newer: programmatic dependent launch
};

// Whether StoreOccupancy was called for a kernel on a device, with what. Both are for any thread.
bool FindOccupancy(void (*kernel)(DecodeArgs), int device, Occupancy* occupancy);
void StoreOccupancy(void (*kernel)(DecodeArgs), int device, const Occupancy& occupancy);

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_OCCUPANCY_H_
