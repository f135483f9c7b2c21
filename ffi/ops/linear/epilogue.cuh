// From sums to results: scale, bias, activation and residual, each rounded where a model in plain PyTorch rounds.
#ifndef XLA_GPU_OPS_LINEAR_EPILOGUE_CUH_
#define XLA_GPU_OPS_LINEAR_EPILOGUE_CUH_

#include <cstdint>

#include "ffi/device/activation.cuh"
#include "ffi/device/aligned_vector.h"
#include "ffi/ops/linear/args.h"
#include "ffi/ops/linear/work_range.cuh"

namespace xla_gpu::linear {

template <typename T>
__device__ inline float Round(float value) {
  return static_cast<float>(static_cast<T>(value));
}

// The feature of weight row `row`, from the sum of its products: scaled, with bias, rounded to T.
template <typename T>
__device__ inline float Feature(const LinearArgs& args, float sum, int row) {
  if (args.scale == WeightScale::kTensor) sum *= static_cast<const float*>(args.weight_scale)[0];
  if (args.scale == WeightScale::kChannel) sum *= static_cast<const float*>(args.weight_scale)[row];
  if (args.bias != nullptr) sum += static_cast<float>(static_cast<const T*>(args.bias)[row]);
  return Round<T>(sum);
}

template <typename T>
__device__ inline float ActivationOf(Activation activation, float gate) {
  return Round<T>(SiluOrGeluTanh<T>(gate, activation == Activation::kSiluAndMul));
}

template <typename T>
__device__ inline void StoreResult(const LinearArgs& args, float value, int64_t row, int feature, int out_features) {
  const int64_t at = row * out_features + feature;
  if (args.residual != nullptr) value = Round<T>(value) + static_cast<float>(static_cast<const T*>(args.residual)[at]);
  static_cast<T*>(args.out)[at] = static_cast<T>(value);
}

// ---- Of a work tile, by all threads of a CTA. Not inlined: they are compiled once for many kernels ----

// Of the sums in shared memory: with 4 modulo 16 floats between rows a warp writes its accumulators without conflicts.
inline constexpr int kSumPitch = kTileN + 4;

// What follows the sum for four neighbouring weight rows: scale, if weights have any, and bias, loaded once for all
// rows of x.
template <typename T, bool kHasScale = true>
struct FourFeatures {
  float scale[4];
  float bias[4];

  __device__ FourFeatures(const LinearArgs& args, int row) {
    const auto* scales = static_cast<const float*>(args.weight_scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scale[i] = kHasScale && args.scale == WeightScale::kChannel  ? scales[row + i]
                 : kHasScale && args.scale == WeightScale::kTensor ? scales[0]
                                                                   : 1.0f;
      bias[i] = args.bias == nullptr ? 0.0f : static_cast<float>(static_cast<const T*>(args.bias)[row + i]);
    }
  }

  __device__ void Finish(float (&values)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = Round<T>(values[i] * scale[i] + bias[i]);
  }

  __device__ void Apply(const float* sums, float (&to)[4]) const {
    const float4 four = *reinterpret_cast<const float4*>(sums);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    Finish(to);
  }
};

// Writes the results of four neighbouring features: `values`, or with an activation, of which they are the argument,
// its product with `factors`; and the residual, if there is one.
template <typename T>
__device__ __forceinline__ void StoreFour(const LinearArgs& args, int64_t at, const float (&values)[4],
                                          const float (&factors)[4], bool gated, const AlignedVector<T, 4>& residual) {
  AlignedVector<T, 4> out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float value = values[i];
    if (gated) value = Round<T>(ActivationOf<T>(args.activation, value) * factors[i]);
    if (args.residual != nullptr) value += static_cast<float>(residual.values[i]);
    out.values[i] = static_cast<T>(value);
  }
  *reinterpret_cast<AlignedVector<T, 4>*>(static_cast<T*>(args.out) + at) = out;
}

// Writes the results of a work tile whose sums are complete: [rows][kSumPitch] in shared memory.
template <typename T, int kThreads>
__device__ __noinline__ void FinishTile(const LinearArgs& args, const float* sums, int tile) {
  const bool gated = args.activation != Activation::kNone;
  const int features = gated ? kTileN / 2 : kTileN, out_features = gated ? args.n / 2 : args.n;
  const int threads_of_row = features / 4;
  const int feature = static_cast<int>(threadIdx.x) % threads_of_row * 4;
  const int weight_row = tile * features + feature;
  if (weight_row >= out_features) return;
  const int column = gated ? feature / 16 * 32 + feature % 16 : feature;
  const FourFeatures<T> first(args, weight_row), second(args, gated ? out_features + weight_row : weight_row);
#pragma unroll 4
  for (int row = static_cast<int>(threadIdx.x) / threads_of_row; row < args.rows; row += kThreads / threads_of_row) {
    using Four = AlignedVector<T, 4>;
    const int64_t at = static_cast<int64_t>(row) * out_features + weight_row;
    Four residual = {};
    if (args.residual != nullptr) residual = *reinterpret_cast<const Four*>(static_cast<const T*>(args.residual) + at);
    float values[4];
    first.Apply(sums + row * kSumPitch + column, values);
    if (gated) {
      float factors[4];
      second.Apply(sums + row * kSumPitch + column + 16, factors);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = Round<T>(ActivationOf<T>(args.activation, values[i]) * factors[i]);
    }
    Four out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (args.residual != nullptr) values[i] += static_cast<float>(residual.values[i]);
      out.values[i] = static_cast<T>(values[i]);
    }
    *reinterpret_cast<Four*>(static_cast<T*>(args.out) + at) = out;
  }
}

// Stores this CTA's sums of a work tile that it shares.
template <int kRowTile, int kThreads>
__device__ __noinline__ void StorePartial(const LinearArgs& args, const float* sums, int tile) {
  auto* partial = reinterpret_cast<float4*>(PartialOf<kRowTile>(args, static_cast<int>(blockIdx.x), tile));
  constexpr int kFours = kTileN / 4;
  for (int i = static_cast<int>(threadIdx.x); i < args.rows * kFours; i += kThreads) {
    __stcg(partial + i, *reinterpret_cast<const float4*>(sums + i / kFours * kSumPitch + i % kFours * 4));
  }
}

// Adds all CTAs' sums of a work tile, in the order of k, into shared memory.
template <int kRowTile, int kThreads>
__device__ __noinline__ void CombinePartials(const LinearArgs& args, float* sums, int tile, Sharers sharers) {
  constexpr int kFours = kTileN / 4;
  constexpr int kAtOnce = 4;  // CTAs whose sums are loaded before the first is added
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < args.rows * kFours; i += kThreads) {
    float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int cta = sharers.first; cta <= sharers.last; cta += kAtOnce) {
      float4 parts[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (cta + j > sharers.last) continue;
        parts[j] = __ldcg(reinterpret_cast<const float4*>(PartialOf<kRowTile>(args, cta + j, tile)) + i);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (cta + j > sharers.last) continue;
        total.x += parts[j].x;
        total.y += parts[j].y;
        total.z += parts[j].z;
        total.w += parts[j].w;
      }
    }
    *reinterpret_cast<float4*>(sums + i / kFours * kSumPitch + i % kFours * 4) = total;
  }
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_EPILOGUE_CUH_
