// How threads share the heads that rotary_embedding and rotary_and_cache turn: units of two vectors, one to a lane.
#ifndef XLA_GPU_OPS_ROTARY_EMBEDDING_HEAD_UNITS_CUH_
#define XLA_GPU_OPS_ROTARY_EMBEDDING_HEAD_UNITS_CUH_

#include <cstdint>

#include "ffi/device/aligned_vector.h"
#include "ffi/device/rms_norm.cuh"
#include "ffi/ops/rotary_embedding/rotary_embedding.h"

namespace xla_gpu {

// Elements of a vector where a head's size allows vectors of 16 bytes.
template <typename T>
inline constexpr int kRotaryVector = static_cast<int>(16 / sizeof(T));

// A head of head_dim elements as vectors of `vec`, in units of two: the first `rotated` units hold elements that turn
// with each other, the others what is not turned. `1 << lane_bits` lanes take a head, a unit each where there are at
// most 32.
struct HeadUnits {
  int head_dim;
  int vec;
  int rotated, units;
  int lane_bits;
  bool interleaved;

  // Vectors of `vec` elements fit a head of this size, in at most 32 units.
  static bool Fits(const Rotation& rotation, int64_t head_dim, int vec) {
    return rotation.half % vec == 0 && head_dim % (2 * vec) == 0 && head_dim <= 64 * vec;
  }
  static HeadUnits Make(const Rotation& rotation, int64_t head_dim, int vec) {
    HeadUnits units = {static_cast<int>(head_dim),
                       vec,
                       static_cast<int>(rotation.half / vec),
                       static_cast<int>((head_dim + 2 * vec - 1) / (2 * vec)),
                       0,
                       rotation.interleaved};
    while (units.lane_bits < 5 && 1 << units.lane_bits < units.units) ++units.lane_bits;
    return units;
  }

#ifdef __CUDACC__
  // Of the unit's vectors, the first element in the head. Neighbouring lanes have neighbouring vectors.
  __device__ __forceinline__ int First(int unit) const {
    if (unit >= rotated) return (unit + rotated) * vec;
    return vec == 1 && interleaved ? 2 * unit : unit * vec;
  }
  __device__ __forceinline__ int Second(int unit) const {
    if (unit >= rotated) return (unit + units) * vec;
    return vec == 1 && interleaved ? 2 * unit + 1 : (unit + rotated) * vec;
  }
#endif
};

template <typename T, int kVec>
struct HeadUnit {
  using V = AlignedVector<T, kVec>;
  V first, second;

  __device__ __forceinline__ void Load(const T* head, const HeadUnits& h, int unit) {
    first = *reinterpret_cast<const V*>(head + h.First(unit));
    second = HasSecond(h, unit) ? *reinterpret_cast<const V*>(head + h.Second(unit)) : V{};
  }
  __device__ __forceinline__ void Store(T* head, const HeadUnits& h, int unit) const {
    *reinterpret_cast<V*>(head + h.First(unit)) = first;
    if (HasSecond(h, unit)) *reinterpret_cast<V*>(head + h.Second(unit)) = second;
  }
  // False where an odd head_dim leaves a single element.
  static __device__ __forceinline__ bool HasSecond(const HeadUnits& h, int unit) {
    return kVec > 1 || h.Second(unit) < h.head_dim;
  }
  __device__ __forceinline__ void AddSquares(float* squares) const {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float a = static_cast<float>(first.values[j]), b = static_cast<float>(second.values[j]);
      *squares += a * a + b * b;
    }
  }
  // Adds a bias, and rounds.
  __device__ __forceinline__ void Add(const HeadUnit& other) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      first.values[j] = static_cast<T>(static_cast<float>(first.values[j]) + static_cast<float>(other.first.values[j]));
      second.values[j] =
          static_cast<T>(static_cast<float>(second.values[j]) + static_cast<float>(other.second.values[j]));
    }
  }
  __device__ __forceinline__ void Norm(float scale, const HeadUnit& weight, const RmsNormWeight& how) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      first.values[j] = RmsNormElement(first.values[j], scale, weight.first.values[j], how);
      second.values[j] = RmsNormElement(second.values[j], scale, weight.second.values[j], how);
    }
  }
};

