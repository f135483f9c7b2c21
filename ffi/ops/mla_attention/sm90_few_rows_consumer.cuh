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
#include "ffi/ops/mla_attention/sm90_few_rows_traits.cuh"
#include "ffi/ops/mla_attention/sm90_wgmma.cuh"
#include "ffi/ops/paged_attention/prefill/pipeline.cuh"

namespace xla_gpu::mla {

template <typename T>
class FewRowsConsumer {
 public:
  using Cta = FewRowsCta;
  using Traits = typename Cta::Traits;
  using PartState = typename Cta::PartState;

  __device__ FewRowsConsumer(const Cta& cta, int warpgroup)
      : cta_(cta),
        params_(cta.params),
        warpgroup_(warpgroup),
        thread_(static_cast<int>(threadIdx.x) % 128),
        warp_(__shfl_sync(~0u, thread_ / 32, 0)),
        group_(cta.lane / 4),
        column_(cta.lane % 4 * 2) {}

  __device__ void Run() {
    TileState work;
#pragma unroll 1
    for (;;) {
      cta_.tiles.WaitFull(work);
      const WorkTile& tile = cta_.Tile(work);
      if (tile.kind == WorkTile::kEnd) return;
      const bool wrong = IsWrong(tile);
      Accumulators o;
      Compute(tile, o);
      Store(tile, wrong, o);
      cta_.Arrive(cta_.tiles.Empty(work));
      work.Advance();
    }
  }

 private:
  static constexpr int kBlocks = kFewRows / 8;        // of 8 query rows
  static constexpr int kDimTiles = kLatentDim / 64;   // of 64 columns of the values
  static constexpr int kOwnDimTiles = kDimTiles / 2;  // that a warpgroup stores
  // Of 64 keys or columns of values, a thread has (16 * warp + group_) and the one 8 further on, as halves h, and in
  // block n the query rows (8 * n + column_ + j) of them: element [n][h * 2 + j].
  using Accumulators = float[kDimTiles][kBlocks][4];
  using Rows = float[kBlocks][2];  // something of each of a thread's query rows, [n][j]
  // A larger maximum is taken over only where numerators would grow past 2^8, which float16 and bfloat16 hold.
  static constexpr float kRescaleThreshold = 8;
  // Named barriers. kGroupBarrier + i: the warps of warpgroup i.
  static constexpr int kGroupBarrier = 1, kExchangeBarrier = 3;

  const Cta& cta_;
  const Sm90Params& params_;
  const int warpgroup_;
  const int thread_;  // of the warpgroup
  const int warp_;    // of the warpgroup
  const int group_;
  const int column_;
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
    if (warpgroup_ < count) {
      cta_.query.WaitFull(query_);
#pragma unroll 1
      for (int i = warpgroup_; i < count; i += 2) ComputeKeyTile(tile, i, o);
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
    NamedBarrierSync(kGroupBarrier + warpgroup_, 128);
    AddValues(i, o);
  }

