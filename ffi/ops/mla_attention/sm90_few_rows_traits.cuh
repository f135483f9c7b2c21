// Shared memory of the sm_90a kernel for work tiles of few rows (sm90_few_rows.cuh).
#ifndef XLA_GPU_OPS_MLA_ATTENTION_SM90_FEW_ROWS_TRAITS_CUH_
#define XLA_GPU_OPS_MLA_ATTENTION_SM90_FEW_ROWS_TRAITS_CUH_

#include <cstddef>
#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/ops/mla_attention/sm90_traits.cuh"
#include "ffi/ops/paged_attention/prefill/pipeline.cuh"

namespace xla_gpu::mla {

// A key tile comes in three parts of 64 keys and 192 columns, each [kTileKeys / 8][3] swizzle atoms, which take turns
// in a ring: two tiles and more are there or on their way.
inline constexpr int kTileParts = 3;
inline constexpr int kPartColumns = kSlotDim / kTileParts;
inline constexpr int kPartAtoms = kPartColumns / 64;
inline constexpr int kPartRowBytes = kPartAtoms * kAtomBytes;  // from 8 keys to the next 8 keys
inline constexpr int kPartBytes = kTileKeys / 8 * kPartRowBytes;
static_assert(kPartColumns % 64 == 0);

struct FewRowsTraits {
  // Two warpgroups of consumers, then a warp that loads.
  static constexpr int kThreads = kConsumerThreads + 32;
  static constexpr int kStages = 8;                   // parts
  static constexpr int kBlocks = kFewRows / 8;        // of 8 query rows
  static constexpr int kDimTiles = kLatentDim / 64;   // of 64 columns of the values
  static constexpr int kOwnDimTiles = kDimTiles / 2;  // that a warpgroup stores
  // Named barriers of the consumers. kGroupBarrier + i: the warps of warpgroup i.
  static constexpr int kGroupBarrier = 1, kExchangeBarrier = 3;
  // Q lies as columns of swizzle atoms: [kSlotDim / 64][kFewRows] rows of 128 bytes. A tile's numerators are such a
  // column.
  static constexpr int kColumnBytes = kFewRows * 128;
  static constexpr int kQueryBytes = kSlotDim / 64 * kColumnBytes;
  using PartState = prefill::PipelineState<kStages>;

  struct Storage {
    char parts[kStages][kPartBytes];
    char q[kQueryBytes];
    char numerators[2][kColumnBytes];  // of each warpgroup
    float4 exchange[2][2][128];        // [warpgroup], of each of its threads: accumulators for the other's
    WorkTile tiles[2];
    prefill::StageBarriers part_barriers[kStages];
    prefill::StageBarriers q_barriers[1];
    prefill::StageBarriers tile_barriers[2];
    float warp_max[2][4][kFewRows];   // [warpgroup][warp], of a key tile
    float warp_sums[2][4][kFewRows];  // the same of a work tile
    float row_max[2][kFewRows];       // [warpgroup], of a work tile
    ScheduleStorage schedule;
  };
  static constexpr int kSharedBytes = static_cast<int>(sizeof(Storage));
  static_assert(kSharedBytes <= 227 * 1024);
};

// A consumer's place. Of 64 keys or columns of values, a thread has (16 * warp + group) and the one 8 further on, as
// halves h, and in block n the query rows (8 * n + column + j) of them: element [n][h * 2 + j] of an accumulator.
struct FewRowsThread {
  int warpgroup;
  int thread;  // of the warpgroup
  int warp;    // of the warpgroup
  int group;
  int column;
};
using FewRowsAccumulators = float[FewRowsTraits::kDimTiles][FewRowsTraits::kBlocks][4];
using FewRowsOfThread = float[FewRowsTraits::kBlocks][2];  // something of each of a thread's query rows, [n][j]

// What all warps of a CTA know.
struct FewRowsCta {
  using Traits = FewRowsTraits;
  using SharedStorage = Traits::Storage;
  using PartState = Traits::PartState;

  const Sm90Params& params;
  char* const shared;             // SharedStorage, aligned to 1024 bytes
  const uint32_t shared_address;  // wgmma, TMA and barriers take 32-bit shared-memory addresses
  const int lane = static_cast<int>(threadIdx.x) % 32;

  const prefill::Pipeline<PartState> parts;
  const prefill::Pipeline<QueryState> query;
  const prefill::Pipeline<TileState> tiles;

  __device__ FewRowsCta(const Sm90Params& params, char* shared)
      : params(params),
        shared(shared),
        shared_address(SharedAddress(shared)),
        parts{Address(offsetof(SharedStorage, part_barriers))},
        query{Address(offsetof(SharedStorage, q_barriers))},
        tiles{Address(offsetof(SharedStorage, tile_barriers))} {}

  __device__ uint32_t Address(size_t offset) const { return shared_address + static_cast<uint32_t>(offset); }
  __device__ SharedStorage& Storage() const { return *reinterpret_cast<SharedStorage*>(shared); }
  __device__ WorkTile& Tile(TileState state) const { return Storage().tiles[state.stage]; }
  __device__ uint32_t Query() const { return Address(offsetof(SharedStorage, q)); }
  __device__ uint32_t Part(PartState state) const {
    return Address(offsetof(SharedStorage, parts)) + state.stage * kPartBytes;
  }
  __device__ uint32_t Numerators(int warpgroup) const {
    return Address(offsetof(SharedStorage, numerators)) + warpgroup * Traits::kColumnBytes;
  }
  __device__ void Arrive(uint32_t barrier) const { prefill::ArriveFromWarp(barrier, lane); }
};

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SM90_FEW_ROWS_TRAITS_CUH_
