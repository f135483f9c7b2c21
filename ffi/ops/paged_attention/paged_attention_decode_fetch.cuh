// How a warp of the decode kernel gets its tiles of K and V into shared memory ahead of time.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_FETCH_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_FETCH_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/cluster.cuh"
#include "ffi/device/tensor_copy.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_args.h"
#include "ffi/ops/paged_attention/paged_attention_decode_shape.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_work.cuh"

namespace xla_gpu::decode {

// Fetches the tiles of a warp's strands in order, through all of its block's work, `stages` tiles ahead of the
// arithmetic. Page numbers are fetched the same way, another `stages` tiles ahead.
template <typename S>
class Fetcher {
 public:
  // What is known of a tile before its page numbers arrive.
  struct Tile {
    int head;       // kv head; -1: nothing left to fetch
    int first_key;  // of the tile
    int begin;      // keys before it are hidden and fetched as zeros
    int end;        // as are keys from here on
  };
  static constexpr int kLooks = S::kMaxStages + 1;
  // Of one warp, in shared memory.
  struct Looks {
    Tile tiles[kLooks];
    int pages[kLooks][S::kTile];      // by key, or by box
    uint64_t arrived[S::kMaxStages];  // barriers: a stage's boxes are there
  };

  __device__ Fetcher(const DecodeArgs& args, uint32_t ring, Looks* looks, int warp, int lane)
      : looks_(looks), ring_(ring), policy_(EvictFirstPolicy()), stage_(0), parity_(0), warp_(warp), lane_(lane) {
    if (lane == 0 && args.box_keys > 0) {
      for (int i = 0; i < S::kMaxStages; ++i) InitBarrier(&looks->arrived[i], 1);
      FenceForCopies();
    }
  }

  // Starts where `walk` is, and fills all stages.
  __device__ void Start(const DecodeArgs& args, const TensorMaps& maps, const Plan& plan, const Entry* order,
                        const Walk<S>& walk) {
    bad_stages_ = 0;
    look_ = 0;
    walk_ = walk;
    SetStrand();
#pragma unroll 1
    for (int i = -args.stages; i < args.stages; ++i) {
      if (i == 0) WaitAsync<0>();
      Step(args, maps, plan, order, i < 0 ? i : Ahead(args, i));
    }
  }

  // Waits for the oldest tile; returns its shared address.
  __device__ uint32_t Wait(const DecodeArgs& args) {
    WaitAsync(args.stages - 1);
    if (args.box_keys > 0) WaitBarrier(&looks_->arrived[stage_], parity_);
    __syncwarp();
    return ring_ + stage_ * S::kStageBytes;
  }

  // Whether the oldest tile has a page number outside the cache.
  __device__ bool IsBad() const { return bad_stages_ >> stage_ & 1; }

  // Gives the oldest tile's stage to the next one and starts its copies.
  __device__ void Advance(const DecodeArgs& args, const TensorMaps& maps, const Plan& plan, const Entry* order) {
    Step(args, maps, plan, order, stage_);
    parity_ ^= stage_ + 1 == args.stages;
    stage_ = Ahead(args, 1);
  }

 private:
  // The stage `tiles` after the oldest one's.
  __device__ int Ahead(const DecodeArgs& args, int tiles) const {
    return stage_ + tiles >= args.stages ? stage_ + tiles - args.stages : stage_ + tiles;
  }

  // Looks a tile up and, unless stage < 0, copies the one looked up `stages` steps ago: one group of asynchronous
  // copies.
  __device__ void Step(const DecodeArgs& args, const TensorMaps& maps, const Plan& plan, const Entry* order,
                       int stage) {
    __syncwarp();  // the stage and the looks are no longer read
    const int size = args.stages + 1;
    LookUp(args, plan, order, look_);
    look_ = look_ + 1 == size ? 0 : look_ + 1;  // which is also the one that was looked up `stages` steps ago
    if (stage >= 0) {
      const Tile tile = looks_->tiles[look_];
      if (tile.head >= 0) {
        if (args.box_keys > 0) {
          CopyBoxes(args, maps, tile, looks_->pages[look_], stage);
        } else {
          Copy(args, tile, looks_->pages[look_], stage);
        }
      }
    }
    CommitAsync();
  }

  __device__ void SetStrand() {
    if (!walk_.active) return;
    const int strand = walk_.group * S::kWarps + warp_;
    tile_ = walk_.cut.StrandBegin(strand);
    tile_end_ = walk_.cut.StrandBegin(strand + 1);
  }

  __device__ void LookUp(const DecodeArgs& args, const Plan& plan, const Entry* order, int look) {
    while (walk_.active && tile_ >= tile_end_) {
      walk_.Next(args, plan, order);
      SetStrand();
    }
    const PagedAttentionParams& params = args.params;
    Tile tile = {-1, 0, 0, 0};
    if (walk_.active) {
      const int64_t hidden = int64_t{walk_.sequence.context_len} - walk_.sequence.q_len - params.sliding_window;
      tile = {walk_.head, tile_ * S::kTile, params.sliding_window > 0 && hidden >= 0 ? static_cast<int>(hidden) + 1 : 0,
              walk_.sequence.context_len};
      const int each = args.box_keys > 0 ? args.box_keys : 1;
      const int key = tile.first_key + lane_ * each;
      if (lane_ * each < S::kTile && key + each > tile.begin && key < tile.end) {
        CopyAsync4(SharedAddress(&looks_->pages[look][lane_]),
                   params.block_tables + walk_.seq * params.pages_per_seq + args.PageOf(key));
      }
      ++tile_;
    }
    if (lane_ == 0) looks_->tiles[look] = tile;
  }

