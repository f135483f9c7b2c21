// From the sums of a CTA's warps to results, for few rows and plain weights.
#ifndef XLA_GPU_OPS_LINEAR_SM90_FEW_EPILOGUE_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_FEW_EPILOGUE_CUH_

#include <cstdint>

#include "ffi/device/aligned_vector.h"
#include "ffi/device/mbarrier.cuh"
#include "ffi/ops/linear/epilogue.cuh"
#include "ffi/ops/linear/sm90_features_epilogue.cuh"
#include "ffi/ops/linear/sm90_few_traits.cuh"

namespace xla_gpu::linear {

// From the sums of all parts of k, [parts][rows][FewSumPitch], by the `threads` threads that have written them.
template <typename T>
__device__ __forceinline__ void FinishFew(const Sm90FewArgs& few, int tile, const float* sums, int part_floats,
                                          int pitch, int threads) {
  FinishFeatures<T>(few.linear, tile * few.box_rows, few.box_rows, few.inverse_of_width, few.parts, sums, part_floats,
                    pitch, threads);
}

// The same where a warp has all of k: from its own sums, without a barrier.
template <typename T>
__device__ __forceinline__ void FinishOwn(const Sm90FewArgs& few, int tile, int unit, int warp_of_unit,
                                          const float (&sum)[4]) {
  const LinearArgs& args = few.linear;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool gated = args.activation != Activation::kNone;
  const int half = few.unit_rows / 2, out_features = gated ? args.n / 2 : args.n;
  const int feature = (tile * few.units + unit) * few.box_rows + warp_of_unit * 8 + lane / 4;
  const int second = feature + (gated ? out_features : half);
  if (feature >= out_features) return;
  const bool has_second = gated || second < out_features;
  const auto load = [](const void* array, int64_t i, bool is) {
    return array == nullptr || !is ? 0.0f : static_cast<float>(static_cast<const T*>(array)[i]);
  };
  const float bias = load(args.bias, feature, true), second_bias = load(args.bias, second, has_second);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = lane % 4 * 2 + i;
    if (row >= args.rows) break;
    const int64_t at = static_cast<int64_t>(row) * out_features;
    float value = Round<T>(sum[i] + bias), other = Round<T>(sum[i + 2] + second_bias);
    if (gated) value = Round<T>(ActivationOf<T>(args.activation, value) * other);
    if (args.residual != nullptr) {
      value += load(args.residual, at + feature, true);
      other += load(args.residual, at + second, !gated && has_second);
    }
    static_cast<T*>(args.out)[at + feature] = static_cast<T>(value);
    if (!gated && has_second) static_cast<T*>(args.out)[at + second] = static_cast<T>(other);
  }
}

// As FinishFew for more rows, without an activation: four features of a row by each thread.
template <typename T>
__device__ __forceinline__ void FinishFours(const Sm90FewArgs& few, int tile, const float* sums, int part_floats,
                                            int pitch, int threads) {
  using Four = AlignedVector<T, 4>;
  const LinearArgs& args = few.linear;
  const int fours = few.unit_rows / 4, items = args.rows * fours;
  int item = static_cast<int>(threadIdx.x), row = 0, column = 0;
  int64_t at = 0;
  bool has_result = false;
  float bias[4] = {};
  Four residual = {};
  const auto find = [&] {
    row = item * few.inverse_of_width >> kInverseShift, column = (item - row * fours) * 4;
    const int feature = tile * few.unit_rows + column;
    has_result = item < items && feature < args.n;
    if (!has_result) return;
    at = static_cast<int64_t>(row) * args.n + feature;
    if (args.bias != nullptr) {
      const Four four = *reinterpret_cast<const Four*>(static_cast<const T*>(args.bias) + feature);
#pragma unroll
      for (int i = 0; i < 4; ++i) bias[i] = static_cast<float>(four.values[i]);
    }
    if (args.residual != nullptr) residual = *reinterpret_cast<const Four*>(static_cast<const T*>(args.residual) + at);
  };
  find();
  NamedBarrierSync(1, threads);
#pragma unroll 1
  while (item < items) {
    if (has_result) {
      const float* const from = sums + row * pitch + column;
      float4 parts[8] = {};
#pragma unroll
      for (int part = 0; part < 8; ++part) {
        if (part < few.parts) parts[part] = *reinterpret_cast<const float4*>(from + part * part_floats);
      }
      float values[4] = {parts[0].x, parts[0].y, parts[0].z, parts[0].w};
#pragma unroll
      for (int part = 1; part < 8; ++part) {
        if (part >= few.parts) continue;
        values[0] += parts[part].x, values[1] += parts[part].y, values[2] += parts[part].z, values[3] += parts[part].w;
      }
      Four out;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = Round<T>(values[i] + bias[i]);
        if (args.residual != nullptr) values[i] += static_cast<float>(residual.values[i]);
        out.values[i] = static_cast<T>(values[i]);
      }
      *reinterpret_cast<Four*>(static_cast<T*>(args.out) + at) = out;
    }
    item += threads;
    find();
  }
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_FEW_EPILOGUE_CUH_
