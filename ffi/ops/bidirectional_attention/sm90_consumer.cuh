// The consumer warpgroups of the sm_90a kernel (sm90.cuh): each computes 64 rows of the CTA's work tiles.
#ifndef XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_CONSUMER_CUH_
#define XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_CONSUMER_CUH_

#include <cstdint>
#include <type_traits>

#include "ffi/device/mbarrier.cuh"
#include "ffi/device/wgmma.cuh"
#include "ffi/ops/bidirectional_attention/sm90_traits.cuh"
#include "ffi/ops/bidirectional_attention/sm90_wgmma.cuh"
#include "ffi/ops/paged_attention/prefill/online_softmax.cuh"
#include "ffi/ops/paged_attention/prefill/pipeline.cuh"

namespace xla_gpu::bidirectional {

using prefill::LogitTransform;
using prefill::PackNumerators;

// Without scales of a cache or sinks.
__device__ inline LogitTransform TransformOf(const Sm90Params& params) {
  PagedAttentionParams attention{};
  attention.scale = params.scale;
  attention.soft_cap = params.soft_cap;
  return {attention, /*kv_head=*/0};
}

template <typename Traits>
struct Sm90Consumer {
  using T = typename Traits::Element;
  using KeyState = typename Traits::KeyState;
  using QueryState = typename Traits::QueryState;
  using TileState = typename Traits::TileState;
  using ValueState = typename Traits::ValueState;
  // Numerators up to 2^8 fit float16 and bfloat16.
  using Softmax = prefill::OnlineSoftmax</*kRowTiles=*/1, /*kRescaleThreshold=*/8, /*kTreeMask=*/false,
                                         /*kMaxOfThree=*/true>;
  static constexpr int kTileKeys = Traits::kTileKeys;
  static constexpr int kKeySteps = kTileKeys / 16;  // of the product with V
  static constexpr int kKeyTiles = kTileKeys / 8;   // accumulator tiles of 8 columns, as the next
  static constexpr int kDimTiles = Traits::kDim / 8;
  static constexpr int kWarpgroups = Traits::kWarpgroups;
  // Named barriers. kTurnBarrier + i: warpgroup i's turn to start products; kClearBarrier + i: its warps.
  static constexpr int kTurnBarrier = 1, kClearBarrier = kTurnBarrier + kWarpgroups;

  const Sm90Cta<Traits>& cta;
  const int warpgroup;  // of the consumers
  const int thread;     // of the warpgroup

  __device__ Sm90Consumer(const Sm90Cta<Traits>& cta, int warpgroup)
      : cta(cta),
        warpgroup(warpgroup),
        thread(static_cast<int>(threadIdx.x) - Traits::kFirstConsumer - warpgroup * Traits::kWarpgroupThreads) {}

  __device__ void Run() const {
    if constexpr (Traits::kSmall) {
      ComputeAlone();
    } else {
      ComputeInTurns();
    }
  }

 private:
  // ---- One warpgroup: scores, softmax and values of one key tile after the other. Other CTAs' overlap with them.
  __device__ void ComputeAlone() const {
    TileState work;
    QueryState query;
    KeyState ring;  // of V, too
    static_assert(!Traits::kSmall || Traits::kKeyStages == Traits::kValueStages);
    const LogitTransform transform = TransformOf(cta.params);
#pragma unroll 1
    for (;; work.Advance()) {
      cta.tiles.WaitFull(work);
      const WorkTile& tile = cta.Tile(work);
      int left = tile.key_tiles;
      if (left == 0) return;
      int position = tile.last_key_tile * kTileKeys;
      Softmax softmax(thread / 32 * 16);
      float o[1][kDimTiles][4];
      Clear(o[0]);
      cta.query.WaitFull(query);
#pragma unroll 1
      while (left > 0) {
        --left;
        const auto compute = [&](auto keys) {
          ComputeKeyTile<keys>(tile, transform, position, left == 0, query, &ring, &softmax, o);
        };
        // A sequence may end inside the first tile. Numerators of keys behind it would be zeros, which change no sum,
        // so they are left out: the bits are those of the other instance. (Of the tests the most frequent one first: in
        // other orders, the instance for head_dim 64 has no registers enough.)
        const int keys = tile.length - position;
        if (keys > (kTileKeys == 128 ? 96 : 64)) {
          compute(std::integral_constant<int, kTileKeys>());
        } else if (kTileKeys == 128 && keys > 64) {
          compute(std::integral_constant<int, kTileKeys == 128 ? 96 : 64>());
        } else if (keys > 32) {
          compute(std::integral_constant<int, 64>());
        } else {
          compute(std::integral_constant<int, 32>());
        }
        position -= kTileKeys;
      }
      query.Advance();
      Store(tile, softmax, transform, o[0]);
      cta.Arrive(cta.tiles.Empty(work));
    }
  }