  // s = K · Qᵀ. Even and odd steps add up apart, since each waits for the one before.
  __device__ void Scores(int i, float (&s)[kBlocks][4]) const {
    float odd[kBlocks][4];
    const uint64_t query = MakeSmemDescKMajor(cta_.Query());
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
      const int key = first_key + warp_ * 16 + group_;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int last_key = LastKey(tile, min(n * 8 + column_ + j, tile.rows - 1));
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (key + h * 8 > last_key) s[n][h * 2 + j] = -CUDART_INF_F;
          }
        }
      }
    }
    float(&warp_max)[4][kFewRows] = cta_.Storage().warp_max[warpgroup_];
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
      if (group_ == 0) {
        *reinterpret_cast<float2*>(&warp_max[warp_][n * 8 + column_]) = make_float2(largest[0], largest[1]);
      }
    }
    NamedBarrierSync(kGroupBarrier + warpgroup_, 128);
    Rows rescale;
    bool rescales = false;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      float largest[2] = {-CUDART_INF_F, -CUDART_INF_F};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 pair = *reinterpret_cast<const float2*>(&warp_max[w][n * 8 + column_]);
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
    const int row = cta_.lane / 16 * 8 + cta_.lane % 8, vector = warp_ * 2 + cta_.lane / 8 % 2;
    const uint32_t address = cta_.Numerators(warpgroup_) + row * 128 + ((vector ^ row) & 7) * 16;
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
      for (int vector = keys / 8 * (kPartRowBytes / 16) + thread_; vector < kPartBytes / 16; vector += 128) {
        const int key = vector * 16 / kPartRowBytes * 8 + vector / 8 % 8;
        if (key < keys) continue;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address + vector * 16), "r"(0) : "memory");
      }
    }
  }

  // o += Vᵀ · numeratorsᵀ of key tile i.
  __device__ void AddValues(int i, Accumulators& o) const {
    const uint64_t numerators = MakeSmemDescKMajor(cta_.Numerators(warpgroup_));
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

  // ---- Results
  // Whether a page of the sequence lies outside the cache, or its context is wrong: then its rows are NaN. The same in
  // all threads of the warpgroup.
  __device__ bool IsWrong(const WorkTile& tile) const {
    bool wrong = tile.kind == WorkTile::kNan;
    const int32_t* const table = params_.attention.block_tables + tile.block_table * params_.attention.pages_per_seq;
    const auto num_pages = static_cast<uint64_t>(params_.attention.num_pages);
#pragma unroll 4
    for (int page = wrong ? tile.pages : thread_; page < tile.pages; page += 128) {
      const int32_t number = __ldg(table + page);
      wrong |= number < 0 || static_cast<uint64_t>(number) >= num_pages;
    }
    return NamedBarrierSyncOr(kGroupBarrier + warpgroup_, 128, wrong);
  }

  // Merges both warpgroups' results and stores those of column tiles [kOwnDimTiles * warpgroup, + kOwnDimTiles).
  __device__ void Store(const WorkTile& tile, bool wrong, const Accumulators& o) {
    Rows mine, others;  // what the accumulators are to be multiplied by
    StoreStates(tile, wrong, mine, others);
    auto& exchange = cta_.Storage().exchange;
#pragma unroll
    for (int m = 0; m < kOwnDimTiles; ++m) {
#pragma unroll
      for (int first = 0; first < kBlocks; first += 2) {
        // What the other warpgroup wrote before has been read.
        if (m + first > 0) NamedBarrierSync(kExchangeBarrier, kConsumerThreads);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float(&low)[4] = o[m][first + i];
          const float(&high)[4] = o[m + kOwnDimTiles][first + i];
          exchange[warpgroup_][i][thread_] = warpgroup_ == 0 ? make_float4(high[0], high[1], high[2], high[3])
                                                             : make_float4(low[0], low[1], low[2], low[3]);
        }
        NamedBarrierSync(kExchangeBarrier, kConsumerThreads);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int n = first + i;
          const float4 vec = exchange[1 - warpgroup_][i][thread_];
          const float got[4] = {vec.x, vec.y, vec.z, vec.w};
          float merged[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float own = warpgroup_ == 0 ? o[m][n][e] : o[m + kOwnDimTiles][n][e];
            merged[e] = own * mine[n][e % 2] + got[e] * others[n][e % 2];
          }
          const int column = warpgroup_ * kHalfDim + m * 64 + warp_ * 16;
          if (tile.slot < 0) {
            StoreRows(tile, n, column, merged);
          } else {
            StorePart(tile, n, column, merged);
          }
        }
      }
    }
  }

  // Merges and stores the states of the rows, or what follows from them. Contains a barrier of both warpgroups.
  __device__ void StoreStates(const WorkTile& tile, bool wrong, Rows& mine, Rows& others) const {
    auto& storage = cta_.Storage();
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      float sums[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        sums[j] = sum_[n][j];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sums[j] += __shfl_xor_sync(~0u, sums[j], step);
      }
      if (group_ == 0) {
        const int row = n * 8 + column_;
        *reinterpret_cast<float2*>(&storage.warp_sums[warpgroup_][warp_][row]) = make_float2(sums[0], sums[1]);
        if (warp_ == 0) {
          *reinterpret_cast<float2*>(&storage.row_max[warpgroup_][row]) = make_float2(max_[n][0], max_[n][1]);
        }
      }
    }
    NamedBarrierSync(kExchangeBarrier, kConsumerThreads);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = n * 8 + column_ + j;
        const auto state_of = [&](int warpgroup) {
          const float(&sums)[4][kFewRows] = storage.warp_sums[warpgroup];
          return AttentionState{storage.row_max[warpgroup][row],
                                (sums[0][row] + sums[1][row]) + (sums[2][row] + sums[3][row])};
        };
        AttentionState state = state_of(0);
        const MergeWeights weights = state.Merge(state_of(1));
        if (wrong) state.sum = CUDART_NAN_F;
        const bool stores = row < tile.rows && warpgroup_ == 0 && warp_ == 0 && group_ == 0;
        float factor = 1.0f;
        if (tile.slot < 0) {
          factor = state.sum == 0.0f ? 0.0f : state.Normalize(1.0f);
          if (stores && params_.attention.lse != nullptr) {
            params_.attention.lse[tile.first_row + row] = state.LogSumExp();
          }
        } else if (stores) {
          params_.states[static_cast<int64_t>(tile.slot) * params_.slot_rows + row] = state;
        }
        mine[n][j] = (warpgroup_ == 0 ? weights.first : weights.second) * factor;
        others[n][j] = (warpgroup_ == 0 ? weights.second : weights.first) * factor;
      }
    }
  }

  // The rows of block n, 16 columns of each warp. In vectors of 8 bytes, of which the four lanes of a row write a whole
  // sector.
  __device__ void StoreRows(const WorkTile& tile, int n, int column, const float (&c)[4]) const {
    const int quad_lane = cta_.lane % 4;
    const bool odd = quad_lane % 2 != 0;
    const uint32_t low = Transpose(Pack<T>(c[0], c[1])), high = Transpose(Pack<T>(c[2], c[3]));
    const uint32_t got = __shfl_xor_sync(~0u, odd ? low : high, 1);
    const uint2 vec = odd ? make_uint2(got, high) : make_uint2(low, got);
    const int row = n * 8 + group_;  // transposed
    if (row >= tile.rows) return;
    T* const out = static_cast<T*>(params_.attention.out) + (int64_t{tile.first_row} + row) * kLatentDim + column;
    *reinterpret_cast<uint2*>(out + (odd ? 8 : 0) + quad_lane / 2 * 4) = vec;
  }
  // A matrix of 8 rows, which lane / 4 counts, of 8 elements, in pairs.
  static __device__ uint32_t Transpose(uint32_t pair) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
  }

  // The same of accumulators. Eight lanes write a whole sector.
  __device__ void StorePart(const WorkTile& tile, int n, int column, const float (&c)[4]) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = n * 8 + column_ + j;
      if (row >= tile.rows) continue;
      const int64_t part_row = static_cast<int64_t>(tile.slot) * params_.slot_rows + row;
      float* const accumulator = params_.accumulators + part_row * kLatentDim + column + group_;
      accumulator[0] = c[j];
      accumulator[8] = c[2 + j];
    }
  }
};

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SM90_FEW_ROWS_CONSUMER_CUH_
