// Maxima of a lane's scores, as OnlineSoftmax has them, by instructions of three operands, which sm_90 has for
// integers.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_MAX_OF_THREE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_MAX_OF_THREE_CUH_

namespace xla_gpu::prefill {

// A lane's largest scores of both rows, twice each. As integers, floats are ordered as they are unless both are
// negative, and then the other way round: only where all scores of a row are negative, their least bits count.
template <int kKeyTiles>
__device__ __forceinline__ void MaxOfThree(const float (&s)[kKeyTiles][4], float (&tile_max)[2][2]) {
  const auto bits = [&](int n, int i) { return __float_as_int(s[n][i]); };
  int most[2][2];  // of even and odd n
#pragma unroll
  for (int i = 0; i < 4; ++i) most[i / 2][i % 2] = max(bits(i % 2, i / 2 * 2), bits(i % 2, i / 2 * 2 + 1));
#pragma unroll
  for (int n = 2; n < kKeyTiles; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) most[h][n % 2] = __vimax3_s32(most[h][n % 2], bits(n, 2 * h), bits(n, 2 * h + 1));
  }
  int largest[2] = {max(most[0][0], most[0][1]), max(most[1][0], most[1][1])};
  if (__any_sync(~0u, (largest[0] | largest[1]) < 0)) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      unsigned least = ~0u;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        least = __vimin3_u32(least, static_cast<unsigned>(bits(n, 2 * h)), static_cast<unsigned>(bits(n, 2 * h + 1)));
      }
      if (largest[h] < 0) largest[h] = static_cast<int>(least);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) tile_max[h][0] = tile_max[h][1] = __int_as_float(largest[h]);
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_MAX_OF_THREE_CUH_
