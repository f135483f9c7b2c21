// The instances of the sm_90a kernel of bidirectional_attention (sm90.cuh): their configurations, and what follows from
// them: types, shared memory, registers.
#ifndef XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_TRAITS_CUH_
#define XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_TRAITS_CUH_

#include <cstddef>
#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/fast_divisor.h"
#include "ffi/device/tensor_map.cuh"
#include "ffi/ops/paged_attention/prefill/pipeline.cuh"

namespace xla_gpu::bidirectional {

// What the kernel takes. Tensor maps see [num_tokens][heads][head_dim], in boxes of 64 columns of one head.
struct Sm90Params {
  const int32_t* query_start_loc;
  const int32_t* num_seqs;
  void* out;
  int num_tokens;
  int num_heads;
  int head_dim;
  int max_seqs;
  int window;         // at most num_tokens, which hides nothing
  int thread_seqs;    // sequences of which a thread counts the row tiles: kThreads of them are max_seqs or more
  FastDivisor heads;  // num_heads
  FastDivisor group;  // query heads of a KV head
  float scale;
  float soft_cap;
  CUtensorMap q_map;                   // in boxes of 64 rows
  CUtensorMap k_map, v_map;            // of a whole key tile
  CUtensorMap k_tail_map, v_tail_map;  // of kTailRows keys, for a sequence's last key tile
};

// ---- Configurations
// All of a head_dim give the same bits: key tiles are the same, and so is what is done with each row.
// kWarpgroups: of consumers, 64 rows each. With one, several CTAs share an SM, and overlap with each other.
// Key tiles of 112 keys at head_dim 72 to 96 are those with which three warpgroups have registers enough.
template <int kColumns, int kConsumers>
struct Sm90Config {
  static constexpr int kDim = kColumns;  // head_dim, rounded up to this
  static constexpr int kWarpgroups = kConsumers;
  static constexpr bool kSmall = kConsumers == 1;
  static constexpr int kTileKeys = kColumns == 256 ? 80 : kColumns == 80 || kColumns == 96 ? 112 : 128;
  static constexpr int kQueryStages = kSmall || kColumns == 256 ? 1 : 2;
  static constexpr int kKeyStages = kColumns == 64               ? (kSmall ? 2 : 4)
                                    : kColumns == 128 && !kSmall ? 3
                                    : kColumns != 256 && kSmall  ? 1
                                                                 : 2;
  static constexpr int kValueStages = kColumns == 64 ? (kSmall ? 2 : 4) : kColumns != 256 && kSmall ? 1 : 2;
  static constexpr int kCtas = !kSmall || kColumns == 256 ? 1 : kColumns <= 80 ? 3 : 2;  // of an SM
};

// ---- Work tiles
// Rows [first_row, first_row + count) of a sequence and head, and the keys that they see. Has what OnlineSoftmax asks
// of its rows.
struct WorkTile {
  int begin;   // the sequence's first token
  int length;  // its tokens
  int first_row;
  int count;
  int head;
  int window;
  int first_row_last_key;  // all rows see the keys [last_row_first_key, first_row_last_key]
  int last_row_first_key;
  int last_key_tile;  // the first one to be computed
  int key_tiles;      // 0: there are no more work tiles

  __device__ int FirstKey(int position) const { return max(position - window + 1, 0); }
  __device__ int LastKey(int position) const { return position + min(length - 1 - position, window - 1); }

  // Of the keys, from the other members.
  __device__ void FindKeys(int tile_keys) {
    const int last_row = first_row + count - 1;
    first_row_last_key = LastKey(first_row);
    last_row_first_key = FirstKey(last_row);
    last_key_tile = LastKey(last_row) / tile_keys;
    key_tiles = last_key_tile - FirstKey(first_row) / tile_keys + 1;
  }

  // The keys [*first_key, *last_key] that a row sees; none if *last_key < 0.
  __device__ void VisibleKeys(int row, int* first_key, int* last_key) const {
    *last_key = row < count ? LastKey(first_row + row) : -1;
    *first_key = FirstKey(first_row + row);
  }
};

// ---- What follows from a configuration
template <typename T, typename Config>
struct Sm90Traits : Config {
  using Element = T;
  using Config::kDim;
  using Config::kKeyStages;
  using Config::kQueryStages;
  using Config::kSmall;
  using Config::kTileKeys;
  using Config::kValueStages;
  using Config::kWarpgroups;

