// Prefill attention in float16 and bfloat16 for sm_90a. One warpgroup copies tiles of K and V, page by page, into a
// ring in shared memory; two warpgroups compute, each for half of the tile's query rows. A warpgroup's scores of one
// tile run on the tensor cores together with the sum of values of the tile before, beneath the softmax; and the two
// warpgroups take turns, so that the softmax of one runs beneath the products of the other.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_CP_ASYNC_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_CP_ASYNC_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/wgmma.cuh"
#include "ffi/ops/paged_attention/prefill/online_softmax.cuh"
#include "ffi/ops/paged_attention/prefill/rows.cuh"
#include "ffi/ops/paged_attention/prefill/tile_scheduler.cuh"

// Only code for sm_90a has these instructions; compiled for anything else, the kernel is empty and never launched.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define XLA_GPU_HAS_WGMMA 1
#else
#define XLA_GPU_HAS_WGMMA 0
#endif

namespace xla_gpu::prefill {

// kDim: head_dim, rounded up to a multiple of 64; the rest of a row is zeros in shared memory. kKeys: keys of a tile.
// kKeyStages, kValueStages: tiles of K and of V in the ring. A tile of V is used a phase later than the K of its keys.
template <typename T, int kDim, int kKeys, int kKeyStages, int kValueStages>
struct CpAsyncKernelImpl {
  using Element = T;
  // The consumers look at all pages while the first copies are under way; copies check their own.
  static constexpr bool kChecksPages = true;
  static constexpr int kWarpgroupThreads = 128;
  static constexpr int kConsumers = 2;  // warpgroups that compute
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroupThreads;
  static constexpr int kRows = kConsumers * 64;
  static constexpr int kKeyTiles = kKeys / 8;
  static constexpr int kDimTiles = kDim / 8;
  static constexpr int kRowVectors = kDim / 8;  // 16-byte chunks of a row
  // Rows lie in slabs of 64 elements, as the tensor cores read them.
  static constexpr int kQueryColumnBytes = kRows * 128;
  static constexpr int kTileColumnBytes = kKeys * 128;
  static constexpr int kTileBytes = kKeys * kDim * 2;
  // A copying warp has kWarpKeys consecutive keys of a tile; its lanes have the chunks of kLaneKeys rows at a time.
  static constexpr int kWarpKeys = kKeys / 4;
  static constexpr int kLaneKeys = 32 / kRowVectors;

  // Shared memory, from the start: Q, K stages, V stages, a word for each consumer, barriers.
  static constexpr int kKeyStart = kRows * kDim * 2;
  static constexpr int kValueStart = kKeyStart + kKeyStages * kTileBytes;
  static constexpr int kSumStart = kValueStart + kValueStages * kTileBytes;
  static constexpr int kBarrierStart = kSumStart + kConsumers * kWarpgroupThreads * 4;
  static constexpr int kSharedBytes = kBarrierStart + 2 * (kKeyStages + kValueStages) * 8;

  // A place in a ring of stages, and how often the ring has been gone around, in its lowest bit.
  // kFirst: the number of the ring's first stage among all.
  template <int kStages, int kFirst>
  struct PipelineState {
    static constexpr int kFirstStage = kFirst;
    int stage = 0;
    uint32_t phase = 0;
    __device__ void Advance() {
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  };
  using KeyState = PipelineState<kKeyStages, 0>;
  using ValueState = PipelineState<kValueStages, kKeyStages>;

  using Scheduler = SingleTileScheduler<kThreads, kRows>;
  static_assert(sizeof(typename Scheduler::Storage) <= kSumStart);
  static_assert(kDim % 64 == 0 && kRowVectors <= 32 && kWarpKeys <= 32 && kSharedBytes <= 227 * 1024);

  // Registers of a thread, in place of the 168 that the launch gives each; together no more than an SM has.
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;

  const PagedAttentionParams& params;
  char* const shared;  // aligned to 1024 bytes
  const uint32_t shared_address;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;  // in the warpgroup

  __device__ CpAsyncKernelImpl(const PagedAttentionParams& params, char* shared)
      : params(params), shared(shared), shared_address(SharedAddress(shared)) {}

  // A stage's barriers: one for full, one for free.
  template <typename State>
  __device__ uint32_t Full(State place) const {
    return shared_address + kBarrierStart + (State::kFirstStage + place.stage) * 16;
  }
  template <typename State>
  __device__ uint32_t Empty(State place) const {
    return Full(place) + 8;
  }
  // Byte offset of a chunk of a row, in slabs of `slab` bytes.
  static __device__ int SwizzledOffset(int slab, int row, int chunk) {
    return chunk / 8 * slab + row * 128 + ((chunk ^ row) & 7) * 16;
  }

