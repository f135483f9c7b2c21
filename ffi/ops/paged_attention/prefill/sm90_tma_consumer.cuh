// The consumer warpgroups of the TMA prefill kernel (sm90_tma.cuh): each computes 64 rows of the CTA's work tiles.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_CONSUMER_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_CONSUMER_CUH_

#include <cstdint>
#include <type_traits>

#include "ffi/device/mbarrier.cuh"
#include "ffi/device/wgmma.cuh"
#include "ffi/ops/paged_attention/prefill/late_soft_cap.cuh"
#include "ffi/ops/paged_attention/prefill/online_softmax.cuh"
#include "ffi/ops/paged_attention/prefill/pipeline.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_epilogue.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_traits.cuh"

namespace xla_gpu::prefill {

template <typename Traits>
struct TmaConsumer {
  using T = typename Traits::Element;
  using TValue = typename Traits::ValueElement;
  using KeyState = typename Traits::KeyState;
  using QueryState = typename Traits::QueryState;
  using TileState = typename Traits::TileState;
  using ValueState = typename Traits::ValueState;
  using Epilogue = TmaEpilogue<Traits>;
  // Numerators up to 2^8 fit float16 and bfloat16.
  using Softmax = std::conditional_t<Traits::kHeadDim == 256, LateSoftCap<Traits::kTreeMask>,
                                     OnlineSoftmax</*kRowTiles=*/1, /*kRescaleThreshold=*/8, Traits::kTreeMask,
                                                   /*kMaxOfThree=*/!Traits::kFloat8Cache>>;
  static constexpr int kTileKeys = Traits::kTileKeys;
  static constexpr int kKeySteps = kTileKeys / 16;  // of the product with V
  static constexpr int kKeyTiles = kTileKeys / 8;   // accumulator tiles of 8 columns, as the next
  static constexpr int kDimTiles = Traits::kHeadDim / 8;
  static constexpr int kWarpgroups = Traits::kConsumerWarpgroups;
  static constexpr int kRowWarpgroups = Traits::kRowWarpgroups;
  static constexpr int kTurnBarrier = 1;  // named barriers 1 + i: warpgroup i's turn to start products

  const TmaCta<Traits>& cta;
  const int warpgroup;  // of the consumers

  __device__ TmaConsumer(const TmaCta<Traits>& cta, int warpgroup) : cta(cta), warpgroup(warpgroup) {}

  __device__ void Run() const {
    if constexpr (Traits::kOverlap == Overlap::kIntraWarpgroup) {
      ComputeIntraWarpgroup();
    } else {
      ComputeInterWarpgroup();
    }
  }

