// What the sm_90a kernel of mla_attention (sm90.cuh) takes, its work tiles, and its shared memory.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_SM90_TRAITS_CUH_
#define XLA_GPU_OPS_MLA_ATTENTION_SM90_TRAITS_CUH_

#include <cstddef>
#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/attention_state.cuh"
#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/fast_divisor.h"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/tensor_map.cuh"
#include "ffi/ops/mla_attention/split_layout.h"
#include "ffi/ops/paged_attention/paged_attention.h"
#include "ffi/ops/paged_attention/prefill/pipeline.cuh"

namespace xla_gpu::mla {

struct Sm90Params {
  PagedAttentionParams attention;  // as paged_attention's metadata functions take it; head_dim is that of `out`
  float* accumulators;             // [SplitLayout::kSlots][slot_rows][kLatentDim]
  AttentionState* states;          // [SplitLayout::kSlots][slot_rows], scores in units of log2
  SplitTile* split_tiles;          // [gridDim.x]
  int slot_rows;
  int ctas;               // that compute work tiles
  int tile_rows;          // of a work tile: kTileRows, or fewer (sm90_few_rows.cuh)
  int unit_cost;          // sm90_schedule.cuh
  int group_ctas;         // 1, or 2 where CTAs 2i and 2i + 1 take the two row tiles of a unit at a time
  int box_rows;           // slots of a page that are loaded together: 8 to 64
  FastDivisor heads;      // num_heads
  FastDivisor page;       // page_size
  float scale_log2;       // scale · log2(e)
  uint64_t keys_policy;   // of L2; a parameter stands in a uniform register, a literal would not
  CUtensorMap q_map;      // [num_tokens * num_heads][kSlotDim], in boxes of tile_rows rows
  CUtensorMap cache_map;  // in boxes of box_rows slots and kPieceDim columns; for tiles of few rows kPartColumns
};

inline constexpr int kTileKeys = 64;
inline constexpr int kProducerThreads = 128;  // a warpgroup
inline constexpr int kConsumerThreads = 256;  // two warpgroups
inline constexpr int kThreads = kProducerThreads + kConsumerThreads;
// Registers of a thread after setmaxnreg; together no more than the launch has allocated.
inline constexpr int kProducerRegisters = 88, kConsumerRegisters = 208;
inline constexpr int kHalfDim = kLatentDim / 2;  // of the values that a warpgroup accumulates

// A larger maximum is taken over only where numerators would grow past 2^8, which float16 and bfloat16 hold.
inline constexpr float kRescaleThreshold = 8;

// Rows [first_row, first_row + rows) of `out` as [num_tokens * num_heads][kLatentDim], and the key tiles
// [first_key_tile, first_key_tile + key_tiles) of their sequence.
struct WorkTile {
  enum Kind { kEnd, kAttention, kNan };
  Kind kind;  // kEnd: there are no more
  int first_row;
  int rows;
  int sequence_row;  // of first_row in its sequence
  int offset;        // row i of the tile sees the keys up to offset + (sequence_row + i) / num_heads
  int first_key_tile;
  int key_tiles;
  int key_end;            // no row sees a key from here on
  int block_table;        // of the sequence
  int first_page, pages;  // of the sequence: this CTA looks at the numbers [first_page, pages)
  int slot;               // of scratch memory; -1: all keys of the rows are here
};

// Whether a page of the work tile lies outside the cache, or its sequence's context is wrong: then its rows are NaN. By
// the threads of a warpgroup, in all of which it is the same; `barrier` is a named barrier of theirs. The first numbers
// are on their way from the constructor on.
template <int kEarly>
class PageCheck {
 public:
  __device__ PageCheck(const Sm90Params& params, const WorkTile& tile, int thread)
      : num_pages_(static_cast<uint64_t>(params.attention.num_pages)), wrong_(tile.kind == WorkTile::kNan) {
    const int32_t* const table = params.attention.block_tables + tile.block_table * params.attention.pages_per_seq;
    int page = wrong_ ? tile.pages : tile.first_page + thread;
#pragma unroll
    for (int i = 0; i < kEarly; ++i) {
      numbers_[i] = 0;  // a page that there is
      if (page < tile.pages) numbers_[i] = LoadBehindWait(table + page);
      page += 128;
    }
#pragma unroll 4
    for (; page < tile.pages; page += 128) wrong_ |= IsOutside(__ldg(table + page));
  }

  __device__ bool IsWrong(int barrier) {
#pragma unroll
    for (int i = 0; i < kEarly; ++i) wrong_ |= IsOutside(numbers_[i]);
    return NamedBarrierSyncOr(barrier, 128, wrong_);
  }

