// Rows of an array as work items of a parallel loop.
#ifndef XLA_GPU_HOST_PARALLEL_ROWS_H_
#define XLA_GPU_HOST_PARALLEL_ROWS_H_

#include <algorithm>
#include <cstdint>

#include "ffi/host/float_mode.h"
#include "ffi/host/parallel_for.h"

namespace xla_gpu {

// Calls `body(row)` once for each of `num_rows` rows of `row_size` elements, in the kernels' floating-point mode. A
// work item is as many rows as have `item_size` elements, at least one: enough to outweigh a thread's wake-up.
template <typename Body>
void ParallelForRows(const Executor& executor, int64_t num_rows, int64_t row_size, int64_t item_size,
                     const Body& body) {
  const int64_t rows = std::max<int64_t>(1, item_size / std::max<int64_t>(row_size, 1));
  ParallelFor(executor, (num_rows + rows - 1) / rows, [&](int64_t item) {
    const ScopedFloatMode mode;
    const int64_t end = std::min(num_rows, (item + 1) * rows);
    for (int64_t row = item * rows; row < end; ++row) body(row);
  });
}

}  // namespace xla_gpu

#endif  // XLA_GPU_HOST_PARALLEL_ROWS_H_
