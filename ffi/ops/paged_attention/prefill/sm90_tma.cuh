// Prefill attention in float16 and bfloat16 for sm_90a, for pages of whole groups of eight slots. As many blocks as the
// GPU has SMs work on tile after tile of query rows (prefill/persistent_tile_scheduler.cuh). In each, the copy engine
// brings tiles of K and V, page by page, into rings in shared memory (prefill/sm90_tma_producer.cuh), and warpgroups
// compute, 64 rows each. Softmax runs beneath products in one of two ways:
//  - Three warpgroups, each with one tile of keys at a time: the products of two bridge the softmax of the third. A
//    larger tile of rows reads K and V less often.
//  - Overlapped: a warpgroup's scores of one tile of keys run together with the sum of values of the tile before; the
//    warpgroups take turns; and the first scores of the next tile of rows run beside the last values of this one.
// Both do the same with each row, in the same order.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_CUH_

#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/wgmma.cuh"
#include "ffi/ops/paged_attention/prefill/online_softmax.cuh"
#include "ffi/ops/paged_attention/prefill/rows.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_cp_async.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_producer.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_traits.cuh"

namespace xla_gpu::prefill {

// For the parameters see TmaTraits. kOverlap: the second of the ways above.
template <typename T, int kDim, int kKeys, int kConsumers, bool kOverlap, int kQueryStages, int kKeyStages,
          int kValueStages, int kSequences = 1024, int kClasses = 256>
struct TmaKernelImpl : TmaProducer<TmaTraits<T, kDim, kKeys, kConsumers, /*kSharedRing=*/!kOverlap, kQueryStages,
                                             kKeyStages, kValueStages, kSequences, kClasses>> {
  using Copies = TmaProducer<TmaTraits<T, kDim, kKeys, kConsumers, /*kSharedRing=*/!kOverlap, kQueryStages, kKeyStages,
                                       kValueStages, kSequences, kClasses>>;
  using Copies::At;
  using Copies::Checked;
  using Copies::Copies;
  using Copies::Empty;
  using Copies::Full;
  using Copies::FullQuery;
  using Copies::kAtomRowBytes;
  using Copies::kBarrierStart;
  using Copies::kCheckRing;
  using Copies::kConsumerRegisters;
  using Copies::kDimTiles;
  using Copies::kKeyRing;
  using Copies::kKeyStart;
  using Copies::kKeyTiles;
  using Copies::kProducerRegisters;
  using Copies::kQueryBytes;
  using Copies::kQueryColumnBytes;
  using Copies::kQueryWarpgroupBytes;
  using Copies::kSchedulerStart;
  using Copies::kSingle;
  using Copies::kSumStart;
  using Copies::kTileBytes;
  using Copies::kTileRing;
  using Copies::kValueStart;
  using Copies::kWarpgroupThreads;
  using Copies::params;
  using Copies::Release;
  using Copies::shared;
  using Copies::shared_address;
  using Copies::thread;
  using Copies::tma;
  using typename Copies::KeyState;
  using typename Copies::QueryState;
  using typename Copies::Rows;
  using typename Copies::Scheduler;
  using typename Copies::TileState;
  using typename Copies::ValueState;
  using typename Copies::WarpgroupTiles;
  using typename Copies::WarpScheduler;

  __device__ void Run() {
#if XLA_GPU_HAS_WGMMA
    if (threadIdx.x / 32 == 3) InitBarriers();
    // All blocks wait, also those without a tile: when this kernel has ended, so has the one before. Behind the decode
    // path, which has waited for all that came before, they know by then whether they have one, and of those without
    // one block is enough to wait: the others make room for the kernel behind.
    const bool behind_decode = DecodeComesFirst(params);
    if (!behind_decode) WaitForPreviousKernel();
    AllowDependentLaunch();  // of the kernel that puts parts together, or of the decode path
    const bool few = params.max_seqs <= WarpScheduler::kSequences;
    WarpScheduler warp_scheduler(params, tma.group.divisor, tma.kv_heads, few);
    const Scheduler scheduler(params, tma.group.divisor, tma.kv_heads, tma.split_kv, !few,
                              *reinterpret_cast<typename Scheduler::Storage*>(shared + kSchedulerStart));
    const bool fill = few ? warp_scheduler.HasPaddingRows() : scheduler.HasPaddingRows();
    if (fill && blockIdx.y == 0) FillUnownedRows<T>(params, blockIdx.x, gridDim.x);
    const bool empty = few ? warp_scheduler.IsEmpty() : scheduler.IsEmpty();
    if (behind_decode && (!empty || (blockIdx.x == 0 && blockIdx.y == 0))) WaitForPreviousKernel();
    if (empty) return;
    __syncthreads();
    // The same in all lanes of a warp, and known to the compiler to be.
    const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
    if (group == 0) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
      int warp = __shfl_sync(~0u, thread / 32, 0);
      // NOTE: hidden from the compiler, which would make a table of addresses that has to come from memory first.
      const auto is_next = [&warp] {
        asm("" : "+r"(warp));
        return --warp < 0;
      };
      if (is_next()) {
        if (few && tma.split_kv.enabled) warp_scheduler.Split(tma.split_kv);
        this->FindTiles(
            [&](unsigned n, WorkTile* tile) { return few ? warp_scheduler.Find(n, tile) : scheduler.Find(n, tile); });
      } else if (is_next()) {
        this->template CopyTiles</*kValues=*/false>();
      } else if (is_next()) {
        this->template CopyTiles</*kValues=*/true>();
      } else {
        this->CopyQueries();
      }
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
      if constexpr (kOverlap) {
        Consume(group - 1);
      } else {
        ConsumeInOrder(group - 1);
      }
    }
#endif
  }

