// Prefill attention in float16 and bfloat16 for sm_90a with cp.async: any page size, any head_dim that is a multiple
// of 8; of those that the TMA kernel (sm90_tma.cuh) does not take, or where the driver makes no tensor maps. In a CTA
// one producer warpgroup copies tiles of K and V, key by key, into rings of stages in shared memory; two consumer
// warpgroups compute, each half of the work tile's rows. A warpgroup's scores of one key tile overlap with the values
// of the tile before, and the two warpgroups take turns, so that the softmax of one overlaps with the products of the
// other.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_CP_ASYNC_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_CP_ASYNC_CUH_

#include <cstddef>
#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/wgmma.cuh"
#include "ffi/ops/paged_attention/prefill/online_softmax.cuh"
#include "ffi/ops/paged_attention/prefill/pipeline.cuh"
#include "ffi/ops/paged_attention/prefill/rows.cuh"
#include "ffi/ops/paged_attention/prefill/tile_scheduler.cuh"

namespace xla_gpu::prefill {

// kDim: head_dim, rounded up to a multiple of 64; the rest of a row is zeros in shared memory.
template <typename T, int kDim>
struct CpAsyncTraits {
  using Element = T;
  static constexpr int kHeadDim = kDim;
  static constexpr int kTileKeys = kDim == 256 ? 64 : 128;  // keys of a key tile
  // A tile of V is used one iteration later than the K of its keys.
  static constexpr int kKeyStages = kDim == 64 ? 3 : 2;
  static constexpr int kValueStages = kDim == 64 ? 4 : 3;
  static constexpr int kConsumerWarpgroups = 2;
  // Registers of a thread after setmaxnreg, instead of the launch's 168; together no more than an SM has.
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
};

// A CTA's computation of a work tile.
template <typename Traits>
struct CpAsyncWorkTile {
  using T = typename Traits::Element;
  // The consumers check the page table while the first copies are in flight; copies check their own pages.
  static constexpr bool kChecksPages = true;
  static constexpr int kDim = Traits::kHeadDim;
  static constexpr int kKeys = Traits::kTileKeys;
  static constexpr int kKeyStages = Traits::kKeyStages;
  static constexpr int kValueStages = Traits::kValueStages;
  static constexpr int kConsumers = Traits::kConsumerWarpgroups;
  static constexpr int kWarpgroupThreads = 128;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroupThreads;
  static constexpr int kRows = kConsumers * 64;
  static constexpr int kKeyTiles = kKeys / 8;  // accumulator tiles of 8 columns, as the next
  static constexpr int kDimTiles = kDim / 8;
  static constexpr int kRowVectors = kDim / 8;  // 16-byte vectors of a row
  // Q and key tiles lie in shared memory as columns of 128-byte swizzle atoms: 64 elements wide, rows of 128 bytes.
  static constexpr int kQueryColumnBytes = kRows * 128;
  static constexpr int kTileColumnBytes = kKeys * 128;
  static constexpr int kTileBytes = kKeys * kDim * 2;
  // A producer warp copies kWarpKeys consecutive keys of a tile; its lanes copy the vectors of kLaneKeys rows at a
  // time.
  static constexpr int kWarpKeys = kKeys / 4;
  static constexpr int kLaneKeys = 32 / kRowVectors;

  struct SharedStorage {
    T q[kRows * kDim];
    T k[kKeyStages][kKeys * kDim];
    T v[kValueStages][kKeys * kDim];
    float row_sums[kConsumers * kWarpgroupThreads];  // written and never read: see Consume
    StageBarriers k_barriers[kKeyStages];
    StageBarriers v_barriers[kValueStages];
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);

  using KeyState = PipelineState<kKeyStages>;
  using ValueState = PipelineState<kValueStages>;
  using Scheduler = SingleTileScheduler<kThreads, kRows>;
  static_assert(sizeof(typename Scheduler::Storage) <= offsetof(SharedStorage, row_sums));  // it comes first
  static_assert(kDim % 64 == 0 && kRowVectors <= 32 && kWarpKeys <= 32 && kSharedBytes <= 227 * 1024);

