// What the host and the GPU compute alike, to the bit: weights, random numbers, thresholds. A row's token is therefore
// the same on both. Sums are of integers, so that their order does not matter.
//
// NOTE: products and sums must not be contracted into fused multiply-adds, which one side has and the other may not:
// CMakeLists.txt says so to the host's compiler, and the functions below to the GPU's.
#ifndef XLA_GPU_OPS_SAMPLE_SAMPLE_MATH_H_
#define XLA_GPU_OPS_SAMPLE_SAMPLE_MATH_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define XLA_GPU_BOTH __host__ __device__ __forceinline__
#else
#define XLA_GPU_BOTH inline
#endif

namespace xla_gpu::sampling {

// ---- Arithmetic, rounded to nearest ----

XLA_GPU_BOTH float Mul(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

XLA_GPU_BOTH float Add(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

XLA_GPU_BOTH float Div(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

XLA_GPU_BOTH float Fma(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

XLA_GPU_BOTH uint32_t Bits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

XLA_GPU_BOTH float FromBits(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

// e^-x for x >= 0, within 2 ulp; 0 from x = 87 on.
XLA_GPU_BOTH float ExpNegative(float x) {
  // Adding 1.5 * 2^23 rounds to an integer, which is then the low bits of the sum.
  const float magic = 0x1.8p23f;
  const float shifted = Fma(x, -0x1.715476p0f, magic);
  const float n = Add(shifted, -magic);
  // ln 2 in two parts, the first of 15 bits
  const float r = Fma(n, -0x1.7f7d1cp-20f, Fma(n, -0x1.62e4p-1f, -x));
  // A fit of (e^r - 1 - r) / r^2 on |r| <= ln 2 / 2 that makes e^r's relative error 3e-9.
  float p = Fma(r, 0x1.6a241ap-10f, 0x1.1239f2p-7f);
  p = Fma(p, r, 0x1.5558f2p-5f);
  p = Fma(p, r, 0x1.555492p-3f);
  p = Fma(p, r, 0x1.fffffcp-2f);
  const float mantissa = Add(Fma(Mul(p, r), r, r), 1.0f);
  const float power = FromBits(Bits(mantissa) + ((Bits(shifted) - Bits(magic)) << 23));
  return x < 87.0f ? power : 0.0f;
}

// ln(1 + f) for f from sqrt(1/2) - 1 to sqrt(2) - 1, within 2 ulp.
XLA_GPU_BOTH float Log1p(float f) {
  // A fit of (ln(1 + f) - f) / f^2 that makes ln(1 + f)'s relative error 4e-9.
  float p = Fma(f, -0x1.382904p-4f, 0x1.084b1cp-3f);
  p = Fma(p, f, -0x1.0f39d2p-3f);
  p = Fma(p, f, 0x1.227128p-3f);
  p = Fma(p, f, -0x1.542716p-3f);
  p = Fma(p, f, 0x1.99a3fap-3f);
  p = Fma(p, f, -0x1.000428p-2f);
  p = Fma(p, f, 0x1.555550p-2f);
  p = Fma(p, f, -0x1.fffff8p-2f);
  return Fma(Mul(p, f), f, f);
}

// The natural logarithm of a positive normal number.
XLA_GPU_BOTH float Log(float x) {
  const uint32_t above = Bits(x) - 0x3f3504f3;  // sqrt(1/2): the mantissa lies in [sqrt(1/2), sqrt(2))
  const int32_t exponent = static_cast<int32_t>(above) >> 23;
  const float mantissa = FromBits((above & 0x007fffff) + 0x3f3504f3);
  return Fma(static_cast<float>(exponent), 0x1.62e43p-1f, Log1p(Add(mantissa, -1.0f)));
}

// ---- Random numbers ----

struct Philox {
  uint32_t words[4];
};

// Philox4x32-10 (Salmon et al., 2011, Parallel Random Numbers: As Easy as 1, 2, 3).
XLA_GPU_BOTH Philox RandomWords(uint64_t key, uint32_t block, uint32_t step) {
  uint32_t c0 = block, c1 = step, c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53} * c0, second = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(second);
    c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(first);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

// A number of the standard Gumbel distribution: -ln(-ln(1 - v)) with v uniform in (0, 1). The largest of logit + Gumbel
// falls on each index with its softmax probability.
XLA_GPU_BOTH float Gumbel(uint32_t word) {
  float v = Mul(Add(static_cast<float>(word), 0.5f), 0x1p-32f);
  v = v < 0x1.fffffep-1f ? v : 0x1.fffffep-1f;
  // Small v decide, so they keep their precision.
  const float exponential = v < 0.25f ? -Log1p(-v) : -Log(Add(1.0f, -v));
  return -Log(exponential);
}

// ---- Rows ----

struct RowOptions {
  float temperature, top_p, min_p;
  int32_t top_k;
  uint64_t seed;
  uint32_t step;

  // What distances are multiplied by.
  XLA_GPU_BOTH float sharpness() const {
    const float inverse = Div(1.0f, temperature);
    return inverse < 0x1.fffffep127f ? inverse : 0x1.fffffep127f;
  }

  XLA_GPU_BOTH bool valid() const {
    return temperature >= 0.0f && temperature <= 0x1.fffffep127f && top_p >= 0.0f && top_p <= 1.0f && min_p >= 0.0f &&
           min_p <= 1.0f;
  }
};

// Larger for larger logits, equal for both zeros, and for a lower index of equal ones. NaN: the largest of all.
XLA_GPU_BOTH uint64_t RankOf(float logit, uint32_t index) {
  if (logit != logit) return ~uint64_t{0};
  const uint32_t bits = Bits(Add(logit, 0.0f));
  const uint32_t ordered = bits & 0x80000000 ? ~bits : bits | 0x80000000;
  return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~index);
}

XLA_GPU_BOTH uint32_t IndexOf(uint64_t rank) { return ~static_cast<uint32_t>(rank); }

XLA_GPU_BOTH float LogitOf(uint64_t rank) {
  const uint32_t ordered = static_cast<uint32_t>(rank >> 32);
  return FromBits(ordered & 0x80000000 ? ordered & 0x7fffffff : ~ordered);
}

inline constexpr float kLargest = 0x1.fffffep127f;

XLA_GPU_BOTH float AtMostLargest(float x) { return x < kLargest ? x : kLargest; }

// What a logit's probability depends on: how far it lies below the largest. Its bits are ordered as the distances are.
// An infinite logit counts as the largest number.
XLA_GPU_BOTH float Distance(float largest, float logit) { return Add(AtMostLargest(largest), -AtMostLargest(logit)); }

inline constexpr uint32_t kFarthest = 0x7f7fffff;  // bits of the largest finite distance: logits of -inf are no choice

// The bits of the largest distance that min_p leaves: exp(-distance / temperature) >= min_p.
XLA_GPU_BOTH uint32_t MinPLimit(const RowOptions& row) {
  if (row.min_p < 0x1p-126f) return kFarthest;
  const uint32_t limit = Bits(Mul(row.temperature, -Log(row.min_p)));
  return limit >= 0x80000000 ? 0 : limit < kFarthest ? limit : kFarthest;  // -0 for min_p = 1
}

// A probability relative to the largest one, as an integer. What a search adds up: 30 bits, since shared memory adds
// halves of them.
XLA_GPU_BOTH uint32_t Mass30(float distance, float sharpness) {
  return static_cast<uint32_t>(Fma(ExpNegative(Mul(distance, sharpness)), 0x1p30f, 0.5f));
}

// The same with 40 bits, at temperature 1: what the log-probability adds up.
XLA_GPU_BOTH uint64_t Mass40(float distance) { return static_cast<uint64_t>(Mul(ExpNegative(distance), 0x1p40f)); }

// What the masses of the kept logits must reach: top_p of `total`, and at least the largest logit's.
XLA_GPU_BOTH uint64_t TopPTarget(float top_p, uint64_t total) {
  const auto target = static_cast<uint64_t>(static_cast<double>(top_p) * static_cast<double>(total));
  return target > 0 ? target : 1;
}

// What the chosen token has the largest of.
XLA_GPU_BOTH float Score(float distance, float sharpness, uint32_t word) {
  return Add(Gumbel(word), -Mul(distance, sharpness));
}

XLA_GPU_BOTH float LogProbability(float largest, float logit, uint64_t mass) {
  return -Add(Distance(largest, logit), Log(Mul(static_cast<float>(mass), 0x1p-40f)));
}

}  // namespace xla_gpu::sampling

#endif  // XLA_GPU_OPS_SAMPLE_SAMPLE_MATH_H_
