// The warp of the sm_90a kernel (sm90.cuh) that finds a CTA's work tiles, and loads Q and the latents by TMA.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_SM90_PRODUCER_CUH_
#define XLA_GPU_OPS_MLA_ATTENTION_SM90_PRODUCER_CUH_

#include <cstdint>

#include "ffi/device/mbarrier.cuh"
#include "ffi/device/tensor_map.cuh"
#include "ffi/ops/mla_attention/sm90_schedule.cuh"
#include "ffi/ops/mla_attention/sm90_traits.cuh"

namespace xla_gpu::mla {

// Lane i loads box i of a key tile. Boxes behind the last key that a row sees are not loaded.
struct CacheBox {
  bool used;
  int page, atom_row;
};
__device__ inline CacheBox FindBox(const Sm90Params& params, int lane, const WorkTile& tile, int key_tile) {
  const auto in_tile = static_cast<uint32_t>(lane * params.box_rows);
  const uint32_t key = static_cast<uint32_t>(key_tile) * kTileKeys + in_tile;
  CacheBox box{in_tile < kTileKeys && key < static_cast<uint32_t>(tile.key_end), 0, 0};
  if (!box.used) return box;
  const uint32_t page = params.page.Divide(key);
  const int64_t table = int64_t{tile.block_table} * params.attention.pages_per_seq;
  box.page = __ldg(params.attention.block_tables + table + page);
  box.atom_row = static_cast<int>(key - page * params.page.divisor) / 8;
  return box;
}

class Producer {
 public:
  __device__ explicit Producer(const Cta& cta) : cta_(cta), params_(cta.params) {}

  __device__ void Run(const Schedule& schedule) {
    SplitTile split{};
    TileState work;
    if (schedule.begin < schedule.end) {
      TileCursor cursor(params_, schedule);
      WorkTile tile{};
#pragma unroll 1
      while (cursor.Next(&tile, &split)) {
        Publish(tile, &work);
        if (tile.key_tiles == 0) continue;
        LoadQuery(tile);
        LoadKeys(tile);
      }
    }
    WorkTile end{};
    end.kind = WorkTile::kEnd;
    Publish(end, &work);
    if (cta_.lane == 0) params_.split_tiles[blockIdx.x] = split;
  }

 private:
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
      ArriveExpectTx(barrier, kQueryBytes);
      // Rows behind the tile's are other sequences', or zeros behind the last one. What they become is not stored.
      TmaLoadQueryRows(cta_.Query(), params_.q_map, barrier, /*head=*/0, tile.first_row);
    }
    __syncwarp();
    query_.Advance();
  }

  __device__ void LoadKeys(const WorkTile& tile) {
    const int end = tile.first_key_tile + tile.key_tiles;
    CacheBox next = FindBox(params_, cta_.lane, tile, tile.first_key_tile);
#pragma unroll 1
    for (int i = tile.first_key_tile; i < end; ++i) {
      const CacheBox box = next;
      if (i + 1 < end) next = FindBox(params_, cta_.lane, tile, i + 1);
      const int boxes = __popc(__ballot_sync(~0u, box.used));
      // The warpgroup that computes the scores begins with its own half of the latents, which it is also the first to
      // have no more use for.
      const int half = (i - tile.first_key_tile) % 2;
      LoadHalf(half, boxes, box);
      LoadHalf(1 - half, boxes, box);
      const int box_bytes = params_.box_rows * 128;
      const uint32_t barrier = BeginPart(kRopePart, boxes * box_bytes);
      if (box.used) {
        TmaLoadCacheBox(cta_.Part(key_.stage, kRopePart) + cta_.lane * box_bytes, params_.rope_map, barrier,
                        kLatentDim / 64, box.atom_row, box.page);
      }
      __syncwarp();
      key_.Advance();
    }
  }

  __device__ void LoadHalf(int half, int boxes, const CacheBox& box) const {
    const int box_bytes = params_.box_rows * kHalfDim * 2;
    const uint32_t barrier = BeginPart(half, boxes * box_bytes);
    // A page outside the cache reads nothing: the consumers find it.
    if (box.used) {
      TmaLoadCacheBox(cta_.Part(key_.stage, half) + cta_.lane * box_bytes, params_.latent_map, barrier,
                      half * (kHalfDim / 64), box.atom_row, box.page);
    }
    __syncwarp();
  }

  // Returns the barrier at which `bytes` are to arrive.
  __device__ uint32_t BeginPart(int part, int bytes) const {
    cta_.keys.WaitEmpty(key_, part);
    const uint32_t barrier = cta_.keys.Full(key_, part);
    if (cta_.lane == 0) ArriveExpectTx(barrier, bytes);
    __syncwarp();
    return barrier;
  }

  const Cta& cta_;
  const Sm90Params& params_;
  KeyState key_;
  QueryState query_;
};

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SM90_PRODUCER_CUH_
