// The consumer warpgroups of the sm_90a kernel for few rows (sm90_few_rows.cuh). Each computes every second key tile,
// with a softmax of its own, and all columns of the values; at the end of a work tile they exchange halves. Products
// are transposed: keys, and columns of values, are the 64 rows of a wgmma, query rows its columns.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_SM90_FEW_ROWS_CONSUMER_CUH_
#define XLA_GPU_OPS_MLA_ATTENTION_SM90_FEW_ROWS_CONSUMER_CUH_

#include <math_constants.h>

#include <cstdint>

#include "ffi/device/attention_state.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/device/wgmma.cuh"
#include "ffi/device/wgmma_narrow.cuh"
#include "ffi/ops/mla_attention/sm90_few_rows_results.cuh"
#include "ffi/ops/mla_attention/sm90_few_rows_traits.cuh"
#include "ffi/ops/mla_attention/sm90_wgmma.cuh"
#include "ffi/ops/paged_attention/prefill/pipeline.cuh"

namespace xla_gpu::mla {

template <typename T>
class FewRowsConsumer {
 public:
  using Traits = FewRowsTraits;
  using PartState = Traits::PartState;

  __device__ FewRowsConsumer(const FewRowsCta& cta, int warpgroup)
      : cta_(cta), params_(cta.params), at_(PlaceOf(cta, warpgroup)) {}

  __device__ void Run() {
    TileState work;
#pragma unroll 1
    for (;;) {
      cta_.tiles.WaitFull(work);
      const WorkTile& tile = cta_.Tile(work);
      if (tile.kind == WorkTile::kEnd) return;
      PageCheck<2> pages(params_, tile, at_.thread);
      Accumulators o;
      Compute(tile, o);
      const bool wrong = pages.IsWrong(Traits::kGroupBarrier + at_.warpgroup);
      FewRowsResults<T>(cta_, at_).Store(tile, wrong, max_, sum_, o);
      cta_.Arrive(cta_.tiles.Empty(work));
      work.Advance();
    }
  }

 private:
  static constexpr int kBlocks = Traits::kBlocks;
  static constexpr int kDimTiles = Traits::kDimTiles;
  static constexpr int kGroupBarrier = Traits::kGroupBarrier;
  // The last part of a key tile whose stage had a part of the key tile three before: the last one of that.
  static constexpr int kSharedPart = Traits::kStages - 2 * kTileParts - 1;
  static_assert(kSharedPart >= 0 && kSharedPart < kTileParts);
  using Accumulators = FewRowsAccumulators;
  using Rows = FewRowsOfThread;

  static __device__ FewRowsThread PlaceOf(const FewRowsCta& cta, int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    return {warpgroup, thread, __shfl_sync(~0u, thread / 32, 0), cta.lane / 4, cta.lane % 4 * 2};
  }

  const FewRowsCta& cta_;
  const Sm90Params& params_;
  const FewRowsThread at_;
  QueryState query_;
  unsigned keys_before_ = 0;  // key tiles of all work tiles before this one

  // Of the key tiles of this warpgroup. The maxima are the same in all threads that have the row, sums are of the
  // thread's numerators.
  Rows max_;
  Rows sum_;

  __device__ PartState State(int i, int part) const {
    const unsigned position = (keys_before_ + i) * kTileParts + part;
    PartState state;
    state.stage = static_cast<int>(position % Traits::kStages);
    state.phase = position / Traits::kStages & 1;
    return state;
  }

