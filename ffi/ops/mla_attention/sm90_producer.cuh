// The warps of the sm_90a kernel (sm90.cuh) that find a CTA's work tiles, and load Q and the latents by TMA.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_SM90_PRODUCER_CUH_
#define XLA_GPU_OPS_MLA_ATTENTION_SM90_PRODUCER_CUH_

#include <cstdint>

#include "ffi/device/mbarrier.cuh"
#include "ffi/device/tensor_map.cuh"
#include "ffi/ops/mla_attention/sm90_schedule.cuh"
#include "ffi/ops/mla_attention/sm90_tile_cursor.cuh"
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

// Of the producer's warps the first finds work tiles and loads Q; the pieces of key tiles are divided among all of
// them, since with small pages a piece is several boxes, and a warp issues one after the other.
class Producer {
 public:
  __device__ Producer(const Cta& cta, int warp) : cta_(cta), params_(cta.params), warp_(warp) {}

  __device__ void Run(const Schedule& schedule) {
    if (warp_ == 0) {
      FindAndLoad(schedule);
    } else {
      LoadFound();
    }
  }

 private:
  static constexpr int kWarps = kProducerThreads / 32;

  __device__ void FindAndLoad(const Schedule& schedule) {
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

  __device__ void LoadFound() {
    TileState work;
#pragma unroll 1
    for (;;) {
      cta_.tiles.WaitFull(work);
      const WorkTile tile = cta_.Tile(work);
      cta_.Arrive(cta_.tiles.Empty(work));
      work.Advance();
      if (tile.kind == WorkTile::kEnd) return;
      if (tile.key_tiles > 0) LoadKeys(tile);
    }
  }

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

  // This warp's pieces.
  __device__ void LoadKeys(const WorkTile& tile) {
    const int end = tile.first_key_tile + tile.key_tiles;
    CacheBox next = FindBox(params_, cta_.lane, tile, tile.first_key_tile);
#pragma unroll 1
    for (int i = tile.first_key_tile; i < end; ++i) {
      const CacheBox box = next;
      if (i + 1 < end) next = FindBox(params_, cta_.lane, tile, i + 1);
      // The warpgroup that computes the scores begins with its own half of the latents, which it is also the first to
      // have no more use for; the rotated columns come last.
      const int first_piece = (i - tile.first_key_tile) % 2 * kHalfPieces;
#pragma unroll 1
      for (int n = warp_; n < kPieces; n += kWarps) LoadPiece(n < 2 * kHalfPieces ? n ^ first_piece : n, box);
      key_.Advance();
    }
  }

  __device__ void LoadPiece(int piece, const CacheBox& box) const {
    WaitBarrier(cta_.EmptyPart(key_, piece / kHalfPieces), key_.phase ^ 1);
    const uint32_t barrier = cta_.keys.Full(key_, piece);
    const int box_bytes = params_.box_rows * kPieceDim * 2;
    const int bytes = __popc(__ballot_sync(~0u, box.used)) * box_bytes;
    if (cta_.lane == 0) ArriveExpectTx(barrier, bytes);
    __syncwarp();
    // A page outside the cache reads nothing: the consumers find it.
    if (box.used) {
      TmaLoadCacheBox(cta_.Piece(key_.stage, piece) + cta_.lane * box_bytes, params_.cache_map, barrier, piece,
                      box.atom_row, box.page, params_.keys_policy);
    }
    __syncwarp();
  }

  const Cta& cta_;
  const Sm90Params& params_;
  const int warp_;
  KeyState key_;
  QueryState query_;
};

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SM90_PRODUCER_CUH_