  const PagedAttentionParams& params;
  char* const shared;  // SharedStorage, aligned to 1024 bytes
  const uint32_t shared_address;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;  // in the warpgroup
  const Pipeline<KeyState> key_pipeline;
  const Pipeline<ValueState> value_pipeline;

  __device__ CpAsyncWorkTile(const PagedAttentionParams& params, char* shared)
      : params(params),
        shared(shared),
        shared_address(SharedAddress(shared)),
        key_pipeline{Address(offsetof(SharedStorage, k_barriers))},
        value_pipeline{Address(offsetof(SharedStorage, v_barriers))} {}

  __device__ SharedStorage& Storage() const { return *reinterpret_cast<SharedStorage*>(shared); }
  __device__ uint32_t Address(size_t offset) const { return shared_address + static_cast<uint32_t>(offset); }

  __device__ void Run(const WorkTile& tile, const TileRows<>& rows) {
#if XLA_GPU_HAS_WGMMA
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kKeyStages + kValueStages; ++stage) {
        const uint32_t full = key_pipeline.barriers + stage * static_cast<int>(sizeof(StageBarriers));
        InitBarrier(full, kWarpgroupThreads);
        InitBarrier(full + offsetof(StageBarriers, empty), kConsumers * 4);  // one arrival for each warp
      }
    }
    __syncthreads();
    // By a shuffle, so that the compiler knows it to be uniform in a warp.
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
    const int first_tile = rows.key_begin / kKeys;
    const int last_tile = (rows.key_end + kKeys - 1) / kKeys - 1;
    if (warpgroup == 0) {
      DecreaseRegisters<Traits::kProducerRegisters>();
      Produce(rows, first_tile, last_tile);
    } else {
      IncreaseRegisters<Traits::kConsumerRegisters>();
      Consume(tile, rows, warpgroup - 1, first_tile, last_tile);
    }
#endif
  }

 private:
  // ---- The producer warpgroup
  // Where a warp's keys of a tile lie.
  struct KeyRows {
    int64_t offset;  // of key `lane`, in bytes from its kv head's first; 0 where it is not read
    uint32_t read;   // bit i: a row of this CTA sees key i, and its page number is valid
  };

  __device__ void Produce(const TileRows<>& rows, int first_tile, int last_tile) {
    if (last_tile < first_tile) return;
    const char* const key_cache = HeadStart(params, params.k_cache, rows.kv_head) + thread % kRowVectors * 16;
    const char* const value_cache = HeadStart(params, params.v_cache, rows.kv_head) + thread % kRowVectors * 16;
    LoadQuery(rows);
    KeyRows before{}, now, next = LookUp(rows, last_tile);
    KeyState key_state;
    ValueState value_state;
    // K of a tile, then V of the one before: the order in which they are used.
    for (int tile = last_tile; tile >= first_tile; --tile) {
      now = next;
      // The next page number arrives while this tile's copies are started.
      next = LookUp(rows, tile - 1);
      LoadTile(key_cache, key_pipeline, offsetof(SharedStorage, k), now, &key_state);
      if (tile != last_tile) LoadTile(value_cache, value_pipeline, offsetof(SharedStorage, v), before, &value_state);
      before = now;
    }
    LoadTile(value_cache, value_pipeline, offsetof(SharedStorage, v), before, &value_state);
    // A thread must not exit before its copies have completed.
    CommitAsync();
    WaitAsync<0>();
  }

  // Completes with the first tile of K, whose arrival follows.
  __device__ void LoadQuery(const TileRows<>& rows) const {
    const T* const query = static_cast<const T*>(params.query);
#pragma unroll 2
    for (int i = thread; i < kRows * kRowVectors; i += kWarpgroupThreads) {
      const int row = i / kRowVectors;
      const int vec = i % kRowVectors;
      const bool valid = row < rows.count && vec * 8 < params.head_dim;
      const T* source = valid ? query + rows.HeadRow(row) * params.head_dim + vec * 8 : query;
      CopyAsync16(shared_address + SwizzledOffset(kQueryColumnBytes, row, vec), source, valid);
    }
  }

  // Keys that are not read become zeros in shared memory, so that the contents of unused slots take no part.
  __device__ KeyRows LookUp(const TileRows<>& rows, int tile) const {
    const int lane = thread % 32;
    const int position = tile * kKeys + thread / 32 * kWarpKeys + lane;
    int64_t offset = -1;
    if (lane < kWarpKeys && position >= rows.key_begin && position < rows.key_end) {
      offset = KeyOffset(params, rows.seq, position);
    }
    return {offset < 0 ? 0 : offset * 2, __ballot_sync(~0u, offset >= 0)};
  }

  // Starts the copy of a key tile as soon as its stage is empty. `cache`: this lane's vector of the kv head's element
  // (0, 0, head, 0). `ring`: offset of the ring's first stage in SharedStorage.
  template <typename State>
  __device__ void LoadTile(const char* cache, const Pipeline<State>& pipeline, size_t ring, const KeyRows& keys,
                           State* state) const {
    pipeline.WaitEmpty(*state);
    const int start = static_cast<int>(ring) + state->stage * kTileBytes;
    constexpr uint32_t kAll = kWarpKeys == 32 ? ~0u : (1u << kWarpKeys % 32) - 1;
    if (keys.read == kAll && params.head_dim == kDim) {
      CopyTile</*kWhole=*/true>(cache, start, keys);
    } else {
      CopyTile</*kWhole=*/false>(cache, start, keys);
    }
    ArriveOnCpAsync(pipeline.Full(*state));
    state->Advance();
  }

  template <bool kWhole>
  __device__ void CopyTile(const char* cache, int start, const KeyRows& keys) const {
    const int row = thread % 32 / kRowVectors;  // of the first kLaneKeys
    const int vec = thread % kRowVectors;
    const bool in_row = vec * 8 < params.head_dim;
    const uint32_t target =
        shared_address + start + SwizzledOffset(kTileColumnBytes, thread / 32 * kWarpKeys + row, vec);
    constexpr int kSteps = kWarpKeys / kLaneKeys;
    constexpr int kBatch = 4;
    static_assert(kSteps % kBatch == 0);
#pragma unroll
    for (int first = 0; first < kSteps; first += kBatch) {
      // All of a batch's offsets come before its copies, across which the compiler moves nothing. Not all batches' at
      // once: there are no registers for them.
      int source = first * kLaneKeys + row;
      asm volatile("" : "+r"(source));
      int64_t offsets[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) offsets[i] = __shfl_sync(~0u, keys.offset, source + i * kLaneKeys);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int rows_further = (first + i) * kLaneKeys;
        const bool read = kWhole || (in_row && (keys.read >> (rows_further + row) & 1) != 0);
        // The swizzle depends on the row's lowest three bits, of which `row` and `rows_further` share none.
        CopyAsync16((target ^ (rows_further % 8 * 16)) + rows_further * 128, cache + offsets[i], read);
      }
    }
  }

  // ---- The consumer warpgroups
  __device__ void Consume(const WorkTile& tile, const TileRows<>& rows, int warpgroup, int first_tile, int last_tile) {
    const int warp = thread / 32;
    const LogitTransform transform(params, rows.kv_head);
    OnlineSoftmax<1> softmax(warpgroup * 64 + warp * 16);
    float o[1][kDimTiles][4] = {};
    const int count = last_tile - first_tile + 1;
    constexpr int kConsumerThreads = kConsumers * kWarpgroupThreads;
    const unsigned consumer_thread = threadIdx.x - kWarpgroupThreads;
    const bool invalid_page = NamedBarrierSyncOr(kTurnBarrier, kConsumerThreads,
                                                 FindsInvalidPage(params, tile, consumer_thread, kConsumerThreads));
    if (count > 0) {
      float s[1][kKeyTiles][4];
      uint32_t p[kKeyTiles / 2][4];

      KeyState key_state;
      ValueState value_state;
      key_pipeline.WaitFull(key_state);
      FenceProxyAsync();
      WgmmaFence();
      StartScores(warpgroup, key_state.stage, s[0]);
      WgmmaCommit();
      WgmmaWait<0>();
      WgmmaFenceOperand(s[0]);
      Arrive(key_pipeline.Empty(key_state));
      key_state.Advance();
      softmax.Update(rows, transform, last_tile * kKeys, s);
      PackNumerators<T>(s[0], p);
      if (warpgroup == 1 && count > 1) NamedBarrierArrive(kTurnBarrier, kConsumerThreads);

      for (int i = 1; i < count; ++i) {
        key_pipeline.WaitFull(key_state);
        value_pipeline.WaitFull(value_state);
        FenceProxyAsync();
        NamedBarrierSync(kTurnBarrier + warpgroup, kConsumerThreads);
        WgmmaFence();
        StartScores(warpgroup, key_state.stage, s[0]);
        WgmmaCommit();
        StartValues(value_state.stage, p, o[0]);
        WgmmaCommit();
        // The other warpgroup's turn; nobody waits for the last one.
        if (warpgroup == 0 || i + 1 < count) NamedBarrierArrive(kTurnBarrier + 1 - warpgroup, kConsumerThreads);
        WgmmaWait<1>();
        WgmmaFenceOperand(s[0]);
        Arrive(key_pipeline.Empty(key_state));
        key_state.Advance();
        softmax.Update(rows, transform, (last_tile - i) * kKeys, s);
        // Never read. Without this use the assembler moves the exponentials behind the wait, which they are to overlap
        // with.
        softmax.StoreRowSums(Storage().row_sums + consumer_thread);
        WgmmaWait<0>();
        WgmmaFenceOperand(o[0]);
        Arrive(value_pipeline.Empty(value_state));
        value_state.Advance();
        softmax.Rescale(o);
        PackNumerators<T>(s[0], p);
      }

      value_pipeline.WaitFull(value_state);
      FenceProxyAsync();
      WgmmaFence();
      StartValues(value_state.stage, p, o[0]);
      WgmmaCommit();
      WgmmaWait<0>();
      WgmmaFenceOperand(o[0]);
    }
    // Results are staged where the warpgroup's own query rows were, which all its warps have read.
    NamedBarrierSync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
    if (invalid_page) {
      FillTileRows<T>(rows, params, static_cast<int>(consumer_thread) / 32, kConsumerThreads / 32, CUDART_NAN_F,
                      CUDART_NAN_F);
    } else {
      softmax.template Store<T>(params, rows, transform, o,
                                [&](int row, int d) { return shared + SwizzledOffset(kQueryColumnBytes, row, d); });
    }
  }

  // One arrival for the warp. It has converged: the wait for a wgmma comes before.
  __device__ void Arrive(uint32_t barrier) const {
    if (thread % 32 == 0) ArriveBarrier(barrier);
  }

  __device__ void StartScores(int warpgroup, int stage, float (&s)[kKeyTiles][4]) const {
    const uint32_t q = shared_address + warpgroup * 64 * 128;
    const uint32_t k = Address(offsetof(SharedStorage, k)) + stage * kTileBytes;
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      WgmmaSS<T>(s, MakeSmemDescKMajor(q + step / 4 * kQueryColumnBytes + step % 4 * 32),
                 MakeSmemDescKMajor(k + step / 4 * kTileColumnBytes + step % 4 * 32), step > 0);
    }
  }

  __device__ void StartValues(int stage, const uint32_t (&p)[kKeyTiles / 2][4], float (&o)[kDimTiles][4]) const {
    const uint32_t v = Address(offsetof(SharedStorage, v)) + stage * kTileBytes;
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      WgmmaRS<T>(o, p[step], MakeSmemDescMnMajor(v + step * 16 * 128, kTileColumnBytes));
    }
  }

  // Named barriers.
  static constexpr int kTurnBarrier = 1;       // and 2: a consumer warpgroup's turn to start products
  static constexpr int kWarpgroupBarrier = 3;  // and 4: the warps of a consumer warpgroup
};

template <typename Traits>
__global__ void __launch_bounds__(XLA_GPU_HAS_WGMMA ? CpAsyncWorkTile<Traits>::kThreads : 32, 1)
    PrefillCpAsyncKernel(const __grid_constant__ PagedAttentionParams params) {
#if XLA_GPU_HAS_WGMMA
  extern __shared__ __align__(1024) char shared[];
  RunWorkTile<CpAsyncWorkTile<Traits>, typename Traits::Element>(params, shared);
#endif
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_CP_ASYNC_CUH_