 private:
  using Softmax = OnlineSoftmax<1, 8>;

  // By one warp. Written out by one lane: with a lane for each, the compiler makes a loop over lanes of each step.
  __device__ void InitBarriers() const {
    constexpr int kConsumerWarps = kConsumers * 4;
    if (ElectOne()) {
      PrefetchTensorMap(tma.k_map);
      PrefetchTensorMap(tma.v_map);
      if (tma.query_by_tma) PrefetchTensorMap(tma.q_map);
#pragma unroll
      for (int ring = 0; ring <= kSingle; ++ring) {
        const uint32_t full = shared_address + kBarrierStart + ring * 16;
        InitBarrier(full, ring < kKeyRing ? 32 : 1);
        // Slots: also the three warps that copy.
        if (ring < kCheckRing) {
          InitBarrier(full + 8, ring < kKeyRing ? 4 : ring < kTileRing ? kConsumerWarps : kConsumerWarps + 3);
        }
      }
      FenceProxyAsync();
    }
    __syncwarp();
  }

  // Tiles of keys that only other warpgroups' rows see.
  __device__ void SkipTiles(int count, KeyState* key_state, ValueState* value_state) const {
#pragma unroll 1
    for (; count > 0; --count) {
      WaitBarrier(Full(*key_state), key_state->phase);
      Release(Empty(*key_state));
      key_state->Advance();
      WaitBarrier(Full(*value_state), value_state->phase);
      Release(Empty(*value_state));
      value_state->Advance();
    }
  }

  // Products of a tile of keys, its softmax, and the sum of its values, one after the other.
  __device__ void ConsumeInOrder(int group) const {
    TileState slot;
    QueryState query_state;
    KeyState key_state;
    ValueState value_state;
    const LogitTransform transform(params, /*kv_head=*/0);
    Softmax softmax(group * 64 + thread / 32 * 16);
    for (;; slot.Advance(), query_state.Advance()) {
      WaitBarrier(Full(slot), slot.phase);
      if (At(slot).tiles == 0) return;
      const WarpgroupTiles* const mine = &At(slot).groups[group];
      float o[1][kDimTiles][4];
      Clear(o[0]);
      softmax.Reset();
      SkipTiles(At(slot).last_tile - max(mine->last, mine->first - 1), &key_state, &value_state);
      WaitBarrier(FullQuery(query_state, group), query_state.phase);
      // Ordinary copies have written Q.
      if (!tma.query_by_tma) FenceProxyAsync();
      const int first = mine->first;
      if (mine->last >= first) WaitBarrier(Full(key_state), key_state.phase);
      for (int tile = mine->last; tile >= first; --tile) {
        float s[1][kKeyTiles][4];
        uint32_t p[kKeyTiles / 2][4];
        WgmmaFence();
        StartScores(group, query_state.stage, key_state.stage, s[0]);
        WgmmaCommit();
        // The values of the tile before have been waited for.
        if (tile < mine->last) {
          Release(Empty(value_state));
          value_state.Advance();
        }
        const bool mask = tile > mine->whole_last || tile < mine->whole_first;
        WgmmaWait<0>();
        WgmmaFenceOperand(s[0]);
        Release(Empty(key_state));
        key_state.Advance();
        if (tile == first) Release(FullQuery(query_state, group) + 8);
        softmax.UpdateMax(At(slot).rows, transform, tile * kKeys, mask, s);
        if (softmax.NeedsRescale()) softmax.Rescale(o);
        // The products with the first values run beneath the later exponentials.
        constexpr int kFirstPart = kKeys / 32;
        softmax.template Exponentials<0, kFirstPart * 2>(transform, s);
        PackProbabilities<0, kFirstPart>(s[0], p);
        WaitBarrier(Full(value_state), value_state.phase);
        WgmmaFence();
        StartValues<0, kFirstPart>(value_state.stage, p, o[0]);
        WgmmaCommit();
        softmax.template Exponentials<kFirstPart * 2, kKeyTiles>(transform, s);
        PackProbabilities<kFirstPart, kKeys / 16>(s[0], p);
        WgmmaFence();
        StartValues<kFirstPart, kKeys / 16>(value_state.stage, p, o[0]);
        WgmmaCommit();
        if (tile > first) WaitBarrier(Full(key_state), key_state.phase);
        WgmmaWait<0>();
        WgmmaFenceOperand(o[0]);
      }
      if (mine->last >= first) {
        Release(Empty(value_state));
        value_state.Advance();
      }
      SkipTiles(first - At(slot).first_tile, &key_state, &value_state);
      if (mine->last < first) Release(FullQuery(query_state, group) + 8);
      Finish(slot, softmax, transform, o);
    }
  }