  // ---- A work tile
  __device__ void Compute(const WorkTile& tile, Accumulators& o) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        max_[n][j] = -CUDART_INF_F;
        sum_[n][j] = 0.0f;
      }
#pragma unroll
      for (int m = 0; m < kDimTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[m][n][i] = 0.0f;
      }
    }
    const int count = tile.key_tiles;
    if (count == 0) return;
    if (at_.warpgroup < count) {
      cta_.query.WaitFull(query_);
#pragma unroll 1
      for (int i = at_.warpgroup; i < count; i += 2) ComputeKeyTile(tile, i, o);
    } else {
      cta_.Arrive(cta_.query.Empty(query_));
    }
    query_.Advance();
    keys_before_ += count;
  }

  __device__ void ComputeKeyTile(const WorkTile& tile, int i, Accumulators& o) {
    float s[kBlocks][4];
    Scores(i, s);
    if (i + 2 >= tile.key_tiles) cta_.Arrive(cta_.query.Empty(query_));
    Softmax(tile, i, s, o);
    StoreNumerators(s);
    ClearTail(tile, i);
    FenceProxyAsync();
    NamedBarrierSync(kGroupBarrier + at_.warpgroup, 128);
    AddValues(i, o);
  }

  // s = K · Qᵀ. Even and odd steps have accumulators of their own, since each waits for the one before.
  __device__ void Scores(int i, float (&s)[kBlocks][4]) const {
    float odd[kBlocks][4];
    const uint64_t query = MakeSmemDescKMajor(cta_.Query());
    // A stage's parts belong to one warpgroup or to the other, and a wait for a parity cannot tell a round from the one
    // two before it. So first the other warpgroup must have given back what lay here: the last of it, behind the rest.
    cta_.parts.WaitEmpty(State(i, kSharedPart));
#pragma unroll
    for (int part = 0; part < kTileParts; ++part) {
      const PartState state = State(i, part);
      cta_.parts.WaitFull(state);
      WgmmaFence();
      const uint64_t keys = MakeSmemDescKMajor(cta_.Part(state), kPartRowBytes);
#pragma unroll
      for (int step = 0; step < kPartColumns / 16; ++step) {
        const uint64_t k = AdvanceSmemDesc(keys, step / 4 * kAtomBytes + step % 4 * 32);
        const uint64_t q =
            AdvanceSmemDesc(query, (part * kPartAtoms + step / 4) * Traits::kColumnBytes + step % 4 * 32);
        WgmmaNarrow<T>(step % 2 == 0 ? s : odd, k, q, part > 0 || step > 1);
      }
    }
    WgmmaCommit();
    WgmmaWait<0>();
    WgmmaFenceOperand(s);
    WgmmaFenceOperand(odd);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] += odd[n][e];
    }
  }

  // Turns scores into numerators, and rescales the results so far to their maximum. Contains a barrier of the
  // warpgroup, behind which none of its wgmmas still reads numerators.
  __device__ void Softmax(const WorkTile& tile, int i, float (&s)[kBlocks][4], Accumulators& o) {
    const int first_key = (tile.first_key_tile + i) * kTileKeys;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] *= params_.scale_log2;
    }
    if (first_key + kTileKeys - 1 > LastKey(tile, 0)) {
      const int key = first_key + at_.warp * 16 + at_.group;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int last_key = LastKey(tile, min(n * 8 + at_.column + j, tile.rows - 1));
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (key + h * 8 > last_key) s[n][h * 2 + j] = -CUDART_INF_F;
          }
        }
      }
    }
    float(&warp_max)[4][kFewRows] = cta_.Storage().warp_max[at_.warpgroup];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      float largest[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        largest[j] = fmaxf(s[n][j], s[n][2 + j]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          largest[j] = fmaxf(largest[j], __shfl_xor_sync(~0u, largest[j], step));
        }
      }
      if (at_.group == 0) {
        *reinterpret_cast<float2*>(&warp_max[at_.warp][n * 8 + at_.column]) = make_float2(largest[0], largest[1]);
      }
    }
    NamedBarrierSync(kGroupBarrier + at_.warpgroup, 128);
    Rows rescale;
    bool rescales = false;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      float largest[2] = {-CUDART_INF_F, -CUDART_INF_F};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 pair = *reinterpret_cast<const float2*>(&warp_max[w][n * 8 + at_.column]);
        largest[0] = fmaxf(largest[0], pair.x);
        largest[1] = fmaxf(largest[1], pair.y);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float before = max_[n][j];
        if (largest[j] > before + kRescaleThreshold) max_[n][j] = largest[j];
        const float shift = max_[n][j] == -CUDART_INF_F ? 0.0f : max_[n][j];
        rescale[n][j] = before == max_[n][j] ? 1.0f : Exp2(before - shift);
        rescales |= rescale[n][j] != 1.0f;
        s[n][j] = Exp2(s[n][j] - shift);
        s[n][2 + j] = Exp2(s[n][2 + j] - shift);
        sum_[n][j] = sum_[n][j] * rescale[n][j] + (s[n][j] + s[n][2 + j]);
      }
    }
    if (!__any_sync(~0u, rescales)) return;
