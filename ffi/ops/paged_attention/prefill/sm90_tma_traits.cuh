// The instances of the TMA prefill kernel (sm90_tma.cuh): their configurations, and what follows from them: types,
// shared memory, registers.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_TRAITS_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_TRAITS_CUH_

#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/fast_divisor.h"
#include "ffi/device/tensor_map.cuh"
#include "ffi/ops/paged_attention/decode/whole_tiles.cuh"
#include "ffi/ops/paged_attention/prefill/combine.cuh"
#include "ffi/ops/paged_attention/prefill/persistent_flat_tile_scheduler.cuh"
#include "ffi/ops/paged_attention/prefill/persistent_tile_scheduler.cuh"
#include "ffi/ops/paged_attention/prefill/pipeline.cuh"
#include "ffi/ops/paged_attention/prefill/rows.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_configs.cuh"

namespace xla_gpu::prefill {

struct TmaParams {
  PagedAttentionParams attention;
  FastDivisor group;          // query heads of a kv head
  FastDivisor kv_heads;       // num_kv_heads
  FastDivisor page;           // page_size, in slots
  int box_slots;              // slots of a TMA box; divides page_size and the keys of a key tile
  int head_columns;           // from one kv head to the next, in columns of 64 elements
  bool query_by_tma;          // q_map is valid: 64 rows are whole tokens
  bool behind_decode;         // the decode path's kernels were launched before
  bool waits_for_inputs;      // and may have started before the query, K and V were there
  bool takes_whole_tiles;     // the sequences of the decode path are computed here too, by whole work tiles
  unsigned prefetch_pages;    // entries of block_tables to prefetch into L2
  const uint32_t* tree_mask;  // as in PagedAttentionCall
  int tree_words;
  SplitKvPolicy split_kv;
  SplitAccumulators accumulators;
  FastDivisor ctas;   // in a row of the grid
  CUtensorMap k_map;  // K as PagedTensor, in boxes of box_slots slots and head_dim columns
  CUtensorMap v_map;  // V likewise
  CUtensorMap q_map;  // [num_tokens][num_heads][head_dim], in boxes of the 64 rows of a warpgroup
};

// ---- What follows from a configuration
template <typename T, typename Config>
struct TmaKernelTraits : Config {
  using Element = T;
  using Config::kAlternates;
  using Config::kAnyPages;
  using Config::kConsumerWarpgroups;
  using Config::kFloat8Cache;
  using Config::kHeadDim;
  using Config::kKeyStages;
  using Config::kLongestFirst;
  using Config::kQueryStages;
  using Config::kRowWarpgroups;
  using Config::kSharedAccumulators;
  using Config::kTileKeys;
  using Config::kTileStages;
  using Config::kValueStages;

  // Of V in shared memory, and of the numerators that multiply it. All float8 values are float16 values, to which they
  // convert in a quarter of the instructions that bfloat16 takes. Keys have to be in the dtype of Q.
  using ValueElement = std::conditional_t<kFloat8Cache, __half, T>;