  // The first kKeys keys of the key tile at `position`. `last`: of the work tile.
  template <int kKeys>
  __device__ void ComputeKeyTile(const WorkTile& tile, const LogitTransform& transform, int position, bool last,
                                 QueryState query, KeyState* ring, Softmax* softmax,
                                 float (&o)[1][kDimTiles][4]) const {
    float s[1][kKeys / 8][4];
    uint32_t p[kKeys / 16][4];
    cta.keys.WaitFull(*ring);
    WgmmaFence();
    StartScores(query.stage, ring->stage, s[0]);
    WgmmaCommit();
    WgmmaWait<0>();
    WgmmaFenceOperand(s[0]);
    cta.Arrive(cta.keys.Empty(*ring));
    if (last) cta.Arrive(cta.query.Empty(query));
    softmax->Update(tile, transform, position, NeedsMask(tile, position, kKeys), s);
    PackNumerators<T>(s[0], p);
    if (softmax->NeedsRescale()) softmax->Rescale(o);
    cta.values.WaitFull(*ring);
    ClearTail<kKeys>(tile.length - position, ring->stage);
    WgmmaFence();
    StartValues(ring->stage, p, o[0]);
    WgmmaCommit();
    WgmmaWait<0>();
    WgmmaFenceOperand(o[0]);
    cta.Arrive(cta.values.Empty(*ring));
    ring->Advance();
  }

  // ---- Several: the scores of each key tile beside the values of the one before, and the first scores of a work tile
  // beside the last values of the one before. Warpgroups take turns, so that softmax and products alternate.
  __device__ void ComputeInTurns() const {
    TileState work;
    QueryState query;
    KeyState key;
    ValueState value;
    const LogitTransform transform = TransformOf(cta.params);
    cta.tiles.WaitFull(work);
    int left = cta.Tile(work).key_tiles;  // whose scores have not been started
    if (left == 0) return;
    int position = cta.Tile(work).last_key_tile * kTileKeys;
    Softmax softmax(warpgroup * 64 + thread / 32 * 16);
    float o[1][kDimTiles][4];
    float s[1][kKeyTiles][4];
    uint32_t p[kKeySteps][4];
    Clear(o[0]);

    // ---- The first scores
    cta.query.WaitFull(query);
    cta.keys.WaitFull(key);
    WgmmaFence();
    StartScores(query.stage, key.stage, s[0]);
    WgmmaCommit();
    if (warpgroup == kWarpgroups - 1) PassTurn();
    WgmmaWait<0>();
    WgmmaFenceOperand(s[0]);
    cta.Arrive(cta.keys.Empty(key));
    key.Advance();
    if (--left == 0) cta.Arrive(cta.query.Empty(query));
    softmax.Update(cta.Tile(work), transform, position, NeedsMask(cta.Tile(work), position), s);
    PackNumerators<T>(s[0], p);
    int keys = cta.Tile(work).length - position;  // of the sequence, from the first whose numerators p holds on

    // ---- Scores of a key tile, and values of the one before
    TileState ended = work;
#pragma unroll 1
    while (true) {
      const bool ends = left == 0;  // p is of a work tile's last keys; the scores are the next one's first
      if (ends) {
        ended = work;
        work.Advance();
        query.Advance();
        cta.tiles.WaitFull(work);
        left = cta.Tile(work).key_tiles;
        if (left == 0) break;
        position = cta.Tile(work).last_key_tile * kTileKeys;
        cta.query.WaitFull(query);
      } else {
        position -= kTileKeys;
      }
      const bool mask = NeedsMask(cta.Tile(work), position);
      cta.keys.WaitFull(key);
      cta.values.WaitFull(value);
      ClearTail(keys, value.stage);
      WaitTurn();
      WgmmaFence();
      StartScores(query.stage, key.stage, s[0]);
      WgmmaCommit();
      StartValues(value.stage, p, o[0]);
      WgmmaCommit();
      PassTurn();
      WgmmaWait<1>();
      WgmmaFenceOperand(s[0]);
      cta.Arrive(cta.keys.Empty(key));
      key.Advance();
      if (--left == 0) cta.Arrive(cta.query.Empty(query));
      const Softmax before = softmax;
      if (ends) softmax.Reset();
      softmax.Update(cta.Tile(work), transform, position, mask, s);
      // Never read. Without this use the assembler moves the exponentials behind the wait that they are to overlap.
      softmax.StoreRowSums(cta.Storage().row_sums);
      WgmmaWait<0>();
      WgmmaFenceOperand(o[0]);
      cta.Arrive(cta.values.Empty(value));
      value.Advance();
      if (ends) {
        Store(cta.Tile(ended), before, transform, o[0]);
        cta.Arrive(cta.tiles.Empty(ended));
        Clear(o[0]);
      } else if (softmax.NeedsRescale()) {
        softmax.Rescale(o);
      }
      PackNumerators<T>(s[0], p);
      keys = cta.Tile(work).length - position;
    }

    // ---- The last values
    // One turn was passed before the first was waited for.
    if (warpgroup == 0) WaitTurn();
    cta.values.WaitFull(value);
    ClearTail(keys, value.stage);
    WgmmaFence();
    StartValues(value.stage, p, o[0]);
    WgmmaCommit();
    WgmmaWait<0>();
    WgmmaFenceOperand(o[0]);
    Store(cta.Tile(ended), softmax, transform, o[0]);
  }