#pragma unroll
    for (int m = 0; m < kDimTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[m][n][e] *= rescale[n][e % 2];
      }
    }
  }
  // The last key that a row sees.
  __device__ int LastKey(const WorkTile& tile, int row) const {
    return tile.offset + static_cast<int>(params_.heads.Divide(static_cast<uint32_t>(tile.sequence_row + row)));
  }

  // As rows of 64 keys: matrices of 8 keys and 8 query rows, transposed.
  __device__ void StoreNumerators(const float (&s)[kBlocks][4]) const {
    // Lane l has the address of row l % 8 of matrix l / 8 of four: (n, h) of two blocks.
    const int row = cta_.lane / 16 * 8 + cta_.lane % 8, vector = at_.warp * 2 + cta_.lane / 8 % 2;
    const uint32_t address = cta_.Numerators(at_.warpgroup) + row * 128 + ((vector ^ row) & 7) * 16;
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      StoreMatrix4Transposed(address + n * 8 * 128, Pack<T>(s[n][0], s[n][1]), Pack<T>(s[n][2], s[n][3]),
                             Pack<T>(s[n + 1][0], s[n + 1][1]), Pack<T>(s[n + 1][2], s[n + 1][3]));
    }
  }
  static __device__ void StoreMatrix4Transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
  }

  // Clears the latents that no row sees, which may hold NaN that 0 would not hide.
  __device__ void ClearTail(const WorkTile& tile, int i) const {
    const int keys = tile.key_end - (tile.first_key_tile + i) * kTileKeys;
    if (keys >= kTileKeys) return;
#pragma unroll 1
    for (int part = 0; part < kTileParts; ++part) {
      const uint32_t address = cta_.Part(State(i, part));
      // From the first of its 8 keys on.
#pragma unroll 1
      for (int vector = keys / 8 * (kPartRowBytes / 16) + at_.thread; vector < kPartBytes / 16; vector += 128) {
        const int key = vector * 16 / kPartRowBytes * 8 + vector / 8 % 8;
        if (key < keys) continue;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address + vector * 16), "r"(0) : "memory");
      }
    }
  }

  // o += Vᵀ · numeratorsᵀ of key tile i.
  __device__ void AddValues(int i, Accumulators& o) const {
    const uint64_t numerators = MakeSmemDescKMajor(cta_.Numerators(at_.warpgroup));
    PartState states[kTileParts];
    WgmmaFence();
#pragma unroll
    for (int part = 0; part < kTileParts; ++part) {
      states[part] = State(i, part);
      const uint64_t values = MakeSmemDescMnMajor(cta_.Part(states[part]), kAtomBytes, kPartRowBytes);
#pragma unroll
      for (int step = 0; step < kTileKeys / 16; ++step) {
#pragma unroll
        for (int m = part * kPartAtoms; m < (part + 1) * kPartAtoms && m < kDimTiles; ++m) {
          WgmmaMnMajorA<T>(o[m], AdvanceSmemDesc(values, m % kPartAtoms * kAtomBytes + step * 2 * kPartRowBytes),
                           AdvanceSmemDesc(numerators, step * 32));
        }
      }
      WgmmaCommit();
    }
    WgmmaWait<2>();
    cta_.Arrive(cta_.parts.Empty(states[0]));
    WgmmaWait<1>();
    cta_.Arrive(cta_.parts.Empty(states[1]));
    WgmmaWait<0>();
    cta_.Arrive(cta_.parts.Empty(states[2]));
#pragma unroll
    for (int m = 0; m < kDimTiles; ++m) WgmmaFenceOperand(o[m]);
  }
};

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SM90_FEW_ROWS_CONSUMER_CUH_