 private:
  __device__ bool IsOutside(int32_t number) const { return number < 0 || static_cast<uint64_t>(number) >= num_pages_; }

  uint64_t num_pages_;
  bool wrong_;
  int32_t numbers_[kEarly + 1];
};

// ---- Shared memory
inline constexpr int kStages = 2;  // key tiles
inline constexpr int kAtomBytes = 1024;
// Q lies as columns of swizzle atoms: [kSlotDim / 64][kTileRows] rows of 128 bytes.
inline constexpr int kQueryColumnBytes = kTileRows * 128;
inline constexpr int kQueryBytes = kSlotDim / 64 * kQueryColumnBytes;
// A key tile lies in pieces of 64 columns, each [kTileKeys / 8] swizzle atoms, which are filled one by one. They are
// given back in three parts: the halves of the latents, which are values too, and the piece of the rotated columns.
// Where these were, the numerators lie after the scores.
inline constexpr int kPieceDim = 64;
inline constexpr int kPieces = kSlotDim / kPieceDim, kHalfPieces = kHalfDim / kPieceDim;
inline constexpr int kRopePart = 2;
inline constexpr int kPieceBytes = kTileKeys * 128;
inline constexpr int kHalfBytes = kHalfPieces * kPieceBytes;
inline constexpr int kStageBytes = kPieces * kPieceBytes;
static_assert(kRopeDim == kPieceDim && kPieces == 2 * kHalfPieces + 1 && kPieceBytes == kTileKeys / 8 * kAtomBytes);

using KeyState = prefill::PipelineState<kStages>;
using QueryState = prefill::PipelineState<1>;
using TileState = prefill::PipelineState<2>;

// Of all threads that plan a CTA's share (sm90_schedule.cuh).
struct ScheduleStorage {
  int64_t warp_costs[kThreads / 32];
  int64_t warp_units[kThreads / 32];
  int warp_longest[kThreads / 32];
  int64_t found_start;
  int found_sequence;
};

struct SharedStorage {
  char q[kQueryBytes];
  char keys[kStages][kStageBytes];
  WorkTile tiles[2];
  prefill::StageBarriers key_barriers[kStages][kPieces];  // `empty` of the first piece of each part alone
  prefill::StageBarriers q_barriers[1];
  prefill::StageBarriers tile_barriers[2];
  float row_max[2][kTileRows];      // behind the key tiles of each warpgroup
  float row_sums[2][2][kTileRows];  // [work tile % 2][warpgroup]
  ScheduleStorage schedule;
};
inline constexpr int kSharedBytes = static_cast<int>(sizeof(SharedStorage));
static_assert(kSharedBytes <= 227 * 1024);

// What all warps of a CTA know.
struct Cta {
  const Sm90Params& params;
  char* const shared;             // SharedStorage, aligned to 1024 bytes
  const uint32_t shared_address;  // wgmma, TMA and barriers take 32-bit shared-memory addresses
  const int lane = static_cast<int>(threadIdx.x) % 32;

  const prefill::Pipeline<KeyState, kPieces> keys;
  const prefill::Pipeline<QueryState> query;
  const prefill::Pipeline<TileState> tiles;

  __device__ Cta(const Sm90Params& params, char* shared)
      : params(params),
        shared(shared),
        shared_address(SharedAddress(shared)),
        keys{Address(offsetof(SharedStorage, key_barriers))},
        query{Address(offsetof(SharedStorage, q_barriers))},
        tiles{Address(offsetof(SharedStorage, tile_barriers))} {}

  __device__ uint32_t Address(size_t offset) const { return shared_address + static_cast<uint32_t>(offset); }
  __device__ SharedStorage& Storage() const { return *reinterpret_cast<SharedStorage*>(shared); }
  __device__ WorkTile& Tile(TileState state) const { return Storage().tiles[state.stage]; }
  __device__ uint32_t Query() const { return Address(offsetof(SharedStorage, q)); }
  __device__ uint32_t Piece(int stage, int piece) const {
    return Address(offsetof(SharedStorage, keys)) + stage * kStageBytes + piece * kPieceBytes;
  }
  __device__ uint32_t Part(int stage, int part) const { return Piece(stage, part * kHalfPieces); }
  // Of a part of a key tile.
  __device__ uint32_t EmptyPart(KeyState state, int part) const { return keys.Empty(state, part * kHalfPieces); }
  __device__ void Arrive(uint32_t barrier) const { prefill::ArriveFromWarp(barrier, lane); }
};

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SM90_TRAITS_CUH_