// Brings a position's cosines and sines to L2.
__device__ __forceinline__ void PrefetchTurns(const Rotation& rotation, int64_t position) {
  if (position < 0 || position >= rotation.max_positions) return;
  const float* const row = rotation.table + 2 * position * rotation.half;
  constexpr int kLine = 128 / sizeof(float);
  for (int64_t at = threadIdx.x * kLine; at < 2 * rotation.half; at += blockDim.x * kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row + at));
  }
}

// Cosine and sine of each pair of a rotated unit.
template <int kVec>
struct UnitTurns {
  float2 turns[kVec];

  // Those of `position`; NaN past the table. Nothing for a unit that is not rotated but for that.
  __device__ __forceinline__ void Load(const Rotation& rotation, int64_t position, const HeadUnits& h, int unit) {
    const bool in_table = position >= 0 && position < rotation.max_positions;
    const float nan = __int_as_float(0x7fc00000);
#pragma unroll
    for (int j = 0; j < kVec; ++j) turns[j] = make_float2(nan, nan);
    if (!in_table) return;
    if (unit >= h.rotated) {
      turns[0] = make_float2(1.0f, 0.0f);
      return;
    }
    const float2* const row = reinterpret_cast<const float2*>(rotation.table) + position * rotation.half;
    if constexpr (kVec == 1) {
      turns[0] = row[unit];
    } else {
      // Two runs of kVec / 2 pairs: a vector of interleaved pairs holds that many.
      constexpr int kRun = kVec / 2;
      const int begin[2] = {h.interleaved ? unit * kRun : unit * kVec,
                            h.interleaved ? (unit + h.rotated) * kRun : unit * kVec + kRun};
#pragma unroll
      for (int run = 0; run < 2; ++run) {
#pragma unroll
        for (int j = 0; j < kRun; j += 2) {
          const float4 two = *reinterpret_cast<const float4*>(row + begin[run] + j);
          turns[run * kRun + j] = make_float2(two.x, two.y);
          turns[run * kRun + j + 1] = make_float2(two.z, two.w);
        }
      }
    }
  }
};

// Not fused: in float32 these are the bits of models that round between product and sum.
template <typename T>
__device__ __forceinline__ void TurnPair(float2 turn, T* a, T* b) {
  const float x = static_cast<float>(*a), y = static_cast<float>(*b);
  *a = static_cast<T>(__fsub_rn(__fmul_rn(x, turn.x), __fmul_rn(y, turn.y)));
  *b = static_cast<T>(__fadd_rn(__fmul_rn(y, turn.x), __fmul_rn(x, turn.y)));
}

// Turns a unit; one that is not rotated stays as it is, or becomes NaN past the table.
template <typename T, int kVec>
__device__ __forceinline__ void TurnUnit(const UnitTurns<kVec>& angle, const HeadUnits& h, int unit,
                                         HeadUnit<T, kVec>* values) {
  if (unit >= h.rotated) {
    if (!isnan(angle.turns[0].x)) return;
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      values->first.values[j] = values->second.values[j] = static_cast<T>(angle.turns[0].x);
    return;
  }
  if constexpr (kVec > 1) {
    if (h.interleaved) {
#pragma unroll
      for (int j = 0; j < kVec / 2; ++j) {
        TurnPair(angle.turns[j], &values->first.values[2 * j], &values->first.values[2 * j + 1]);
        TurnPair(angle.turns[kVec / 2 + j], &values->second.values[2 * j], &values->second.values[2 * j + 1]);
      }
      return;
    }
  }
#pragma unroll
  for (int j = 0; j < kVec; ++j) TurnPair(angle.turns[j], &values->first.values[j], &values->second.values[j]);
}

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_ROTARY_EMBEDDING_HEAD_UNITS_CUH_
