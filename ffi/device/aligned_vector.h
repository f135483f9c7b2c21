// Neighbouring elements that are loaded or stored together.
#ifndef XLA_GPU_DEVICE_ALIGNED_VECTOR_H_
#define XLA_GPU_DEVICE_ALIGNED_VECTOR_H_

namespace xla_gpu {

// kAlignment: of its address in bytes, a power of two. With 4, 8 or 16 the compiler makes accesses of that size.
template <typename T, int kSize_, int kAlignment = kSize_ * static_cast<int>(sizeof(T))>
struct alignas(kAlignment) AlignedVector {
  static constexpr int kSize = kSize_;
  T values[kSize];
};

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_ALIGNED_VECTOR_H_
