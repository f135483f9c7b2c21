// What a block of the prefill kernel of prefill/sm90_tma.cuh consists of: its places in shared memory, the
// barriers that pass them on, and the tiles of query rows that it knows.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_TRAITS_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_TRAITS_CUH_

#include <cstdint>
#include <type_traits>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/tensor_map.cuh"
#include "ffi/ops/paged_attention/prefill/combine.cuh"
#include "ffi/ops/paged_attention/prefill/persistent_tile_scheduler.cuh"
#include "ffi/ops/paged_attention/prefill/rows.cuh"

namespace xla_gpu::prefill {

struct TmaParams {
  PagedAttentionParams attention;
  FastDivisor group;     // query heads of a kv head
  FastDivisor kv_heads;  // num_kv_heads
  FastDivisor page;      // page_size
  int box_rows;          // divides page_size and the keys of a tile
  int head_atoms;        // of 64 columns, from one kv head to the next
  bool query_by_tma;     // whole tokens make up 64 rows, and q_map is there
  SplitKvPolicy split_kv;
  SplitAccumulators accumulators;
  CUtensorMap k_map;  // in boxes of box_rows slots and head_dim columns
  CUtensorMap v_map;
  CUtensorMap q_map;  // in boxes of the 64 rows of a warpgroup
};

// kDim: head_dim. kKeys: keys of a tile. kConsumers: warpgroups that compute. kSharedRing: tiles of K and V take turns
// in one ring. k…Stages: tiles in the rings of Q, K and V.
template <typename T, int kDim, int kKeys, int kConsumers, bool kSharedRing, int kQueryStages, int kKeyStages,
          int kValueStages, int kSequences, int kClasses>
struct TmaTraits {
  using Element = T;
  static constexpr int kHeadDim = kDim;
  static constexpr int kTileKeys = kKeys;
  static constexpr int kConsumerWarpgroups = kConsumers;
  static constexpr int kWarpgroupThreads = 128;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroupThreads;
  static constexpr int kRows = kConsumers * 64;
  static constexpr int kKeyTiles = kKeys / 8;
  static constexpr int kDimTiles = kDim / 8;
  static constexpr int kRowVectors = kDim / 8;        // 16-byte chunks of a row
  static constexpr int kAtomsPerRow = kDim / 64;      // rows lie in slabs of 64 elements, as the tensor cores read them
  static constexpr int kQueryColumnBytes = 64 * 128;  // of a warpgroup's rows
  static constexpr int kQueryWarpgroupBytes = 64 * kDim * 2;
  static constexpr int kAtomRowBytes = kAtomsPerRow * 1024;  // of 8 keys
  static constexpr int kQueryBytes = kRows * kDim * 2;
  static constexpr int kTileBytes = kKeys * kDim * 2;
  static constexpr int kTileStages = kDim == 256 ? 2 : 4;  // tiles of rows that are known at a time

  using Scheduler = PersistentTileScheduler<kThreads, kRows, kSequences, kClasses>;
  using WarpScheduler = PersistentWarpTileScheduler<kRows>;
  using Rows = TileRows<FastDivisor>;

  // Tiles of keys of a warpgroup's rows: those that some row sees, and those that all rows see whole.
  struct WarpgroupTiles {
    int first, last;
    int whole_first, whole_last;
  };

  // A tile of rows, as the scheduling warp describes it to the others.
  struct alignas(8) TileStage {
    Rows rows;
    WarpgroupTiles groups[kConsumers];
    int first_tile, last_tile;  // of keys
    int tiles;                  // of keys; 0: there are no more tiles of rows
    bool invalid_page;          // some page of the sequence lies invalid_page the cache
    SplitMode mode;             // of a part of the tile's keys; else 0
    int64_t accumulators;       // where its results lie in the scratch: a row
  };