  static constexpr int kWarpgroupThreads = 128;
  // A warp loads: the last one, or, where registers are moved between warpgroups, one of the first warpgroup.
  static constexpr int kFirstConsumer = kSmall ? 0 : kWarpgroupThreads;  // thread
  static constexpr int kProducerWarp = kSmall ? 4 : 0;
  static constexpr int kThreads = (kSmall ? 32 : kWarpgroupThreads) + kWarpgroups * kWarpgroupThreads;
  static constexpr int kRows = kWarpgroups * 64;  // of a work tile
  static constexpr int kTileStages = 4;           // work tiles that are known at a time
  static constexpr int kTailRows = kTileKeys % 32 == 0 ? 32 : 16;

  // Q and key tiles lie in shared memory as columns of 128-byte swizzle atoms: 64 elements wide, rows of 128 bytes.
  static constexpr int kColumns = (kDim + 63) / 64;
  static constexpr int kQueryColumnBytes = kRows * 128;
  static constexpr int kQueryBytes = kColumns * kQueryColumnBytes;
  static constexpr int kTileColumnBytes = kTileKeys * 128;
  static constexpr int kTileBytes = kColumns * kTileColumnBytes;
  static_assert(kDim % 16 == 0 && kTileKeys % kTailRows == 0 && kTailRows % 8 == 0);

  using QueryState = prefill::PipelineState<kQueryStages>;
  using KeyState = prefill::PipelineState<kKeyStages>;
  using ValueState = prefill::PipelineState<kValueStages>;
  using TileState = prefill::PipelineState<kTileStages>;

  struct SharedStorage {
    char q[kQueryStages][kQueryBytes];
    char k[kKeyStages][kTileBytes];
    char v[kValueStages][kTileBytes];
    WorkTile tiles[kTileStages];
    prefill::StageBarriers q_barriers[kQueryStages];
    prefill::StageBarriers k_barriers[kKeyStages];
    prefill::StageBarriers v_barriers[kValueStages];
    prefill::StageBarriers tile_barriers[kTileStages];
    unsigned first_tiles[kThreads];  // row tiles of the sequences before those of each thread
    unsigned warp_tiles[kThreads / 32];
    float row_sums[2];  // written and never read: see Sm90Consumer
  };
  static constexpr int kSharedBytes = static_cast<int>(sizeof(SharedStorage));
  static_assert(Config::kCtas * (kSharedBytes + 1024) <= 228 * 1024);

  // Registers of a thread after setmaxnreg; together no more than the launch has allocated.
  static constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : 232;
};

// ---- What all warps of a CTA know
template <typename Traits>
struct Sm90Cta {
  using SharedStorage = typename Traits::SharedStorage;

  const Sm90Params& params;
  char* const shared;             // SharedStorage, aligned to 1024 bytes
  const uint32_t shared_address;  // wgmma, TMA and barriers take 32-bit shared-memory addresses
  const int lane = static_cast<int>(threadIdx.x) % 32;

  const prefill::Pipeline<typename Traits::QueryState> query;
  const prefill::Pipeline<typename Traits::KeyState> keys;
  const prefill::Pipeline<typename Traits::ValueState> values;
  const prefill::Pipeline<typename Traits::TileState> tiles;

  __device__ Sm90Cta(const Sm90Params& params, char* shared)
      : params(params),
        shared(shared),
        shared_address(SharedAddress(shared)),
        query{Address(offsetof(SharedStorage, q_barriers))},
        keys{Address(offsetof(SharedStorage, k_barriers))},
        values{Address(offsetof(SharedStorage, v_barriers))},
        tiles{Address(offsetof(SharedStorage, tile_barriers))} {}

  __device__ uint32_t Address(size_t offset) const { return shared_address + static_cast<uint32_t>(offset); }
  __device__ SharedStorage& Storage() const { return *reinterpret_cast<SharedStorage*>(shared); }
  __device__ WorkTile& Tile(typename Traits::TileState state) const { return Storage().tiles[state.stage]; }
  // Addresses of a stage's data.
  __device__ uint32_t Query(int stage) const {
    return Address(offsetof(SharedStorage, q)) + stage * Traits::kQueryBytes;
  }
  __device__ uint32_t Keys(int stage) const { return Address(offsetof(SharedStorage, k)) + stage * Traits::kTileBytes; }
  __device__ uint32_t Values(int stage) const {
    return Address(offsetof(SharedStorage, v)) + stage * Traits::kTileBytes;
  }
  __device__ void Arrive(uint32_t barrier) const { prefill::ArriveFromWarp(barrier, lane); }
};

}  // namespace xla_gpu::bidirectional

#endif  // XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_TRAITS_CUH_