  __device__ void SetBad(int stage, bool bad) {
    bad_stages_ = (bad_stages_ & ~(1u << stage)) | static_cast<uint32_t>(bad) << stage;
  }

  // By the copy engine. Boxes without a visible key, or of a bad page, are asked for outside the tensor: they become
  // zeros.
  __device__ void CopyBoxes(const DecodeArgs& args, const TensorMaps& maps, const Tile& tile, const int* pages,
                            int stage) {
    bool bad = false;
    uint64_t* const barrier = &looks_->arrived[stage];
    if (lane_ == 0) ArriveExpecting(barrier, S::kWarpStageBytes);
    for (int i = 0; i < S::kTile; i += args.box_keys) {
      const int key = tile.first_key + i;
      int page = -1;
      if (key + args.box_keys > tile.begin && key < tile.end) {
        page = pages[i / args.box_keys];
        if (page < 0 || page >= args.params.num_pages) {
          page = -1;
          bad = true;
        }
      }
      const int slot = key - args.PageOf(key) * static_cast<int>(args.params.page_size);
      const uint32_t to = ring_ + stage * S::kStageBytes + i * S::kSliceRowBytes;
      if (lane_ == 0) {
#pragma unroll
        for (int slice = 0; slice < S::kSlices; ++slice) {
          constexpr int kColumns = S::kSliceRowBytes / S::kElementBytes;
          const uint32_t at = to + slice * S::kSliceBytes;
          CopyBox(at, &maps.k, barrier, slice * kColumns, tile.head, slot, page, policy_);
          CopyBox(at + S::kTileBytes, &maps.v, barrier, slice * kColumns, tile.head, slot, page, policy_);
        }
      }
    }
    __syncwarp();
    SetBad(stage, bad);
  }

  // By the warp's threads.
  __device__ void Copy(const DecodeArgs& args, const Tile& tile, const int* pages, int stage) {
    const PagedAttentionParams& params = args.params;
    constexpr int kChunks = S::kRowBytes / 16;
    constexpr int kLanes = kChunks % 8 == 0 ? 8 : 4;  // that share a row, a chunk each
    constexpr int kRowsAtOnce = 32 / kLanes;
    const int key = tile.first_key + lane_;
    bool bad = false;
    int64_t offset = -1;  // of this lane's key, in bytes; -1: not to be read
    if (lane_ < S::kTile && key >= tile.begin && key < tile.end) {
      const int page = pages[lane_];
      bad = page < 0 || page >= params.num_pages;
      const int slot = key - args.PageOf(key) * static_cast<int>(params.page_size);
      if (!bad) offset = (page * params.page_stride + slot * params.slot_stride) * S::kElementBytes;
    }
    SetBad(stage, __any_sync(0xffffffffu, bad));

    const int first_chunk = lane_ % kLanes;
    const int64_t head_offset = tile.head * params.head_stride * S::kElementBytes + first_chunk * 16;
    const char* const k_head = static_cast<const char*>(params.k_cache) + head_offset;
    const int64_t to_v = static_cast<const char*>(params.v_cache) - static_cast<const char*>(params.k_cache);
    const uint32_t to = ring_ + stage * S::kStageBytes;
    const int row_bytes = static_cast<int>(params.head_dim) * S::kElementBytes;
    if (row_bytes == S::kRowBytes && __all_sync(0xffffffffu, lane_ >= S::kTile || offset >= 0)) {
#pragma unroll
      for (int i = 0; i < S::kTile / kRowsAtOnce; ++i) {
        const int row = i * kRowsAtOnce + lane_ / kLanes;
        const char* const k = k_head + __shfl_sync(0xffffffffu, offset, row);
        const char* const v = k + to_v;
#pragma unroll
        for (int j = 0; j < kChunks / kLanes; ++j) {
          const uint32_t at = to + S::At(row, first_chunk + j * kLanes);
          CopyAsync16(at, k + j * kLanes * 16, policy_);
          CopyAsync16(at + S::kTileBytes, v + j * kLanes * 16, policy_);
        }
      }
      return;
    }
    const bool narrow = S::kFloat8 && row_bytes % 16 != 0;  // rows are 8-byte aligned only
#pragma unroll 1
    for (int i = 0; i < S::kTile / kRowsAtOnce; ++i) {
      const int row = i * kRowsAtOnce + lane_ / kLanes;
      const int64_t row_offset = __shfl_sync(0xffffffffu, offset, row);
      const bool read = row_offset >= 0;
      const char* const k = k_head + (read ? row_offset : 0);
      const char* const v = k + to_v;
#pragma unroll 1
      for (int j = 0; j < kChunks / kLanes; ++j) {
        const int from = j * kLanes * 16;
        const uint32_t at = to + S::At(row, first_chunk + j * kLanes);
        if (!narrow) {
          if (first_chunk * 16 + from < row_bytes) {
            CopyAsync16(at, k + from, read, policy_);
            CopyAsync16(at + S::kTileBytes, v + from, read, policy_);
          }
        } else {
          for (int half = 0; half < 16 && first_chunk * 16 + from + half < row_bytes; half += 8) {
            CopyAsync8(at + half, k + from + half, read, policy_);
            CopyAsync8(at + half + S::kTileBytes, v + from + half, read, policy_);
          }
        }
      }
    }
  }

  Walk<S> walk_;
  int tile_, tile_end_;
  int look_;  // the next one to fill
  Looks* looks_;
  uint32_t ring_;  // shared address of this warp's part of stage 0
  uint64_t policy_;
  int stage_;        // of the oldest tile
  uint32_t parity_;  // of its barrier's phase
  uint32_t bad_stages_;
  int warp_, lane_;
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_FETCH_CUH_
