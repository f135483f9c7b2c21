// Which units of the linearised space of (work tile, chunk of k) a CTA computes, and who shares a work tile with it.
#ifndef XLA_GPU_OPS_LINEAR_WORK_RANGE_CUH_
#define XLA_GPU_OPS_LINEAR_WORK_RANGE_CUH_

#include "ffi/ops/linear/args.h"

namespace xla_gpu::linear {

inline constexpr int kTileN = static_cast<int>(kLinearTileN);

// The weight row that row `row` of a work tile's 128 stands for, or -1. With an activation 32 rows are 16 rows of gates
// and the 16 rows that they multiply.
__device__ inline int WeightRow(const LinearArgs& args, int tile, int row) {
  if (args.activation == Activation::kNone) {
    const int at = tile * kTileN + row;
    return at < args.n ? at : -1;
  }
  const int half = args.n / 2;
  const int feature = tile * (kTileN / 2) + row / 32 * 16 + row % 16;
  return feature >= half ? -1 : row % 32 < 16 ? feature : half + feature;
}

// First unit of a CTA.
__device__ inline int RangeBegin(const LinearArgs& args, int cta) {
  return cta * args.units_of_cta + min(cta, args.longer_ctas);
}

// The CTA whose range holds `unit`.
__device__ inline int OwnerOf(const LinearArgs& args, int unit) {
  const int longer = args.longer_ctas * (args.units_of_cta + 1);
  return unit < longer ? unit / (args.units_of_cta + 1) : args.longer_ctas + (unit - longer) / args.units_of_cta;
}

// The CTAs that share a work tile.
struct Sharers {
  int first;
  int last;
};

__device__ inline Sharers SharersOf(const LinearArgs& args, int tile) {
  return {OwnerOf(args, tile * args.chunks), OwnerOf(args, (tile + 1) * args.chunks - 1)};
}

// The partial sums of what `cta` has of `tile`: it has a part of at most two work tiles, its first and its last.
template <int kRowTile>
__device__ inline float* PartialOf(const LinearArgs& args, int cta, int tile) {
  const int is_last = RangeBegin(args, cta) < tile * args.chunks;
  return args.partials + static_cast<int64_t>(2 * cta + is_last) * (kRowTile * kTileN);
}

// Counts this CTA in, among the `expected` that share the work tile, and returns whether it is the last one. Nobody has
// cleared the counter: a value that does not hold this call's token is taken for 0. The last one clears it, so that the
// token, which a captured graph repeats, is never found where nobody has counted.
__device__ inline bool CountIn(unsigned long long* counter, unsigned long long token, int expected) {
  unsigned long long seen = 0;
  while (true) {
    const bool ours = (seen & ~0xffull) == token;
    const unsigned long long next = ours ? seen + 1 : token + 1;
    const unsigned long long found = atomicCAS(counter, seen, next);
    if (found == seen) {
      const bool last = static_cast<int>(next & 0xff) == expected;
      if (last) atomicExch(counter, 0ull);
      return last;
    }
    seen = found;
  }
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_WORK_RANGE_CUH_