  __device__ void WaitTurn() const { NamedBarrierSync(kTurnBarrier + warpgroup, 2 * Traits::kWarpgroupThreads); }
  __device__ void PassTurn() const {
    NamedBarrierArrive(kTurnBarrier + (warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1),
                       2 * Traits::kWarpgroupThreads);
  }

  // ---- Products
  // s = Q · Kᵀ, in the background.
  template <int kTiles>
  __device__ void StartScores(int query_stage, int key_stage, float (&s)[kTiles][4]) const {
    const uint64_t q = MakeSmemDescKMajor(cta.Query(query_stage) + warpgroup * 64 * 128);
    const uint64_t k = MakeSmemDescKMajor(cta.Keys(key_stage));
#pragma unroll
    for (int step = 0; step < Traits::kDim / 16; ++step) {
      WgmmaSS<T>(s, AdvanceSmemDesc(q, step / 4 * Traits::kQueryColumnBytes + step % 4 * 32),
                 AdvanceSmemDesc(k, step / 4 * Traits::kTileColumnBytes + step % 4 * 32), step > 0);
    }
  }

  // o += p · V, in the background.
  template <int kSteps>
  __device__ void StartValues(int stage, const uint32_t (&p)[kSteps][4], float (&o)[kDimTiles][4]) const {
    const uint64_t v = MakeSmemDescMnMajor(cta.Values(stage), Traits::kTileColumnBytes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) WgmmaRS<T>(o, p[step], AdvanceSmemDesc(v, step * 16 * 128));
  }

  // Where of kKeys rows of a tile of V only `keys` are of the sequence: clears the others, which may hold NaN that 0
  // would not hide. Each warpgroup clears all of them, so that none waits for another: they write the same.
  template <int kKeys = kTileKeys>
  __device__ void ClearTail(int keys, int stage) const {
    if (keys >= kKeys) return;
    const int vectors = (kKeys - keys) * 8;  // of a column of atoms
#pragma unroll 1
    for (int i = thread; i < vectors * Traits::kColumns; i += Traits::kWarpgroupThreads) {
      const int column = i / vectors;
      const uint32_t target =
          cta.Values(stage) + column * Traits::kTileColumnBytes + keys * 128 + (i - column * vectors) * 16;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(target), "r"(0) : "memory");
    }
    FenceProxyAsync();
    NamedBarrierSync(kClearBarrier + warpgroup, Traits::kWarpgroupThreads);
  }

  static __device__ void Clear(float (&o)[kDimTiles][4]) {
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[d][i] = 0.0f;
    }
  }

  static __device__ bool NeedsMask(const WorkTile& tile, int position, int keys = kTileKeys) {
    return position + keys - 1 > tile.first_row_last_key || position < tile.last_row_first_key;
  }

  // ---- Results
  // In vectors of 8 bytes, of which a quad's lanes write a whole sector of a row.
  __device__ void Store(const WorkTile& tile, const Softmax& softmax, const LogitTransform& transform,
                        const float (&o)[kDimTiles][4]) const {
    const Sm90Params& params = cta.params;
    const int lane = Softmax::OpaqueLane();
    const int quad_lane = lane % 4;
    const bool odd = quad_lane % 2 != 0;
    const int first_column = (odd ? 8 : 0) + quad_lane / 2 * 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = softmax.first_row + h * 8 + lane / 4;
      const bool in_tile = row < tile.count;
      const float factor = transform.NormalizeFast({softmax.state[0][h].max, softmax.RowSum(0, h)}, 0).factor;
      const int64_t token = tile.begin + tile.first_row + (in_tile ? row : 0);
      T* const out = static_cast<T*>(params.out) + (token * params.num_heads + tile.head) * params.head_dim;
#pragma unroll
      for (int d = 0; d < kDimTiles; d += 2) {
        const uint32_t low = Pack<T>(o[d][2 * h] * factor, o[d][2 * h + 1] * factor);
        const uint32_t high = Pack<T>(o[d + 1][2 * h] * factor, o[d + 1][2 * h + 1] * factor);
        const uint32_t got = __shfl_xor_sync(~0u, odd ? low : high, 1);
        const uint2 vec = odd ? make_uint2(got, high) : make_uint2(low, got);
        const int column = d * 8 + first_column;
        if (in_tile && column < params.head_dim) *reinterpret_cast<uint2*>(out + column) = vec;
      }
    }
  }
};

}  // namespace xla_gpu::bidirectional

#endif  // XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_CONSUMER_CUH_
