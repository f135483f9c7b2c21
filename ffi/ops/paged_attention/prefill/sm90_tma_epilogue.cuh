// The epilogue of the TMA prefill kernel (sm90_tma.cuh): what a consumer warpgroup does with the result of a work
// tile's rows, or of one KV split of them.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_EPILOGUE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_EPILOGUE_CUH_

#include <cstddef>
#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/ops/paged_attention/prefill/combine.cuh"
#include "ffi/ops/paged_attention/prefill/pipeline.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_traits.cuh"
#include "ffi/ops/paged_attention/prefill/store_rows.cuh"

namespace xla_gpu::prefill {

template <typename Traits>
struct TmaEpilogue {
  using T = typename Traits::Element;
  using TileState = typename Traits::TileState;
  static constexpr int kDimTiles = Traits::kHeadDim / 8;

  const TmaCta<Traits>& cta;

  // Whether a work tile's accumulator is one of this CTA's, which the next split of its rows reads or writes.
  static __device__ bool StoresForThisCta(SplitMode mode) {
    const bool one_of_several = Traits::kTakesSomeSplits && (mode & kAccumulate) != 0;
    return mode != 0 && ((mode & kCrossCta) == 0 || one_of_several);
  }

  // `part`: of the work tile's rows. `latest`: the transform of the latest work tile, which may be another one.
  // `accumulated`: parity of the work tiles before of which StoresForThisCta. With Traits::kAlternates the other
  // warpgroup may have computed the split before: the CTA's accumulators are read and written in the order of the
  // work tiles.
  template <typename Softmax>
  __device__ void Store(TileState work, int part, Softmax softmax, const LogitTransform& latest, uint32_t* accumulated,
                        float (&o)[1][kDimTiles][4]) const {
    cta.checked.WaitFull(work);
    const LogitTransform transform =
        Traits::kFloat8Cache ? LogitTransform(cta.attention, cta.Tile(work).rows.kv_head) : latest;
    const typename Traits::TileStage& tile = cta.Tile(work);
    const bool invalid_page = tile.invalid_page;
    const SplitMode mode = tile.mode;
    const bool crosses = (mode & kCrossCta) != 0;
    if (mode != 0 && cta.params.behind_decode) WaitForPreviousKernel();  // that one reads the scratch
    if (crosses && !StoresForThisCta(mode)) {
      softmax.Spill(tile.rows, cta.params.accumulators, tile.accum_row, invalid_page, o);
    } else {
      if (mode != 0) {
        const uint32_t barrier = cta.Address(offsetof(typename Traits::SharedStorage, accumulated));
        // NOTE: not by the rows of part 1, which nobody else reads or writes: part 0 may have stored this work tile's
        // too, so that a wait by parity would be for the next ones.
        if (Traits::kAlternates && part == 0) WaitBarrier(barrier, *accumulated ^ 1);
        const bool small = Traits::kRowWarpgroups == 1 || tile.rows.count <= 64;
        if constexpr (Traits::kSharedAccumulators) {
          auto& shared = cta.Storage().accumulators;
          if (small) {
            softmax.template AccumulateAndSpill<true>(transform, {shared.o_accum, shared.max_sum_accum, 0}, 0,
                                                      crosses ? kAccumulate : mode, invalid_page, o);
          }
        }
        if (!Traits::kSharedAccumulators || !small) {
          softmax.template AccumulateAndSpill<false>(transform, cta.params.accumulators, tile.accum_row, mode,
                                                     invalid_page, o);
        }
        if (Traits::kAlternates && part == 0) cta.Arrive(barrier);
        *accumulated ^= 1;
      }
      if (Traits::kTakesSomeSplits && crosses) {
        softmax.Spill(tile.rows, cta.params.accumulators, tile.accum_row, invalid_page, o);
      } else if ((mode & kSpill) == 0) {
        if constexpr (Traits::kOverlap == Overlap::kIntraWarpgroup) {
          StoreSectors<T>(softmax, cta.attention, tile.rows, transform, o, invalid_page);
        } else {  // where sectors would cost local loads in the loop over key tiles
          StoreVectors<T>(softmax, cta.attention, tile.rows, transform, o, invalid_page);
        }
      }
    }
    cta.Arrive(cta.tiles.Empty(work));
  }
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_EPILOGUE_CUH_