 protected:
  // ---- Overlap::kInterWarpgroup: scores, softmax and values of one key tile after the other
  __device__ void ComputeInterWarpgroup() const {
    TileState work;
    QueryState query;
    KeyState key;
    ValueState value;
    TileTransform transform(cta.attention, /*kv_head=*/0);
    Softmax softmax(warpgroup * 64 + cta.thread / 32 * 16);
    for (;; work.Advance(), query.Advance()) {
      cta.tiles.WaitFull(work);
      if (cta.Tile(work).key_tiles == 0) return;
      if constexpr (Traits::kFloat8Cache) transform = TransformOf(work);
      const typename Traits::KeyTileRange* const mine = &cta.Tile(work).warpgroups[warpgroup];
      float o[1][kDimTiles][4];
      Clear(o[0]);
      softmax.Reset();
      SkipKeyTiles(cta.Tile(work).last_key_tile - max(mine->last, mine->first - 1), &key, &value);
      WaitQuery(query);
      const int first = mine->first;
      if (mine->last >= first) WaitKeys(key);
      for (int tile = mine->last; tile >= first; --tile) {
        float s[1][kKeyTiles][4];
        uint32_t p[kKeyTiles / 2][4];
        WgmmaFence();
        StartScores(query.stage, warpgroup, key.stage, s[0]);
        WgmmaCommit();
        // The wait at the loop's end was for the products with the values of the tile before.
        if (tile < mine->last) {
          cta.Arrive(cta.values.Empty(value));
          value.Advance();
        }
        const bool mask = tile > mine->whole_last || tile < mine->whole_first;
        WgmmaWait<0>();
        WgmmaFenceOperand(s[0]);
        cta.Arrive(cta.keys.Empty(key));
        key.Advance();
        if (tile == first) cta.Arrive(cta.query.Empty(query, warpgroup));
        softmax.UpdateMax(cta.Tile(work).rows, transform, tile * kTileKeys, mask, s);
        if (softmax.NeedsRescale()) softmax.Rescale(o);
        // The products with the first values overlap with the other exponentials.
        constexpr int kFirstSteps = kTileKeys / 32;
        softmax.template Exponentials<0, kFirstSteps * 2>(transform, s);
        PackNumerators<TValue, 0, kFirstSteps>(s[0], p);
        cta.values.WaitFull(value);
        FenceCopies();
        WgmmaFence();
        StartValues<0, kFirstSteps>(value.stage, p, o[0]);
        WgmmaCommit();
        softmax.template Exponentials<kFirstSteps * 2, kKeyTiles>(transform, s);
        PackNumerators<TValue, kFirstSteps, kKeySteps>(s[0], p);
        WgmmaFence();
        StartValues<kFirstSteps, kKeySteps>(value.stage, p, o[0]);
        WgmmaCommit();
        if (tile > first) WaitKeys(key);
        WgmmaWait<0>();
        WgmmaFenceOperand(o[0]);
      }
      if (mine->last >= first) {
        cta.Arrive(cta.values.Empty(value));
        value.Advance();
      }
      SkipKeyTiles(first - cta.Tile(work).first_key_tile, &key, &value);
      if (mine->last < first) cta.Arrive(cta.query.Empty(query, warpgroup));
      uint32_t accumulated = 0;
      Epilogue{cta}.Store(work, warpgroup, softmax, transform, &accumulated, o);
    }
  }