  // Shared memory, from the start: Q stages, K stages, V stages, a word for each consumer, slots, scheduler, barriers.
  static constexpr int kKeyStart = kQueryStages * kQueryBytes;
  static constexpr int kValueStart = kKeyStart + (kSharedRing ? 0 : kKeyStages * kTileBytes);
  static constexpr int kSumStart = kKeyStart + (kKeyStages + kValueStages) * kTileBytes;
  static constexpr int kTileStageStart = kSumStart + 8;
  static constexpr int kSchedulerStart =
      (kTileStageStart + kTileStages * static_cast<int>(sizeof(TileStage)) + 15) / 16 * 16;
  static constexpr int kBarrierStart =
      (kSchedulerStart + static_cast<int>(sizeof(typename Scheduler::Storage)) + 7) / 8 * 8;
  // Rings of stages, each with a barrier for full and one for free.
  static constexpr int kQueryRing = 0;
  static constexpr int kKeyRing = kQueryRing + kQueryStages * kConsumers;  // Q: for each warpgroup's rows
  static constexpr int kValueRing = kKeyRing + (kSharedRing ? 0 : kKeyStages);
  static constexpr int kTileRing = kKeyRing + kKeyStages + kValueStages;
  static constexpr int kCheckRing = kTileRing + kTileStages;  // full: `invalid_page` of the slot is known
  static constexpr int kSingle = kCheckRing + kTileStages;    // for the warp that copies, alone
  static constexpr int kSharedBytes = kBarrierStart + (kSingle + 1) * 16;
  static_assert(alignof(TileStage) <= 8 && kTileStageStart % 8 == 0 && sizeof(TileStage) % 8 == 0);
  static_assert(kDim % 64 == 0 && kKeys % 16 == 0 && kKeys <= 256 && kSharedBytes <= 227 * 1024);

  // The threads whose share of an SM's registers a thread gets. Small blocks take no more than they need, so that
  // beside them there is room for the decode path's merging kernel, behind which they may wait.
  static constexpr int kRegisterThreads = kThreads < 384 ? 384 : kThreads;
  // Registers of a thread, in place of those that the launch gives each; together no more than an SM has.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kDim == 256 ? 40 : 56;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kDim == 256 ? 232 : 224;

  // A place in a ring, and how often the ring has been gone around, in its lowest bit.
  template <int kStages, int kRing, int kStart = 0, int kStep = 1>
  struct PipelineState {
    int stage = kStart;
    uint32_t phase = 0;
    __device__ void Advance() {
      stage += kStep;
      if (stage >= kStages) {
        stage -= kStages;
        phase ^= 1;
      }
    }
    __device__ uint32_t Barrier(uint32_t barriers) const { return barriers + (kRing + stage) * 16; }
    __device__ uint32_t Barrier(uint32_t barriers, int part, int parts) const {
      return barriers + (kRing + stage * parts + part) * 16;
    }
  };
  using QueryState = PipelineState<kQueryStages, kQueryRing>;
  using KeyState = std::conditional_t<kSharedRing, PipelineState<kKeyStages + kValueStages, kKeyRing, 0, 2>,
                                      PipelineState<kKeyStages, kKeyRing>>;
  using ValueState = std::conditional_t<kSharedRing, PipelineState<kKeyStages + kValueStages, kKeyRing, 1, 2>,
                                        PipelineState<kValueStages, kValueRing>>;
  using TileState = PipelineState<kTileStages, kTileRing>;

  const TmaParams& tma;
  const PagedAttentionParams& params;
  char* const shared;  // aligned to 1024 bytes
  const uint32_t shared_address;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;  // in the warpgroup
  const int lane = static_cast<int>(threadIdx.x) % 32;

  __device__ TmaTraits(const TmaParams& tma, char* shared)
      : tma(tma), params(tma.attention), shared(shared), shared_address(SharedAddress(shared)) {}

  template <typename State>
  __device__ uint32_t Full(State place) const {
    return place.Barrier(shared_address + kBarrierStart);
  }
  template <typename State>
  __device__ uint32_t Empty(State place) const {
    return Full(place) + 8;
  }
  __device__ uint32_t FullQuery(QueryState place, int group) const {
    return place.Barrier(shared_address + kBarrierStart, group, kConsumers);
  }
  __device__ uint32_t Checked(TileState place) const { return Full(place) + kTileStages * 16; }
  __device__ uint32_t Single() const { return shared_address + kBarrierStart + kSingle * 16; }
  __device__ TileStage& At(TileState place) const {
    return reinterpret_cast<TileStage*>(shared + kTileStageStart)[place.stage];
  }
  // Byte offset of a chunk of a row, in slabs of `slab` bytes.
  static __device__ int SwizzledOffset(int slab, int row, int chunk) {
    return chunk / 8 * slab + row * 128 + ((chunk ^ row) & 7) * 16;
  }
  // Lets go of a stage or slot, for this warp.
  __device__ void Release(uint32_t barrier) const {
    __syncwarp();
    if (lane == 0) ArriveBarrier(barrier);
  }
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_TRAITS_CUH_
