// From sums in shared memory to results, a feature of a row by each thread: for few rows.
#ifndef XLA_GPU_OPS_LINEAR_SM90_FEATURES_EPILOGUE_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_FEATURES_EPILOGUE_CUH_

#include <cstdint>

#include "ffi/device/mbarrier.cuh"
#include "ffi/ops/linear/epilogue.cuh"
#include "ffi/ops/linear/sm90_traits.cuh"

namespace xla_gpu::linear {

// From the sums of all parts of k, [parts][rows][pitch], to results of a work tile's `features` from `first` on, up to
// 8 rows: a feature of a row by each of the `threads` threads that have written them, and little code, since most of it
// runs once and is not in the instruction cache. A thread reads before the barrier what depends on no other.
// inverse: 2^kInverseShift / features, rounded up.
template <typename T>
__device__ __forceinline__ void FinishFeatures(const LinearArgs& args, int first, int features, int inverse, int parts,
                                               const float* sums, int part_floats, int pitch, int threads) {
  const bool gated = args.activation != Activation::kNone;
  const int out_features = gated ? args.n / 2 : args.n;
  const int elements = args.rows * features;
  const auto load = [](const void* array, int64_t i) {
    return array == nullptr ? 0.0f : static_cast<float>(static_cast<const T*>(array)[i]);
  };
  int i = static_cast<int>(threadIdx.x), row, column;
  int64_t at;
  float bias = 0.0f, factor_bias = 0.0f, residual = 0.0f;
  const auto find = [&] {
    if (i >= elements) return;
    row = i * inverse >> kInverseShift, column = i - row * features;
    if (first + column >= out_features) return;
    at = static_cast<int64_t>(row) * out_features + first + column;
    bias = load(args.bias, first + column);
    if (gated) factor_bias = load(args.bias, out_features + first + column);
    residual = load(args.residual, at);
  };
  find();
  NamedBarrierSync(1, threads);
  while (i < elements) {
    if (first + column < out_features) {
      const float* const from = sums + row * pitch + column;
      float values[8], factor = gated ? from[features] : 0.0f;
#pragma unroll
      for (int part = 0; part < 8; ++part) {
        if (part < parts) values[part] = from[part * part_floats];
      }
      float value = values[0];
#pragma unroll
      for (int part = 1; part < 8; ++part) {
        if (part < parts) value += values[part];
      }
#pragma unroll 1
      for (int part = 1; part < (gated ? parts : 1); ++part) factor += from[part * part_floats + features];
      value = Round<T>(value + bias);
      if (gated) value = Round<T>(ActivationOf<T>(args.activation, value) * Round<T>(factor + factor_bias));
      if (args.residual != nullptr) value += residual;
      static_cast<T*>(args.out)[at] = static_cast<T>(value);
    }
    i += threads;
    find();
  }
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_FEATURES_EPILOGUE_CUH_