  static constexpr bool kHasL2Policy =
      (kConsumerWarpgroups == 1 || kAlternates) && !kFloat8Cache;  // see TmaKvWarp::L2Policy
  // Whether one CTA takes several splits of its rows where SplitKvPolicy::FirstSplits says so.
  static constexpr bool kTakesFirstSplits = (kAlternates || kConsumerWarpgroups == 1) && !kFloat8Cache;
  // Whether a CTA takes some splits of its rows beside cross-CTA splits.
  static constexpr bool kTakesSomeSplits = kSharedAccumulators && kRowWarpgroups == 1;
  // Whether it has code for the sequences of the decode path, by whole work tiles.
  static constexpr bool kTakesWholeTiles = !kFloat8Cache && !kAlternates;
  // Only of calls for one sequence: where short prompts would wait for the instructions of the others.
  static constexpr bool kTakesOneSequence =
      kTakesWholeTiles && kConsumerWarpgroups == 1 && Config::kProducerWarpgroups == 1;
  static constexpr decode::CacheFormat kDecodeFormat =
      std::is_same_v<T, __half> ? decode::CacheFormat::kF16 : decode::CacheFormat::kBF16;
  // Whether the plan is made in the fewest instructions. Not at head_dim 256, which has no registers for it.
  static constexpr bool kShortPlan = kHeadDim != 256;
  // Whether the first work tile is planned before the launch wait too. It costs registers.
  static constexpr bool kPlansFirst = kHeadDim != 64 || kAlternates;
  // Whether the warps that load read its first page numbers right behind the wait.
  static constexpr bool kLooksUpEarly = kShortPlan && kPlansFirst && !kFloat8Cache && !kAnyPages;
  // Whether a work tile comes with the KV splits of its sequence. Else they are computed again for each: in work tiles
  // of 192 rows too, whose scheduler warp has no registers for them.
  static constexpr bool kCarriesSplits = kShortPlan && kRowWarpgroups < 3;
  // Whether there is a kernel that also computes the sequences of the decode path, behind its own.
  static constexpr bool kSharesDecodeRows = kTakesFirstSplits && kConsumerWarpgroups == 1 && !kLongestFirst;
  static constexpr int kWarpgroupThreads = 128;
  static constexpr int kThreads = (Config::kProducerWarpgroups + kConsumerWarpgroups) * kWarpgroupThreads;
  static constexpr int kProducerWarps = Config::kProducerWarpgroups * 4;
  static constexpr int kRows = kRowWarpgroups * 64;  // of a work tile
  // Warps that read what the scheduler warp describes: with those that load.
  static constexpr int kTileReaders = kConsumerWarpgroups * 4 + (kProducerWarps > 0 ? kProducerWarps - 1 : 0);
  static constexpr int kKvStages = kKeyStages + kValueStages;

  // Key tiles lie in shared memory as [kTileKeys / 8][kHeadDim / 64] 128-byte swizzle atoms of 8 rows, Q as
  // [kHeadDim / 64][64 / 8] for each warpgroup.
  static constexpr int kAtomBytes = 1024;
  static constexpr int kRowAtoms = kHeadDim / 64;
  static constexpr int kAtomRowBytes = kRowAtoms * kAtomBytes;  // of 8 keys
  static constexpr int kTileBytes = kTileKeys * kHeadDim * 2;
  static constexpr int kQueryColumnBytes = 64 * 128;  // of a warpgroup's rows
  static constexpr int kQueryWarpgroupBytes = 64 * kHeadDim * 2;
  static constexpr int kQueryBytes = kRows * kHeadDim * 2;

  // K and V have a ring each, or take turns in one ring, where they are read in turns.
  static constexpr bool kSharedRing = Config::kOverlap == Overlap::kInterWarpgroup;
  static constexpr int kFirstValueStage = kSharedRing ? 0 : kKeyStages;  // where V's ring begins in SharedStorage::kv
  using KeyState = std::conditional_t<kSharedRing, PipelineState<kKvStages, 0, 2>, PipelineState<kKeyStages>>;
  using ValueState = std::conditional_t<kSharedRing, PipelineState<kKvStages, 1, 2>, PipelineState<kValueStages>>;
  using QueryState = PipelineState<kQueryStages>;
  using TileState = PipelineState<kTileStages>;

  // A work tile that is not full takes less time where warpgroups compute independently of each other.
  static constexpr bool kShrinksTail = Config::kOverlap == Overlap::kInterWarpgroup;
  using Division = std::conditional_t<kShortPlan, ShortDivision<kRows>, PlainDivision>;  // of the plan
  using Scheduler = std::conditional_t<Config::kProducerWarpgroups == 0,
                                       PersistentFlatTileScheduler<kThreads, kRows, Config::kMaxSequences>,
                                       PersistentTileScheduler<kThreads, kRows, Config::kMaxSequences, Config::kClasses,
                                                               kTakesSomeSplits, kCarriesSplits, Division>>;
  using WarpScheduler = PersistentWarpTileScheduler<kRows, kShrinksTail, kLongestFirst, kCarriesSplits, Division>;
  using Rows = TileRows<FastDivisor>;