  // ---- Overlap::kIntraWarpgroup: the scores of each key tile beside the values of the one before
  // With Traits::kAlternates a work tile of up to 64 rows is computed by one warpgroup, in turns: the other one begins
  // the next work tile meanwhile.
  __device__ void ComputeIntraWarpgroup() const {
    TileState work;
    QueryState query;
    KeyState key;
    ValueState value;
    uint32_t next_alone = 0;   // the warpgroup that takes the next work tile of up to 64 rows; parity of their number
    bool was_alone = true;     // the work tile before had up to 64 rows
    uint32_t accumulated = 0;  // parity of the work tiles whose accumulators this CTA has stored: see TmaEpilogue
    do {
      cta.tiles.WaitFull(work);
      int left = cta.Tile(work).key_tiles;  // whose scores have not been started
      if (left == 0) return;
      const bool alone = Traits::kAlternates && (kRowWarpgroups == 1 || cta.Tile(work).rows.count <= 64);
      if constexpr (Traits::kAlternates) {
        // Both have ended the work tiles before, and their turns, where this one or the one before is of both.
        if (kRowWarpgroups > 1 && !(alone && was_alone)) {
          NamedBarrierSync(kTurnBarrier + kWarpgroups, kWarpgroups * Traits::kWarpgroupThreads);
        }
        was_alone = alone;
        if (alone) {
          next_alone ^= 1;
          if (static_cast<int>(next_alone) == warpgroup) {  // the other one takes it
            key.Skip(left);
            value.Skip(left);
            query.Advance();
            const SplitMode mode = cta.Tile(work).mode;
            if (Epilogue::StoresForThisCta(mode)) accumulated ^= 1;
            // NOTE: an arrival does not wait for loads in front of it, but for its address, which depends on this one.
            cta.Arrive(cta.tiles.Empty(work) + mode / (2 * kCrossCta));
            work.Advance();
            continue;
          }
        }
      }
      const int part = alone ? 0 : warpgroup;  // of the work tile's rows
      int position = cta.Tile(work).last_key_tile * kTileKeys;

      TileTransform transform(cta.attention, /*kv_head=*/0);
      if constexpr (Traits::kFloat8Cache) transform = TransformOf(work);
      Softmax softmax(part * 64 + cta.thread / 32 * 16);
      float o[1][kDimTiles][4];
      float s[1][kKeyTiles][4];
      uint32_t p[kKeyTiles / 2][4];
      Clear(o[0]);

      // ---- The first scores
      // NOTE: a wait by parity must not begin before the rounds of the ring before have ended: those that the other
      // warpgroup reads, of K and of Q.
      if (alone) WaitBarrier(KeysSeen(), next_alone);
      WaitQuery(query, alone);
      WaitKeys(key);
      if (alone && left == 1) cta.Arrive(KeysSeen());
      WgmmaFence();
      StartScores(query.stage, part, key.stage, s[0]);
      WgmmaCommit();
      if (!alone && warpgroup == kWarpgroups - 1) PassTurn();
      WgmmaWait<0>();
      WgmmaFenceOperand(s[0]);
      Release(cta.keys.Empty(key), alone);
      key.Advance();
      if (--left == 0) ReleaseQuery(query, alone);
      softmax.Update(cta.Tile(work).rows, transform, position, NeedsMask(work, position), s);
      PackNumerators<TValue>(s[0], p);
      if (alone) WaitBarrier(ValuesSeen(), next_alone);

      // ---- Scores of a key tile, and values of the one before
      TileState ended = work;
      for (;;) {
        const bool ends = left == 0;  // p is of a work tile's last keys; the scores are the next one's first
        if (ends) {
          ended = work;
          work.Advance();
          query.Advance();
          if (alone) break;
          cta.tiles.WaitFull(work);
          left = cta.Tile(work).key_tiles;
          if (left == 0 || (Traits::kAlternates && cta.Tile(work).rows.count <= 64)) break;
          position = cta.Tile(work).last_key_tile * kTileKeys;
          if constexpr (Traits::kFloat8Cache) transform = TransformOf(work);
          WaitQuery(query, alone);
        } else {
          position -= kTileKeys;
        }
        const bool mask = NeedsMask(work, position);
        cta.keys.WaitFull(key);
        if (alone && left == 1) cta.Arrive(KeysSeen());
        cta.values.WaitFull(value);
        FenceCopies();
        if (!alone) WaitTurn();
        WgmmaFence();
        StartScores(query.stage, part, key.stage, s[0]);
        WgmmaCommit();
        StartValues(value.stage, p, o[0]);
        WgmmaCommit();
        if (!alone) PassTurn();
        WgmmaWait<1>();
        WgmmaFenceOperand(s[0]);
        Release(cta.keys.Empty(key), alone);
        key.Advance();
        if (--left == 0) ReleaseQuery(query, alone);
        const Softmax before = softmax;
        if (ends) softmax.Reset();
        softmax.Update(cta.Tile(work).rows, transform, position, mask, s);
        // Never read. Without this use the assembler moves the exponentials behind the wait that they are to overlap.
        softmax.StoreRowSums(cta.Storage().row_sums);
        WgmmaWait<0>();
        WgmmaFenceOperand(o[0]);
        Release(cta.values.Empty(value), alone);
        value.Advance();
        if (ends) {
          Epilogue{cta}.Store(ended, part, before, transform, &accumulated, o);
          Clear(o[0]);
        } else if (softmax.NeedsRescale()) {
          softmax.Rescale(o);
        }
        PackNumerators<TValue>(s[0], p);
      }

      // ---- The last values
      // One turn was passed before the first was waited for.
      if (!alone && warpgroup == 0) WaitTurn();
      cta.values.WaitFull(value);
      FenceCopies();
      if (alone) cta.Arrive(ValuesSeen());
      WgmmaFence();
      StartValues(value.stage, p, o[0]);
      WgmmaCommit();
      WgmmaWait<0>();
      WgmmaFenceOperand(o[0]);
      if constexpr (Traits::kAlternates) {
        Release(cta.values.Empty(value), alone);
        value.Advance();
      }
      Epilogue{cta}.Store(ended, part, softmax, transform, &accumulated, o);
    } while (Traits::kAlternates);
  }

  // Caches of 16-bit elements have no scales, so that their transform is the same for all kv heads.
  using TileTransform = std::conditional_t<Traits::kFloat8Cache, LogitTransform, const LogitTransform>;
  __device__ LogitTransform TransformOf(TileState work) const { return {cta.attention, cta.Tile(work).rows.kv_head}; }

