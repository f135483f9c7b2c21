// The floating-point mode in which host kernels compute.
#ifndef XLA_GPU_HOST_FLOAT_MODE_H_
#define XLA_GPU_HOST_FLOAT_MODE_H_

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <cstdint>
#endif

namespace xla_gpu {

// While one lives, this thread rounds to nearest, keeps subnormals and traps nothing. XLA's threads flush subnormals to
// zero and PyTorch's do not: without this, the front ends would give different bits.
class ScopedFloatMode {
 public:
#if defined(__x86_64__)
  ScopedFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~ScopedFloatMode() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  ScopedFloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}) : "memory");
  }
  ~ScopedFloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_) : "memory"); }
#else
  ScopedFloatMode() = default;
  ~ScopedFloatMode() {}
#endif
  ScopedFloatMode(const ScopedFloatMode&) = delete;
  ScopedFloatMode& operator=(const ScopedFloatMode&) = delete;

 private:
#if defined(__x86_64__)
  unsigned int saved_;
#elif defined(__aarch64__)
  uint64_t saved_;
#endif
};

}  // namespace xla_gpu

#endif  // XLA_GPU_HOST_FLOAT_MODE_H_
