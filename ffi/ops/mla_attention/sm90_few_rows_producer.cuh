// The warp of the sm_90a kernel for few rows (sm90_few_rows.cuh) that finds a CTA's work tiles, and loads Q and the
// latents by TMA.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_SM90_FEW_ROWS_PRODUCER_CUH_
#define XLA_GPU_OPS_MLA_ATTENTION_SM90_FEW_ROWS_PRODUCER_CUH_

#include <cstdint>

#include "ffi/device/mbarrier.cuh"
#include "ffi/device/tensor_map.cuh"
#include "ffi/ops/mla_attention/sm90_few_rows_traits.cuh"
#include "ffi/ops/mla_attention/sm90_producer.cuh"
#include "ffi/ops/mla_attention/sm90_schedule.cuh"
#include "ffi/ops/mla_attention/sm90_tile_cursor.cuh"

namespace xla_gpu::mla {

class FewRowsProducer {
 public:
  using Cta = FewRowsCta;
  using Traits = typename Cta::Traits;

  __device__ explicit FewRowsProducer(const Cta& cta) : cta_(cta), params_(cta.params) {}

  __device__ void Run(const Schedule& schedule) {
    SplitTile split{};
    TileState work;
    if (schedule.begin < schedule.end) {
      TileCursor cursor(params_, schedule);
      WorkTile tile{};
      bool first = true;
#pragma unroll 1
      while (cursor.Next(&tile, &split)) {
        Publish(tile, &work);
        if (tile.key_tiles == 0) continue;
        Load(tile, first ? 0 : kTilesBeforeQuery);
        first = false;
      }
    }
    WorkTile end{};
    end.kind = WorkTile::kEnd;
    Publish(end, &work);
    if (cta_.lane == 0) params_.split_tiles[blockIdx.x] = split;
  }

 private:
  // Key tiles that are loaded while the work tile before still needs its Q: they lie where its own key tiles did, so
  // that it can always be finished.
  static constexpr int kTilesBeforeQuery = 2;
  static_assert(kTilesBeforeQuery * kTileParts <= Traits::kStages);

  __device__ void Publish(const WorkTile& tile, TileState* work) const {
    cta_.tiles.WaitEmpty(*work);
    if (cta_.lane == 0) cta_.Tile(*work) = tile;
    cta_.Arrive(cta_.tiles.Full(*work));
    work->Advance();
  }

  __device__ void LoadQuery(const WorkTile& tile) {
    cta_.query.WaitEmpty(query_);
    if (ElectOne()) {
      const uint32_t barrier = cta_.query.Full(query_);
      ArriveExpectTx(barrier, Traits::kQueryBytes);
      // Rows behind the tile's are other sequences', or zeros behind the last one. What they become is not stored.
      TmaLoadQueryRows(cta_.Query(), params_.q_map, barrier, /*head=*/0, tile.first_row);
    }
    __syncwarp();
    query_.Advance();
  }

  // Q behind the first `before_query` key tiles, or behind all.
  __device__ void Load(const WorkTile& tile, int before_query) {
    const int end = tile.first_key_tile + tile.key_tiles;
    const int query_at = min(tile.first_key_tile + before_query, end);
    CacheBox next = FindBox(params_, cta_.lane, tile, tile.first_key_tile);
#pragma unroll 1
    for (int i = tile.first_key_tile;; ++i) {
      if (i == query_at) LoadQuery(tile);
      if (i == end) return;
      const CacheBox box = next;
      if (i + 1 < end) next = FindBox(params_, cta_.lane, tile, i + 1);
      LoadKeyTile(box);
    }
  }

  __device__ void LoadKeyTile(const CacheBox& box) {
    const int boxes = __popc(__ballot_sync(~0u, box.used));
    const int box_bytes = params_.box_rows * kPartColumns * 2;
#pragma unroll 1
    for (int part = 0; part < kTileParts; ++part) {
      cta_.parts.WaitEmpty(part_);
      const uint32_t barrier = cta_.parts.Full(part_);
      if (cta_.lane == 0) ArriveExpectTx(barrier, boxes * box_bytes);
      __syncwarp();
      // A page outside the cache reads nothing: the consumers find it.
      if (box.used) {
        TmaLoadCacheBox(cta_.Part(part_) + cta_.lane * box_bytes, params_.cache_map, barrier, part * kPartAtoms,
                        box.atom_row, box.page, params_.keys_policy);
      }
      __syncwarp();
      part_.Advance();
    }
  }

  const Cta& cta_;
  const Sm90Params& params_;
  typename Cta::PartState part_;
  QueryState query_;
};

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SM90_FEW_ROWS_PRODUCER_CUH_