  // Key tiles of a warpgroup's rows: those that some row sees, and those that all rows see whole.
  struct KeyTileRange {
    int first, last;
    int whole_first, whole_last;
  };

  // A work tile, as the scheduler warp describes it to the other warps.
  struct alignas(8) TileStage {
    Rows rows;
    KeyTileRange warpgroups[kRowWarpgroups];
    int first_key_tile, last_key_tile;  // that some row of the work tile sees
    int key_tiles;                      // their number; 0: there are no more work tiles
    bool invalid_page;                  // a page number of the sequence is out of range; known at `checked`
    SplitMode mode;                     // of a KV split; else 0
    int64_t accum_row;                  // first row of its split accumulator
  };

  // What the CTA has of the splits before, of up to 64 rows: see OnlineSoftmax::AccumulateAndSpill.
  struct alignas(16) CtaAccumulators {
    float o_accum[64 * kHeadDim];
    float2 max_sum_accum[64];
  };
  struct Nothing {};

  struct SharedStorage {
    T q[kQueryStages][kRows * kHeadDim];
    T kv[kKvStages][kTileKeys * kHeadDim];
    float row_sums[2];  // written and never read: see TmaConsumer::ComputeIntraWarpgroup
    TileStage tiles[kTileStages];
    typename Scheduler::Storage scheduler;
    StageBarriers q_barriers[kQueryStages][kRowWarpgroups];
    StageBarriers kv_barriers[kKvStages];
    StageBarriers tile_barriers[kTileStages];
    StageBarriers checked_barriers[kTileStages];  // full: TileStage::invalid_page is known
    // Of Traits::kAlternates. Full: see TmaConsumer::Store; and a warpgroup has seen all of its work tile's keys, or
    // values, arrive.
    StageBarriers accumulated, keys_seen, values_seen;
    StageBarriers unmasked_values;  // full: a tile of V has arrived whose unseen rows must be cleared
    std::conditional_t<kSharedAccumulators, CtaAccumulators, Nothing> accumulators;
  };

  // Behind it, with a float8 cache: tiles as they are in the cache.
  static constexpr int kRawStages = 2;
  static constexpr int kRawTileBytes = kTileKeys * kHeadDim;
  struct alignas(128) RawTiles {
    uint8_t tiles[2][kRawStages][kRawTileBytes];  // of K, and of V
    StageBarriers barriers[2][kRawStages];
  };
  static constexpr int kRawTilesBegin = (static_cast<int>(sizeof(SharedStorage)) + 127) / 128 * 128;
  static constexpr int kSharedBytes =
      kFloat8Cache ? kRawTilesBegin + static_cast<int>(sizeof(RawTiles)) : static_cast<int>(sizeof(SharedStorage));
  static_assert(kHeadDim % 64 == 0 && kTileKeys % 16 == 0 && kTileKeys <= 256 && kSharedBytes <= 227 * 1024);
  static_assert(kTileBytes % kAtomBytes == 0 && kQueryBytes % kAtomBytes == 0);  // as the swizzle wants it

  template <bool kLarge>
  using DecodeTraitsOf = decode::WholeTilesTraits<kDecodeFormat, kHeadDim, kLarge>;
  static constexpr bool kDecodesLarge =
      sizeof(decode::WholeTilesStorage<DecodeTraitsOf<true>>) <= static_cast<size_t>(kSharedBytes);
  using DecodeTraits = DecodeTraitsOf<kDecodesLarge>;
  // A warp may still describe a work tile that the metadata no longer have when others begin with the only sequence.
  static_assert(!kTakesWholeTiles || sizeof(decode::WholeTilesStorage<DecodeTraits>) <= offsetof(SharedStorage, tiles));

