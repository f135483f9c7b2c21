// The online softmax for calls with a soft cap at head_dim 256, as of Gemma 2's models.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_LATE_SOFT_CAP_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_LATE_SOFT_CAP_CUH_

#include "ffi/device/mma.cuh"
#include "ffi/ops/paged_attention/prefill/max_of_three.cuh"
#include "ffi/ops/paged_attention/prefill/online_softmax.cuh"

namespace xla_gpu::prefill {

// Of key tiles that all rows see, the largest score is found before tanh, which is needed for the exponentials alone:
// the special functions then have work while the largest score passes from lane to lane. NOTE: TanhApprox is not
// monotone in its last bits, so that a maximum, and with it bits, may differ from those of the other order. Whether a
// key tile is masked must follow from the sequence alone, as it does where all work tiles have one size.
template <bool kTreeMask>
struct LateSoftCap : OnlineSoftmax</*kRowTiles=*/1, /*kRescaleThreshold=*/8, kTreeMask, /*kMaxOfThree=*/true> {
  using Base = OnlineSoftmax</*kRowTiles=*/1, /*kRescaleThreshold=*/8, kTreeMask, /*kMaxOfThree=*/true>;
  using Base::Base;
  using Base::state;

  // As OnlineSoftmax::Update.
  template <int kKeyTiles, typename Rows>
  __device__ void Update(const Rows& rows, const LogitTransform& transform, int first_position, bool mask,
                         float (&s)[1][kKeyTiles][4]) {
    // A scale that is not positive would reverse the order of scores.
    if (mask || !(transform.soft_cap > 0.0f) || !(transform.scale > 0.0f)) {
      Base::Update(rows, transform, first_position, mask, s);
      return;
    }
    const float inner = transform.scale / transform.soft_cap;
    float tile_max[2][2];
    MaxOfThree(s[0], tile_max);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      tile_max[h][0] = tile_max[h][1] = TanhApprox(tile_max[h][0] * inner);
    }
    Base::FollowMax(transform, tile_max, 0);
    const float shift[2] = {Base::Shift(transform, state[0][0].max), Base::Shift(transform, state[0][1].max)};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        float(&pair)[4] = s[0][n];
        pair[2 * h] = Exp2(fmaf(TanhApprox(pair[2 * h] * inner), transform.to_log2, -shift[h]));
        pair[2 * h + 1] = Exp2(fmaf(TanhApprox(pair[2 * h + 1] * inner), transform.to_log2, -shift[h]));
        state[0][h].sum += pair[2 * h] + pair[2 * h + 1];
      }
    }
  }
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_LATE_SOFT_CAP_CUH_
