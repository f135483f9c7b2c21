// sample: chooses a token from each row of logits, by temperature, min-p, top-k and top-p.
#ifndef XLA_GPU_OPS_SAMPLE_SAMPLE_H_
#define XLA_GPU_OPS_SAMPLE_SAMPLE_H_

#include <cstdint>

#include "ffi/base/dtype.h"
#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/host/executor.h"
#include "ffi/ops/sample/sample_math.h"

namespace xla_gpu {

struct SampleParams {
  const void* logits;        // T[rows, vocab]
  const float* temperature;  // [rows], as the next five; 0: the largest logit
  const int32_t* top_k;      // 0 or less: off
  const float* top_p;        // 1: off
  const float* min_p;        // 0: off
  const void* seed;          // i32 or i64
  const int32_t* step;
  bool seeds_are_64_bit;
  int32_t* token;  // [rows]; -1: there is no choice, or the row's numbers are wrong
  float* logprob;  // [rows]: of the token, in the softmax of the logits as they are; NaN with -1
  int64_t rows;
  int64_t vocab;  // 1 to 2^31 - 1
  DType dtype;    // T

#ifdef __CUDACC__
  __host__ __device__
#endif
      sampling::RowOptions
      Row(int64_t row) const {
    const int64_t wide = seeds_are_64_bit ? static_cast<const int64_t*>(seed)[row]
                                          : static_cast<int64_t>(static_cast<const int32_t*>(seed)[row]);
    return {temperature[row],
            top_p[row],
            min_p[row],
            top_k[row],
            static_cast<uint64_t>(wide),
            static_cast<uint32_t>(step[row])};
  }
};

// Returns InvalidArgument, naming the row, for numbers out of their ranges. Reads the rows' numbers as host memory.
Status CheckSampleRows(const SampleParams& params);

Status RunSample(const SampleParams& params, const Executor& executor);
Status LaunchSample(const SampleParams& params, Stream stream);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_SAMPLE_SAMPLE_H_
