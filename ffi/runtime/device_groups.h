// The device groups of this process, by number and device.
#ifndef XLA_GPU_RUNTIME_DEVICE_GROUPS_H_
#define XLA_GPU_RUNTIME_DEVICE_GROUPS_H_

#include <cstdint>

#include "ffi/base/status.h"
#include "ffi/ops/all_reduce/device_group.h"

namespace xla_gpu {

// The view of GPU `device_ordinal`, or an error that says what is missing: no such group, not connected yet, or broken
// by a call that timed out. `op` begins the text.
Status FindGroup(const char* op, int64_t group, int device_ordinal, const GroupView** view);

}  // namespace xla_gpu

#endif  // XLA_GPU_RUNTIME_DEVICE_GROUPS_H_
