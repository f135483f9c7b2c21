// Neighbouring elements that one load or store moves.
#ifndef XLA_GPU_DEVICE_ALIGNED_VECTOR_H_
#define XLA_GPU_DEVICE_ALIGNED_VECTOR_H_

namespace xla_gpu {

// Aligned to its size, a power of two: the compiler makes one access of it, of up to 16 bytes.
template <typename T, int kSize>
struct alignas(sizeof(T) * kSize) AlignedVector {
  T values[kSize];
};

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_ALIGNED_VECTOR_H_
