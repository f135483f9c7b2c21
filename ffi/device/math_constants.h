// Constants of the softmax in base 2. No CUDA headers: launchers that the host compiler reads include this too.
#ifndef XLA_GPU_DEVICE_MATH_CONSTANTS_H_
#define XLA_GPU_DEVICE_MATH_CONSTANTS_H_

namespace xla_gpu {

inline constexpr float kLog2E = 1.4426950408889634f;  // log2(e)
inline constexpr float kLn2 = 0.6931471805599453f;    // ln(2)

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_MATH_CONSTANTS_H_