  // Registers of a thread after setmaxnreg; together no more than the launch has allocated.
  static constexpr bool kTwoProducers = Config::kProducerWarpgroups == 2;
  static constexpr int kProducerRegisters = kConsumerWarpgroups == 3 ? 32
                                            : kHeadDim == 256        ? 40
                                            : kTwoProducers          ? 48
                                                                     : 56;
  static constexpr int kConsumerRegisters = kConsumerWarpgroups == 3 ? 160
                                            : kHeadDim == 256        ? 232
                                            : kTwoProducers          ? 208
                                                                     : 224;
  // At the launch. Of a small CTA so many that they leave room beside it for the combine kernels: its own, which has
  // then planned when it ends, and two CTAs of the decode path's, behind which it may wait.
  static constexpr int kLaunchRegisters = kConsumerWarpgroups == 1 ? 152 : 65536 / kThreads / 8 * 8;
  static_assert(kLaunchRegisters * kThreads >= 128 * (Config::kProducerWarpgroups * kProducerRegisters +
                                                      kConsumerWarpgroups * kConsumerRegisters) ||
                Config::kProducerWarpgroups == 0);
};

// ---- What all warps of a CTA know
template <typename Traits>
struct TmaCta {
  using SharedStorage = typename Traits::SharedStorage;
  using TileStage = typename Traits::TileStage;

  const TmaParams& params;
  const PagedAttentionParams& attention;
  char* const shared;             // SharedStorage, aligned to 1024 bytes
  const uint32_t shared_address;  // wgmma, TMA and barriers take 32-bit shared-memory addresses
  const int thread = static_cast<int>(threadIdx.x) % Traits::kWarpgroupThreads;  // in the warpgroup
  const int lane = static_cast<int>(threadIdx.x) % 32;

  const Pipeline<typename Traits::QueryState, Traits::kRowWarpgroups> query;  // a part for each warpgroup's rows
  const Pipeline<typename Traits::KeyState> keys;
  const Pipeline<typename Traits::ValueState> values;
  const Pipeline<typename Traits::TileState> tiles;
  const Pipeline<typename Traits::TileState> checked;

  __device__ TmaCta(const TmaParams& params, char* shared)
      : params(params),
        attention(params.attention),
        shared(shared),
        shared_address(SharedAddress(shared)),
        query{Address(offsetof(SharedStorage, q_barriers))},
        keys{Address(offsetof(SharedStorage, kv_barriers))},
        values{Address(offsetof(SharedStorage, kv_barriers) + Traits::kFirstValueStage * sizeof(StageBarriers))},
        tiles{Address(offsetof(SharedStorage, tile_barriers))},
        checked{Address(offsetof(SharedStorage, checked_barriers))} {}

  // One arrival for the warp.
  __device__ void Arrive(uint32_t barrier) const { ArriveFromWarp(barrier, lane); }
  __device__ uint32_t Address(size_t offset) const { return shared_address + static_cast<uint32_t>(offset); }
  // With a float8 cache: a stage of K's or V's raw tiles, and its barriers.
  __device__ uint32_t RawTile(bool is_values, int stage) const {
    return Address(Traits::kRawTilesBegin) + ((is_values ? Traits::kRawStages : 0) + stage) * Traits::kRawTileBytes;
  }
  __device__ uint32_t RawBarriers(bool is_values) const {
    return Address(Traits::kRawTilesBegin + offsetof(typename Traits::RawTiles, barriers)) +
           (is_values ? Traits::kRawStages : 0) * static_cast<int>(sizeof(StageBarriers));
  }
  __device__ SharedStorage& Storage() const { return *reinterpret_cast<SharedStorage*>(shared); }
  __device__ TileStage& Tile(typename Traits::TileState state) const { return Storage().tiles[state.stage]; }
  // Addresses of a stage's data.
  __device__ uint32_t Query(int stage) const {
    return Address(offsetof(SharedStorage, q)) + stage * Traits::kQueryBytes;
  }
  __device__ uint32_t Keys(int stage) const {
    return Address(offsetof(SharedStorage, kv)) + stage * Traits::kTileBytes;
  }
  __device__ uint32_t Values(int stage) const {
    return Address(offsetof(SharedStorage, kv) + Traits::kFirstValueStage * Traits::kTileBytes) +
           stage * Traits::kTileBytes;
  }
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_TRAITS_CUH_
