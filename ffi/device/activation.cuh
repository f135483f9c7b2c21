// Activations of gated feed-forward layers, in float32.
#ifndef XLA_GPU_DEVICE_ACTIVATION_CUH_
#define XLA_GPU_DEVICE_ACTIVATION_CUH_

namespace xla_gpu {

// x / (1 + exp(-y)). For results of 16 bits with the hardware's exponential and reciprocal: their relative error, 1e-5
// at most, is 1/50 of a unit in the last place, and what is below 1e-36 may become 0. With the exact division and
// exponential a kernel that moves memory waits for its instructions.
template <typename T>
__device__ __forceinline__ float TimesSigmoid(float x, float y) {
  if constexpr (sizeof(T) == 4) return x / (1.0f + expf(-y));
  float power, reciprocal;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.4426950408889634f * y));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.0f + power));
  return x * reciprocal;
}

// silu, or the approximation of gelu by tanh, PyTorch's gelu(approximate="tanh"): (1 + tanh(u)) / 2 is
// 1 / (1 + exp(-2 u)), which keeps its precision where tanh(u) is near -1. A choice of exponents has no branch.
template <typename T>
__device__ __forceinline__ float SiluOrGeluTanh(float x, bool silu) {
  const float twice_u = 1.5957691216057308f * (x + 0.044715f * x * x * x);  // 2 sqrt(2 / pi)
  return TimesSigmoid<T>(x, silu ? x : twice_u);
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_ACTIVATION_CUH_