  __device__ void Run(const WorkTile& tile, const TileRows<>& rows) {
#if XLA_GPU_HAS_WGMMA
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kKeyStages + kValueStages; ++stage) {
        const uint32_t barrier = shared_address + kBarrierStart + stage * 16;
        InitBarrier(barrier, kWarpgroupThreads);
        InitBarrier(barrier + 8, kConsumers * 4);  // one arrival for each warp
      }
    }
    __syncthreads();
    // The same in all lanes of a warp, and known to the compiler to be.
    const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
    const int first_tile = rows.key_begin / kKeys;
    const int last_tile = (rows.key_end + kKeys - 1) / kKeys - 1;
    if (group == 0) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
      Produce(rows, first_tile, last_tile);
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
      Consume(tile, rows, group - 1, first_tile, last_tile);
    }
#endif
  }

 private:
  // ---- the warpgroup that copies
  // Where a warp's keys of a tile lie.
  struct KeyRows {
    int64_t offset;  // of key `lane`, in bytes from its kv head's first; 0 where it is not read
    uint32_t read;   // bit i: key i is seen by a row of this block, and its page exists
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
      // The next page number arrives while this tile's copies are under way.
      next = LookUp(rows, tile - 1);
      LoadTile(key_cache, kKeyStart, now, &key_state);
      if (tile != last_tile) LoadTile(value_cache, kValueStart, before, &value_state);
      before = now;
    }
    LoadTile(value_cache, kValueStart, before, &value_state);
    // A thread must not end before its copies.
    CommitAsync();
    WaitAsync<0>();
  }

  // Travels with the first tile of K.
  __device__ void LoadQuery(const TileRows<>& rows) const {
    const T* const query = static_cast<const T*>(params.query);
#pragma unroll 2
    for (int i = thread; i < kRows * kRowVectors; i += kWarpgroupThreads) {
      const int row = i / kRowVectors;
      const int chunk = i % kRowVectors;
      const bool valid = row < rows.count && chunk * 8 < params.head_dim;
      const T* source = valid ? query + rows.HeadRow(row) * params.head_dim + chunk * 8 : query;
      CopyAsync16(shared_address + SwizzledOffset(kQueryColumnBytes, row, chunk), source, valid);
    }
  }

  // Keys that are not read become zeros in shared memory, so that nothing which lies in unused slots takes part.
  __device__ KeyRows LookUp(const TileRows<>& rows, int tile) const {
    const int lane = thread % 32;
    const int position = tile * kKeys + thread / 32 * kWarpKeys + lane;
    int64_t offset = -1;
    if (lane < kWarpKeys && position >= rows.key_begin && position < rows.key_end) {
      offset = KeyOffset(params, rows.seq, position);
    }
    return {offset < 0 ? 0 : offset * 2, __ballot_sync(~0u, offset >= 0)};
  }

  // Starts the copy of a tile to the ring at `start`, as soon as there is room. `cache`: this lane's chunk of the kv
  // head's element (0, 0, head, 0).
  template <typename State>
  __device__ void LoadTile(const char* cache, int start, const KeyRows& keys, State* place) const {
    WaitBarrier(Empty(*place), place->phase ^ 1);
    constexpr uint32_t kAll = kWarpKeys == 32 ? ~0u : (1u << kWarpKeys % 32) - 1;
    if (keys.read == kAll && params.head_dim == kDim) {
      CopyTile</*kWhole=*/true>(cache, start + place->stage * kTileBytes, keys);
    } else {
      CopyTile</*kWhole=*/false>(cache, start + place->stage * kTileBytes, keys);
    }
    ArriveOnCpAsync(Full(*place));
    place->Advance();
  }

  template <bool kWhole>
  __device__ void CopyTile(const char* cache, int start, const KeyRows& keys) const {
    const int row = thread % 32 / kRowVectors;  // of the first kLaneKeys
    const int chunk = thread % kRowVectors;
    const bool in_row = chunk * 8 < params.head_dim;
    const uint32_t target =
        shared_address + start + SwizzledOffset(kTileColumnBytes, thread / 32 * kWarpKeys + row, chunk);
    constexpr int kSteps = kWarpKeys / kLaneKeys;
    constexpr int kBatch = 4;
    static_assert(kSteps % kBatch == 0);
#pragma unroll
    for (int first = 0; first < kSteps; first += kBatch) {
      // All of a batch's offsets before its copies, past which the compiler moves nothing; but not all batches' at
      // once, for which there are no registers.
      int source = first * kLaneKeys + row;
      asm volatile("" : "+r"(source));
      int64_t offsets[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) offsets[i] = __shfl_sync(~0u, keys.offset, source + i * kLaneKeys);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int rows_further = (first + i) * kLaneKeys;
        const bool read = kWhole || (in_row && (keys.read >> (rows_further + row) & 1) != 0);
        // The chunk's place in a row depends on the row's lowest three bits, of which `row` and `rows_further` share
        // none.
        CopyAsync16((target ^ (rows_further % 8 * 16)) + rows_further * 128, cache + offsets[i], read);
      }
    }
  }

  // ---- the warpgroups that compute
  __device__ void Consume(const WorkTile& tile, const TileRows<>& rows, int group, int first_tile, int last_tile) {
    const int warp = thread / 32;
    const LogitTransform transform(params, rows.kv_head);
    OnlineSoftmax<1> softmax(group * 64 + warp * 16);
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
      WaitBarrier(Full(key_state), key_state.phase);
      FenceProxyAsync();
      WgmmaFence();
      StartScores(group, key_state.stage, s[0]);
      WgmmaCommit();
      WgmmaWait<0>();
      WgmmaFenceOperand(s[0]);
      Release(Empty(key_state));
      key_state.Advance();
      softmax.Update(rows, transform, last_tile * kKeys, s);
      PackProbabilities(s[0], p);
      if (group == 1 && count > 1) NamedBarrierArrive(kTurnBarrier, kConsumerThreads);

      for (int i = 1; i < count; ++i) {
        WaitBarrier(Full(key_state), key_state.phase);
        WaitBarrier(Full(value_state), value_state.phase);
        FenceProxyAsync();
        NamedBarrierSync(kTurnBarrier + group, kConsumerThreads);
        WgmmaFence();
        StartScores(group, key_state.stage, s[0]);
        WgmmaCommit();
        StartValues(value_state.stage, p, o[0]);
        WgmmaCommit();
        // The other group's turn; nobody waits for the very last one.
        if (group == 0 || i + 1 < count) NamedBarrierArrive(kTurnBarrier + 1 - group, kConsumerThreads);
        WgmmaWait<1>();
        WgmmaFenceOperand(s[0]);
        Release(Empty(key_state));
        key_state.Advance();
        softmax.Update(rows, transform, (last_tile - i) * kKeys, s);
        // Nobody reads this; but the assembler would put off the exponentials until after the wait, which they are to
        // bridge.
        softmax.StoreRowSums(shared + kSumStart + consumer_thread * 4);
        WgmmaWait<0>();
        WgmmaFenceOperand(o[0]);
        Release(Empty(value_state));
        value_state.Advance();
        softmax.Rescale(o);
        PackProbabilities(s[0], p);
      }

      WaitBarrier(Full(value_state), value_state.phase);
      FenceProxyAsync();
      WgmmaFence();
      StartValues(value_state.stage, p, o[0]);
      WgmmaCommit();
      WgmmaWait<0>();
      WgmmaFenceOperand(o[0]);
    }
    // Results pass through the place of the group's own query rows, which all its warps have finished with.
    NamedBarrierSync(kWarpgroupBarrier + group, kWarpgroupThreads);
    if (invalid_page) {
      FillTileRows<T>(rows, params, static_cast<int>(consumer_thread) / 32, kConsumerThreads / 32, CUDART_NAN_F,
                      CUDART_NAN_F);
    } else {
      softmax.template Store<T>(params, rows, transform, o,
                                [&](int row, int d) { return shared + SwizzledOffset(kQueryColumnBytes, row, d); });
    }
  }

  __device__ void Release(uint32_t barrier) const {
    if (thread % 32 == 0) ArriveBarrier(barrier);
  }

  __device__ void StartScores(int group, int stage, float (&s)[kKeyTiles][4]) const {
    const uint32_t q = shared_address + group * 64 * 128;
    const uint32_t k = shared_address + kKeyStart + stage * kTileBytes;
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      WgmmaSS<T>(s, MakeSmemDescKMajor(q + step / 4 * kQueryColumnBytes + step % 4 * 32),
                 MakeSmemDescKMajor(k + step / 4 * kTileColumnBytes + step % 4 * 32), step > 0);
    }
  }

  __device__ void StartValues(int stage, const uint32_t (&p)[kKeyTiles / 2][4], float (&o)[kDimTiles][4]) const {
    const uint32_t v = shared_address + kValueStart + stage * kTileBytes;
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      WgmmaRS<T>(o, p[step], MakeSmemDescMnMajor(v + step * 16 * 128, kTileColumnBytes));
    }
  }

  // The layout of two tiles of scores side by side is that of the left operand of a product.
  static __device__ void PackProbabilities(const float (&s)[kKeyTiles][4], uint32_t (&p)[kKeyTiles / 2][4]) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      p[n / 2][n % 2 * 2] = Pack<T>(s[n][0], s[n][1]);
      p[n / 2][n % 2 * 2 + 1] = Pack<T>(s[n][2], s[n][3]);
    }
  }

  // Named barriers.
  static constexpr int kTurnBarrier = 1;       // and 2: a consumer's turn to start products
  static constexpr int kWarpgroupBarrier = 3;  // and 4: the warps of a consumer
};

template <typename Kernel>
__global__ void __launch_bounds__(XLA_GPU_HAS_WGMMA ? Kernel::kThreads : 32, 1)
    PrefillCpAsyncKernel(const __grid_constant__ PagedAttentionParams params) {
#if XLA_GPU_HAS_WGMMA
  extern __shared__ __align__(1024) char shared[];
  RunWorkTile<Kernel, typename Kernel::Element>(params, shared);
#endif
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_CP_ASYNC_CUH_
