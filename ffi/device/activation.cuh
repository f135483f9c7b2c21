// Activations of gated feed-forward layers, in float32.
#ifndef XLA_GPU_DEVICE_ACTIVATION_CUH_
#define XLA_GPU_DEVICE_ACTIVATION_CUH_

namespace xla_gpu {

__device__ __forceinline__ float Silu(float x) { return x / (1.0f + expf(-x)); }

// The approximation by tanh, PyTorch's gelu(approximate="tanh"): (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)), which keeps
// its precision where tanh(u) is near -1.
__device__ __forceinline__ float GeluTanh(float x) {
  const float inner = 1.5957691216057308f * (x + 0.044715f * x * x * x);  // 2 sqrt(2 / pi)
  return x / (1.0f + expf(-inner));
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_ACTIVATION_CUH_