  __device__ void Consume(int group) const {
    TileState slot;
    QueryState query_state;
    KeyState key_state;
    ValueState value_state;
    WaitBarrier(Full(slot), slot.phase);
    int left = At(slot).tiles;  // of keys, whose scores have not been started
    if (left == 0) return;
    int position = At(slot).last_tile * kKeys;

    // NOTE: caches of 16-bit elements have no scales, which alone depend on the kv head.
    const LogitTransform transform(params, /*kv_head=*/0);
    Softmax softmax(group * 64 + thread / 32 * 16);
    float o[1][kDimTiles][4];
    float s[1][kKeyTiles][4];
    uint32_t p[kKeyTiles / 2][4];
    Clear(o[0]);

    WaitBarrier(FullQuery(query_state, group), query_state.phase);
    // Ordinary copies have written Q.
    if (!tma.query_by_tma) FenceProxyAsync();
    WaitBarrier(Full(key_state), key_state.phase);
    WgmmaFence();
    StartScores(group, query_state.stage, key_state.stage, s[0]);
    WgmmaCommit();
    if (group == kConsumers - 1) PassTurn(group);
    WgmmaWait<0>();
    WgmmaFenceOperand(s[0]);
    Release(Empty(key_state));
    key_state.Advance();
    if (--left == 0) Release(FullQuery(query_state, group) + 8);
    softmax.Update(At(slot).rows, transform, position, NeedsMask(slot, position), s);
    PackProbabilities(s[0], p);

    TileState ended = slot;
    for (;;) {
      const bool ends = left == 0;  // p is of a tile of rows' last keys, the scores of the next one's first
      if (ends) {
        ended = slot;
        slot.Advance();
        query_state.Advance();
        WaitBarrier(Full(slot), slot.phase);
        left = At(slot).tiles;
        if (left == 0) break;
        position = At(slot).last_tile * kKeys;
        WaitBarrier(FullQuery(query_state, group), query_state.phase);
        // Ordinary copies have written Q.
        if (!tma.query_by_tma) FenceProxyAsync();
      } else {
        position -= kKeys;
      }
      const bool mask = NeedsMask(slot, position);
      WaitBarrier(Full(key_state), key_state.phase);
      WaitBarrier(Full(value_state), value_state.phase);
      if (kConsumers > 1) NamedBarrierSync(kTurnBarrier + group, 2 * kWarpgroupThreads);
      WgmmaFence();
      StartScores(group, query_state.stage, key_state.stage, s[0]);
      WgmmaCommit();
      StartValues(value_state.stage, p, o[0]);
      WgmmaCommit();
      PassTurn(group);
      WgmmaWait<1>();
      WgmmaFenceOperand(s[0]);
      Release(Empty(key_state));
      key_state.Advance();
      if (--left == 0) Release(FullQuery(query_state, group) + 8);
      const Softmax before = softmax;
      if (ends) softmax.Reset();
      softmax.Update(At(slot).rows, transform, position, mask, s);
      // Nobody reads this; but the assembler would put off the exponentials until after the wait, which they are to
      // bridge.
      softmax.StoreRowSums(shared + kSumStart);
      WgmmaWait<0>();
      WgmmaFenceOperand(o[0]);
      Release(Empty(value_state));
      value_state.Advance();
      if (ends) {
        Finish(ended, before, transform, o);
        Clear(o[0]);
      } else if (softmax.NeedsRescale()) {
        softmax.Rescale(o);
      }
      PackProbabilities(s[0], p);
    }
    // One turn was passed before the first.
    if (kConsumers > 1 && group == 0) NamedBarrierSync(kTurnBarrier, 2 * kWarpgroupThreads);
    WaitBarrier(Full(value_state), value_state.phase);
    WgmmaFence();
    StartValues(value_state.stage, p, o[0]);
    WgmmaCommit();
    WgmmaWait<0>();
    WgmmaFenceOperand(o[0]);
    Finish(ended, softmax, transform, o);
  }