  // ---- Barriers
  __device__ uint32_t KeysSeen() const { return cta.Address(offsetof(typename Traits::SharedStorage, keys_seen)); }
  __device__ uint32_t ValuesSeen() const { return cta.Address(offsetof(typename Traits::SharedStorage, values_seen)); }
  // `alone`: this warpgroup reads all of the work tile's rows.
  __device__ void WaitQuery(QueryState query, bool alone = false) const {
    cta.query.WaitFull(query, alone ? 0 : warpgroup);
    if (Traits::kAlternates && kRowWarpgroups > 1 && alone) cta.query.WaitFull(query, 1);
    // cp.async writes Q through the generic proxy.
    if (!cta.params.query_by_tma) FenceProxyAsync();
  }

  __device__ void WaitKeys(KeyState key) const {
    cta.keys.WaitFull(key);
    FenceCopies();
  }
  // Before wgmma reads what has arrived: cp.async writes K and V through the generic proxy.
  static __device__ void FenceCopies() {
    if constexpr (Traits::kAnyPages) FenceProxyAsync();
  }

  __device__ void ReleaseQuery(QueryState query, bool alone) const {
    cta.Arrive(cta.query.Empty(query, alone ? 0 : warpgroup));
    if (Traits::kAlternates && kRowWarpgroups > 1 && alone) cta.Arrive(cta.query.Empty(query, 1));
  }
  // A stage of K or V.
  __device__ void Release(uint32_t empty, bool alone) const {
    if (Traits::kAlternates && kRowWarpgroups > 1) {
      ArriveFromWarp(empty, cta.lane, alone ? kRowWarpgroups : 1);
    } else {
      cta.Arrive(empty);
    }
  }

  // Key tiles that only other warpgroups' rows see.
  __device__ void SkipKeyTiles(int count, KeyState* key, ValueState* value) const {
#pragma unroll 1
    for (; count > 0; --count) {
      cta.keys.WaitFull(*key);
      cta.Arrive(cta.keys.Empty(*key));
      key->Advance();
      cta.values.WaitFull(*value);
      cta.Arrive(cta.values.Empty(*value));
      value->Advance();
    }
  }

  __device__ void WaitTurn() const {
    if (kWarpgroups > 1) NamedBarrierSync(kTurnBarrier + warpgroup, 2 * Traits::kWarpgroupThreads);
  }
  __device__ void PassTurn() const {
    if (kWarpgroups > 1) {
      NamedBarrierArrive(kTurnBarrier + (warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1),
                         2 * Traits::kWarpgroupThreads);
    }
  }

  // ---- Products
  // s = Q · Kᵀ, in the background.
  __device__ void StartScores(int query_stage, int part, int key_stage, float (&s)[kKeyTiles][4]) const {
    const uint64_t q = MakeSmemDescKMajor(cta.Query(query_stage) + part * Traits::kQueryWarpgroupBytes);
    const uint64_t k = MakeSmemDescKMajor(cta.Keys(key_stage), Traits::kAtomRowBytes);
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
      WgmmaSS<T>(s, AdvanceSmemDesc(q, step / 4 * Traits::kQueryColumnBytes + step % 4 * 32),
                 AdvanceSmemDesc(k, step / 4 * Traits::kAtomBytes + step % 4 * 32), step > 0);
    }
  }

  // o += p · V over the key steps [kFirst, kEnd), in the background.
  template <int kFirst = 0, int kEnd = kKeySteps>
  __device__ void StartValues(int stage, const uint32_t (&p)[kKeyTiles / 2][4], float (&o)[kDimTiles][4]) const {
    const uint64_t v = MakeSmemDescMnMajor(cta.Values(stage), Traits::kAtomBytes, Traits::kAtomRowBytes);
#pragma unroll
    for (int step = kFirst; step < kEnd; ++step) {
      WgmmaRS<TValue>(o, p[step], AdvanceSmemDesc(v, step * 2 * Traits::kAtomRowBytes));
    }
  }

  static __device__ void Clear(float (&o)[kDimTiles][4]) {
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[d][i] = 0.0f;
    }
  }

  // ---- Mask
  __device__ bool NeedsMask(TileState work, int position) const {
    const typename Traits::Rows& rows = cta.Tile(work).rows;
    return position + kTileKeys - 1 > rows.first_row_last_key || position < rows.last_row_first_key;
  }
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_CONSUMER_CUH_
