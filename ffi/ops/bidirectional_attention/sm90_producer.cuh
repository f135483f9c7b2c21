// The warp of the sm_90a kernel (sm90.cuh) that finds a CTA's work tiles, and loads Q, K and V by TMA.
#ifndef XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_PRODUCER_CUH_
#define XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_PRODUCER_CUH_

#include <cstdint>

#include "ffi/device/mbarrier.cuh"
#include "ffi/device/tensor_map.cuh"
#include "ffi/ops/bidirectional_attention/sm90_schedule.cuh"
#include "ffi/ops/bidirectional_attention/sm90_traits.cuh"

namespace xla_gpu::bidirectional {

// Starts the load of a box of 64 columns from `column` of `head` on, and of rows from `token` on. Columns and rows past
// the tensor's end become zeros; `token` lies in it. By one thread.
__device__ inline void TmaLoadHeadRows(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int column, int head,
                                       int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(column), "r"(head), "r"(token)
      : "memory");
}

template <typename Traits>
struct Sm90Producer {
  const Sm90Cta<Traits>& cta;

  __device__ void Run(const Sm90Schedule<Traits>& schedule) const {
    typename Traits::TileState work;
    typename Traits::QueryState query;
    typename Traits::KeyState key;
    typename Traits::ValueState value;
#pragma unroll 1
    for (unsigned index = blockIdx.x;; index += gridDim.x) {
      const bool more = index < schedule.total;
      WorkTile tile{};
      if (more) tile = schedule.Find(index);
      cta.tiles.WaitEmpty(work);
      if (cta.lane == 0) cta.Tile(work) = tile;
      cta.Arrive(cta.tiles.Full(work));
      work.Advance();
      if (!more) return;

      LoadQuery(tile, query);
      query.Advance();
      // Where K has more stages than V, it runs ahead: K of a tile, then V of the one before.
      constexpr bool kValuesLater = Traits::kKeyStages > Traits::kValueStages;
      const int head = static_cast<int>(cta.params.group.Divide(static_cast<unsigned>(tile.head)));
      const int last = tile.last_key_tile, end = last - tile.key_tiles;
#pragma unroll 1
      for (int i = last; i > end; --i) {
        Load(cta.keys, key, cta.Keys(key.stage), cta.params.k_map, cta.params.k_tail_map, tile, head, i);
        key.Advance();
        if (kValuesLater && i == last) continue;
        LoadValues(tile, head, kValuesLater ? i + 1 : i, &value);
      }
      if (kValuesLater) LoadValues(tile, head, end + 1, &value);
    }
  }

 private:
  __device__ void LoadQuery(const WorkTile& tile, typename Traits::QueryState query) const {
    cta.query.WaitEmpty(query);
    if (!ElectOne()) return;
    const uint32_t barrier = cta.query.Full(query);
    // Of warpgroups without rows nothing: whatever they compute is not stored.
    const int boxes = (tile.count + 63) / 64;
    ArriveExpectTx(barrier, boxes * Traits::kColumns * 64 * 128);
    for (int box = 0; box < boxes; ++box) {
#pragma unroll
      for (int column = 0; column < Traits::kColumns; ++column) {
        TmaLoadHeadRows(cta.Query(query.stage) + column * Traits::kQueryColumnBytes + box * 64 * 128, cta.params.q_map,
                        barrier, column * 64, tile.head, tile.begin + tile.first_row + box * 64);
      }
    }
  }

  __device__ void LoadValues(const WorkTile& tile, int head, int key_tile, typename Traits::ValueState* value) const {
    Load(cta.values, *value, cta.Values(value->stage), cta.params.v_map, cta.params.v_tail_map, tile, head, key_tile);
    value->Advance();
  }

  // A key tile of K or V. Of a sequence's last one only boxes that have some of its rows.
  template <typename Pipeline, typename State>
  __device__ void Load(const Pipeline& pipeline, State state, uint32_t shared, const CUtensorMap& map,
                       const CUtensorMap& tail_map, const WorkTile& tile, int head, int key_tile) const {
    pipeline.WaitEmpty(state);
    if (!ElectOne()) return;
    const uint32_t barrier = pipeline.Full(state);
    const int position = key_tile * Traits::kTileKeys;
    const int token = tile.begin + position;
    const int keys = tile.length - position;
    if (keys > Traits::kTileKeys - Traits::kTailRows) {
      ArriveExpectTx(barrier, Traits::kTileBytes);
#pragma unroll
      for (int column = 0; column < Traits::kColumns; ++column) {
        TmaLoadHeadRows(shared + column * Traits::kTileColumnBytes, map, barrier, column * 64, head, token);
      }
    } else {
      const int boxes = (keys + Traits::kTailRows - 1) / Traits::kTailRows;
      constexpr int kBoxBytes = Traits::kTailRows * 128;
      ArriveExpectTx(barrier, boxes * Traits::kColumns * kBoxBytes);
      for (int box = 0; box < boxes; ++box) {
#pragma unroll
        for (int column = 0; column < Traits::kColumns; ++column) {
          TmaLoadHeadRows(shared + column * Traits::kTileColumnBytes + box * kBoxBytes, tail_map, barrier, column * 64,
                          head, token + box * Traits::kTailRows);
        }
      }
    }
  }
};

}  // namespace xla_gpu::bidirectional

#endif  // XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_PRODUCER_CUH_
