// Which version of a vectorised host kernel runs. Kernels are compiled once for the architecture's baseline and, on
// x86-64, again for AVX2 and AVX-512; the processor decides at run time.
#ifndef XLA_GPU_HOST_ISA_H_
#define XLA_GPU_HOST_ISA_H_

namespace xla_gpu {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// The best version that this processor runs, or a lower one that XLA_GPU_HOST_ISA (baseline, avx2, avx512) names.
// Read once.
Isa SelectedIsa();

// "baseline", "avx2" or "avx512".
const char* HostIsa();

}  // namespace xla_gpu

#endif  // XLA_GPU_HOST_ISA_H_