  __device__ void PassTurn(int group) const {
    if (kConsumers > 1)
      NamedBarrierArrive(kTurnBarrier + (group + 1 == kConsumers ? 0 : group + 1), 2 * kWarpgroupThreads);
  }

  __device__ bool NeedsMask(TileState slot, int position) const {
    const Rows& rows = At(slot).rows;
    return position + kKeys - 1 > rows.first_row_last_key || position < rows.last_row_first_key;
  }

  __device__ void Finish(TileState slot, Softmax softmax, const LogitTransform& transform,
                         float (&o)[1][kDimTiles][4]) const {
    WaitBarrier(Checked(slot), slot.phase);
    const bool invalid_page = At(slot).invalid_page;
    const SplitMode mode = At(slot).mode;
    if (mode != 0) {
      softmax.AccumulateAndSpill(At(slot).rows, transform, tma.accumulators, At(slot).accumulators, mode, invalid_page,
                                 o);
    }
    if ((mode & kSpill) == 0) softmax.template StoreFromRegisters<T>(params, At(slot).rows, transform, o, invalid_page);
    Release(Empty(slot));
  }

  static __device__ void Clear(float (&o)[kDimTiles][4]) {
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[d][i] = 0.0f;
    }
  }

  __device__ void StartScores(int group, int query_stage, int key_stage, float (&s)[kKeyTiles][4]) const {
    const uint64_t q = MakeSmemDescKMajor(shared_address + query_stage * kQueryBytes + group * kQueryWarpgroupBytes);
    const uint64_t k = MakeSmemDescKMajor(shared_address + kKeyStart + key_stage * kTileBytes, kAtomRowBytes);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      WgmmaSS<T>(s, AdvanceSmemDesc(q, step / 4 * kQueryColumnBytes + step % 4 * 32),
                 AdvanceSmemDesc(k, step / 4 * 1024 + step % 4 * 32), step > 0);
    }
  }

  // Of the steps [kFirst, kEnd) of 16 keys.
  template <int kFirst = 0, int kEnd = kKeys / 16>
  __device__ void StartValues(int stage, const uint32_t (&p)[kKeyTiles / 2][4], float (&o)[kDimTiles][4]) const {
    const uint64_t v = MakeSmemDescMnMajor(shared_address + kValueStart + stage * kTileBytes, 1024, kAtomRowBytes);
#pragma unroll
    for (int step = kFirst; step < kEnd; ++step) {
      WgmmaRS<T>(o, p[step], AdvanceSmemDesc(v, step * 2 * kAtomRowBytes));
    }
  }

  // The layout of two tiles of scores side by side is that of the left operand of a product.
  template <int kFirst = 0, int kEnd = kKeys / 16>
  static __device__ void PackProbabilities(const float (&s)[kKeyTiles][4], uint32_t (&p)[kKeyTiles / 2][4]) {
#pragma unroll
    for (int n = kFirst * 2; n < kEnd * 2; ++n) {
      p[n / 2][n % 2 * 2] = Pack<T>(s[n][0], s[n][1]);
      p[n / 2][n % 2 * 2 + 1] = Pack<T>(s[n][2], s[n][3]);
    }
  }

  static constexpr int kTurnBarrier = 1;  // and on: a consumer's turn to start products
};

template <typename Kernel>
__global__ void __launch_bounds__(XLA_GPU_HAS_WGMMA ? Kernel::kRegisterThreads : 32, 1)
    PrefillTmaKernel(const __grid_constant__ TmaParams params) {
#if XLA_GPU_HAS_WGMMA
  extern __shared__ __align__(1024) char shared[];
  Kernel(params, shared).Run();
#endif
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_CUH_
