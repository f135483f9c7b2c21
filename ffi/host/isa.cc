#include "ffi/host/isa.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace xla_gpu {
namespace {

Isa BestIsa() {
#if defined(__x86_64__)
  // __builtin_cpu_supports also asks whether the system saves the wide registers; F16C is unknown to older compilers.
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  __builtin_cpu_init();
  if (!f16c || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::kBaseline;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Isa::kAvx512;
  }
  return Isa::kAvx2;
#else
  return Isa::kBaseline;
#endif
}

Isa WantedIsa() {
  const char* text = std::getenv("XLA_GPU_HOST_ISA");
  if (text == nullptr) return Isa::kAvx512;
  if (std::strcmp(text, "baseline") == 0) return Isa::kBaseline;
  if (std::strcmp(text, "avx2") == 0) return Isa::kAvx2;
  if (std::strcmp(text, "avx512") != 0) {
    std::fprintf(stderr, "xla_gpu: XLA_GPU_HOST_ISA: expected baseline, avx2 or avx512, got \"%s\": not used\n", text);
  }
  return Isa::kAvx512;
}

}  // namespace

Isa SelectedIsa() {
  static const Isa isa = std::min(BestIsa(), WantedIsa());
  return isa;
}

const char* HostIsa() {
  switch (SelectedIsa()) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kBaseline:
      break;
  }
  return "baseline";
}

}  // namespace xla_gpu
