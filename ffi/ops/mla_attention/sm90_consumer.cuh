// The consumer warpgroups of the sm_90a kernel (sm90.cuh). They compute the scores and the softmax of every second key
// tile each, and each the products with its half of the values, of all key tiles. So one warpgroup's products run
// beside the other's softmax.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_SM90_CONSUMER_CUH_
#define XLA_GPU_OPS_MLA_ATTENTION_SM90_CONSUMER_CUH_

#include <math_constants.h>

#include <cstdint>

#include "ffi/device/attention_state.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/device/wgmma.cuh"
#include "ffi/ops/mla_attention/sm90_traits.cuh"
#include "ffi/ops/mla_attention/sm90_wgmma.cuh"
#include "ffi/ops/paged_attention/prefill/pipeline.cuh"

namespace xla_gpu::mla {

template <typename T>
class Consumer {
 public:
  __device__ Consumer(const Cta& cta, int warpgroup)
      : cta_(cta),
        params_(cta.params),
        warpgroup_(warpgroup),
        thread_(static_cast<int>(threadIdx.x) % 128),
        row_(thread_ / 32 * 16 + cta.lane / 4) {}

  __device__ void Run() {
    TileState work;
#pragma unroll 1
    for (int index = 0;; ++index) {
      cta_.tiles.WaitFull(work);
      const WorkTile& tile = cta_.Tile(work);
      if (tile.kind == WorkTile::kEnd) return;
      float o[kDimTiles][4];
      Clear(o);
      const bool wrong = PageCheck<0>(params_, tile, thread_).IsWrong(kGroupBarrier + warpgroup_);
      Compute(tile, o);
      Store(tile, index % 2, wrong, o);
      cta_.Arrive(cta_.tiles.Empty(work));
      work.Advance();
    }
  }

 private:
  static constexpr int kKeyTiles = kTileKeys / 8;  // accumulator tiles of 8 columns, as the next
  static constexpr int kDimTiles = kHalfDim / 8;
  // Named barriers. kReadyBarrier + i: warpgroup i has published a key tile's numerators. kGroupBarrier + i: its warps.
  static constexpr int kReadyBarrier = 1, kGroupBarrier = 3, kSumsBarrier = 5;

  const Cta& cta_;
  const Sm90Params& params_;
  const int warpgroup_;
  const int thread_;  // of the warpgroup
  const int row_;     // of the work tile: this thread has rows row_ and row_ + 8
  QueryState query_;
  unsigned keys_before_ = 0;  // key tiles of all work tiles before this one

  float max_[2];
  float sum_[2];  // of this thread's numerators, of the key tiles whose scores its warpgroup computes

  __device__ KeyState State(int i) const {
    const unsigned position = keys_before_ + i;
    KeyState state;
    state.stage = static_cast<int>(position % kStages);
    state.phase = position / kStages & 1;
    return state;
  }

  // ---- A work tile
  __device__ void Compute(const WorkTile& tile, float (&o)[kDimTiles][4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      max_[h] = -CUDART_INF_F;
      sum_[h] = 0.0f;
    }
    const int count = tile.key_tiles;
    if (count == 0) return;
    int i = warpgroup_;
    if (i < count) cta_.query.WaitFull(query_);
    if (i == 0) {
      ComputeKeyTile</*kFirst=*/true>(tile, 0, o);
      i = 2;
    }
#pragma unroll 1
    for (; i < count; i += 2) ComputeKeyTile</*kFirst=*/false>(tile, i, o);
    if (warpgroup_ >= count) cta_.Arrive(cta_.query.Empty(query_));
    if ((count - 1) % 2 != warpgroup_) {
      StartOthersValues(tile, count - 1, o);
      WgmmaCommit();
      WgmmaWait<0>();
      WgmmaFenceOperand(o);
      ReleaseOthers(count - 1);
    }
    query_.Advance();
    keys_before_ += count;
  }

  // Scores and softmax of key tile i, and the values of the one before; then its own values.
  // NOTE: the scores of this warpgroup's half come first, since that half was given back and loaded first; the products
  // with the values before follow when their numerators are there, and give back what the other warpgroup's next key
  // tile waits for. The other pieces arrive meanwhile.
  template <bool kFirst>
  __device__ void ComputeKeyTile(const WorkTile& tile, int i, float (&o)[kDimTiles][4]) {
    float s[kKeyTiles][4];
    uint32_t p[kKeyTiles / 2][4];
    float rescale[2];
    const KeyState state = State(i);
    // Here, since nothing may wait for shared memory behind the scores.
    const bool last = i + 2 >= tile.key_tiles;
    const bool all_seen = RowsSeeAllKeys(tile, i);
    const int keys_seen = KeysSeen(tile, i);
    StartScores<kHalfPieces>(state, warpgroup_ * kHalfPieces, s, /*add=*/false);
    WgmmaCommit();
    if constexpr (!kFirst) {
      StartOthersValues(tile, i - 1, o);
      WgmmaCommit();
    }
    const int others_half = (1 - warpgroup_) * kHalfPieces;
    StartScores<1>(state, others_half, s, /*add=*/true);
    WgmmaCommit();
    if constexpr (!kFirst) {
      WgmmaWait<1>();
      WgmmaFenceOperand(o);
      ReleaseOthers(i - 1);
    }
    StartScores<kHalfPieces - 1>(state, others_half + 1, s, /*add=*/true);
    StartScores<1>(state, kRopePart * kHalfPieces, s, /*add=*/true);
    WgmmaCommit();
    WgmmaWait<0>();
    WgmmaFenceOperand(s);
    if (last) cta_.Arrive(cta_.query.Empty(query_));
    Softmax(tile, i, all_seen, s, rescale);
    prefill::PackNumerators<T>(s, p);
    Publish(keys_seen, state, p);
    if constexpr (!kFirst) Rescale(rescale, o);
    WgmmaFence();
    const uint64_t values = Values(state);
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      WgmmaRS<T>(o, p[step], AdvanceSmemDesc(values, step * 2 * kAtomBytes));
    }
    WgmmaCommit();
    WgmmaWait<0>();
    WgmmaFenceOperand(o);
    cta_.Arrive(cta_.EmptyPart(state, warpgroup_));
  }

  // ---- Scores
  // s = Q · Kᵀ of kCount pieces, or s += Q · Kᵀ where `add`, each once it is there. In the background.
  template <int kCount>
  __device__ void StartScores(KeyState state, int first_piece, float (&s)[kKeyTiles][4], bool add) const {
    uint32_t q_address = cta_.Query() + first_piece * kQueryColumnBytes;
    // Opaque, so that no descriptors are computed before the loop over key tiles: there are no registers for them.
    asm volatile("" : "+r"(q_address));
    const uint64_t q = MakeSmemDescKMajor(q_address);
    const uint64_t k = MakeSmemDescKMajor(cta_.Piece(state.stage, first_piece));
#pragma unroll
    for (int piece = 0; piece < kCount; ++piece) {
      cta_.keys.WaitFull(state, first_piece + piece);
      WgmmaFence();
#pragma unroll
      for (int step = 0; step < kPieceDim / 16; ++step) {
        WgmmaSS<T>(s, AdvanceSmemDesc(q, piece * kQueryColumnBytes + step * 32),
                   AdvanceSmemDesc(k, piece * kPieceBytes + step * 32), add || piece > 0 || step > 0);
      }
    }
  }

  // Turns scores into numerators. rescale: what the results so far are to be multiplied by.
  __device__ void Softmax(const WorkTile& tile, int i, bool all_seen, float (&s)[kKeyTiles][4], float (&rescale)[2]) {
    // A score times a scale that is positive keeps its place in the order: it is multiplied in Exp2's argument alone.
    const float scale = params_.scale_log2 > 0.0f ? params_.scale_log2 : 1.0f;
    if (params_.scale_log2 <= 0.0f) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) s[n][j] *= params_.scale_log2;
      }
    }
    if (!all_seen) {
      const int column = (tile.first_key_tile + i) * kTileKeys + cta_.lane % 4 * 2;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int last_key = tile.offset + LastToken(tile, min(row_ + h * 8, tile.rows - 1));
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            if (column + n * 8 + j > last_key) s[n][h * 2 + j] = -CUDART_INF_F;
          }
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = -CUDART_INF_F;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) largest = fmaxf(largest, fmaxf(s[n][h * 2], s[n][h * 2 + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      largest *= scale;
      const float before = max_[h];
      if (largest > before + kRescaleThreshold) max_[h] = largest;
      const float shift = max_[h] == -CUDART_INF_F ? 0.0f : max_[h];
      rescale[h] = before == max_[h] ? 1.0f : Exp2(before - shift);
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          s[n][h * 2 + j] = Exp2(fmaf(s[n][h * 2 + j], scale, -shift));
          sum += s[n][h * 2 + j];
        }
      }
      sum_[h] = sum_[h] * rescale[h] + sum;
    }
  }
  __device__ bool RowsSeeAllKeys(const WorkTile& tile, int i) const {
    return (tile.first_key_tile + i + 1) * kTileKeys - 1 <= tile.offset + LastToken(tile, 0);
  }
  // Of key tile i: keys that some row sees, where below kTileKeys.
  __device__ int KeysSeen(const WorkTile& tile, int i) const {
    return tile.key_end - (tile.first_key_tile + i) * kTileKeys;
  }
  // The last token of the sequence, counted from its first new one, whose key a row sees.
  __device__ int LastToken(const WorkTile& tile, int row) const {
    return static_cast<int>(params_.heads.Divide(static_cast<uint32_t>(tile.sequence_row + row)));
  }

  __device__ void Rescale(const float (&factors)[2], float (&o)[kDimTiles][4]) const {
    if (!__any_sync(~0u, factors[0] != 1.0f || factors[1] != 1.0f)) return;
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
      for (int j = 0; j < 4; ++j) o[d][j] *= factors[j / 2];
    }
  }

  // Shows the other warpgroup the numerators of a key tile and the maximum that they belong to.
  __device__ void Publish(int keys_seen, KeyState state, const uint32_t (&p)[kKeyTiles / 2][4]) const {
    // All warps have read what lies where the numerators go.
    NamedBarrierSync(kGroupBarrier + warpgroup_, 128);
    const uint32_t rope = cta_.Part(state.stage, kRopePart) + row_ * 128 + cta_.lane % 4 * 4;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const uint32_t address = rope + ((n ^ row_) & 7) * 16;  // rows row_ and row_ + 8 are swizzled alike
      StoreWord(address, p[n / 2][n % 2 * 2]);
      StoreWord(address + 8 * 128, p[n / 2][n % 2 * 2 + 1]);
    }
    if (cta_.lane % 4 == 0) {
      float* const row_max = cta_.Storage().row_max[warpgroup_];
      row_max[row_] = max_[0];
      row_max[row_ + 8] = max_[1];
    }
    const bool cleared = ClearTail(keys_seen, state);
    FenceProxyAsync();
    NamedBarrierArrive(kReadyBarrier + warpgroup_, kConsumerThreads);
    if (cleared) NamedBarrierSync(kGroupBarrier + warpgroup_, 128);
  }
  static __device__ void StoreWord(uint32_t address, uint32_t word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
  }

  // ---- Values
  // The descriptor of this warpgroup's half.
  __device__ uint64_t Values(KeyState state) const {
    return MakeSmemDescMnMajor(cta_.Part(state.stage, warpgroup_), kPieceBytes, kAtomBytes);
  }

  // o += numerators · values of key tile i, whose scores the other warpgroup has computed, in the background. Nothing
  // else accumulates into `o` meanwhile.
  __device__ void StartOthersValues(const WorkTile& tile, int i, float (&o)[kDimTiles][4]) {
    const KeyState state = State(i);
    const int keys_seen = KeysSeen(tile, i);
    const int other = 1 - warpgroup_;
#pragma unroll
    for (int piece = 0; piece < kHalfPieces; ++piece) {
      cta_.keys.WaitFull(state, warpgroup_ * kHalfPieces + piece);
    }
    NamedBarrierSync(kReadyBarrier + other, kConsumerThreads);
    const float* const row_max = cta_.Storage().row_max[other];
    float rescale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float largest = row_max[row_ + h * 8];
      rescale[h] = largest == max_[h] ? 1.0f : Exp2(max_[h] - largest);
      max_[h] = largest;
      sum_[h] *= rescale[h];
    }
    Rescale(rescale, o);
    if (ClearTail(keys_seen, state)) {
      FenceProxyAsync();
      NamedBarrierSync(kGroupBarrier + warpgroup_, 128);
    }
    const uint64_t numerators = MakeSmemDescKMajor(cta_.Part(state.stage, kRopePart));
    const uint64_t values = Values(state);
    WgmmaFence();
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      WgmmaSSMnMajor<T>(o, AdvanceSmemDesc(numerators, step * 32), AdvanceSmemDesc(values, step * 2 * kAtomBytes));
    }
  }
  // The other warpgroup has no more use for its numerators, which it has in registers too.
  __device__ void ReleaseOthers(int i) const {
    const KeyState state = State(i);
    __syncwarp();
    if (cta_.lane == 0) {
      ArriveBarrier(cta_.EmptyPart(state, warpgroup_));
      ArriveBarrier(cta_.EmptyPart(state, kRopePart));
    }
  }

  // Clears this warpgroup's half of the latents that no row sees, which may hold NaN that 0 would not hide. Returns
  // whether there are any.
  __device__ bool ClearTail(int keys_seen, KeyState state) const {
    if (keys_seen >= kTileKeys) return false;
    const uint32_t half = cta_.Part(state.stage, warpgroup_);
#pragma unroll 1
    for (int vector = thread_; vector < kHalfBytes / 16; vector += 128) {
      if (vector / 8 % kTileKeys < keys_seen) continue;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(half + vector * 16), "r"(0) : "memory");
    }
    return true;
  }

  static __device__ void Clear(float (&o)[kDimTiles][4]) {
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
      for (int j = 0; j < 4; ++j) o[d][j] = 0.0f;
    }
  }

  // ---- Results
  __device__ void Store(const WorkTile& tile, int parity, bool wrong, const float (&o)[kDimTiles][4]) {
    float* const row_sums = cta_.Storage().row_sums[parity][warpgroup_];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = sum_[h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      sum_[h] = sum;
      if (cta_.lane % 4 == 0) row_sums[row_ + h * 8] = sum;
    }
    NamedBarrierSync(kSumsBarrier, kConsumerThreads);
    const float(&sums)[2][kTileRows] = cta_.Storage().row_sums[parity];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_ + h * 8;
      const AttentionState state{max_[h], wrong ? CUDART_NAN_F : sums[0][row] + sums[1][row]};
      if (tile.slot < 0) {
        StoreRow(tile, row, h, state, o);
      } else {
        StorePart(tile, row, h, state, o);
      }
    }
  }

  // In vectors of 8 bytes, of which a quad's lanes write a whole sector.
  __device__ void StoreRow(const WorkTile& tile, int row, int h, AttentionState state,
                           const float (&o)[kDimTiles][4]) const {
    const bool in_tile = row < tile.rows;
    const float factor = state.sum == 0.0f ? 0.0f : state.Normalize(1.0f);
    const int64_t out_row = tile.first_row + (in_tile ? row : 0);
    const int quad_lane = cta_.lane % 4;
    const bool odd = quad_lane % 2 != 0;
    T* const out = static_cast<T*>(params_.attention.out) + out_row * kLatentDim + warpgroup_ * kHalfDim +
                   (odd ? 8 : 0) + quad_lane / 2 * 4;
#pragma unroll
    for (int d = 0; d < kDimTiles; d += 2) {
      const uint32_t low = Pack<T>(o[d][2 * h] * factor, o[d][2 * h + 1] * factor);
      const uint32_t high = Pack<T>(o[d + 1][2 * h] * factor, o[d + 1][2 * h + 1] * factor);
      const uint32_t got = __shfl_xor_sync(~0u, odd ? low : high, 1);
      const uint2 vec = odd ? make_uint2(got, high) : make_uint2(low, got);
      if (in_tile) *reinterpret_cast<uint2*>(out + d * 8) = vec;
    }
    if (in_tile && params_.attention.lse != nullptr && warpgroup_ == 0 && quad_lane == 0) {
      params_.attention.lse[out_row] = state.LogSumExp();
    }
  }

  __device__ void StorePart(const WorkTile& tile, int row, int h, AttentionState state,
                            const float (&o)[kDimTiles][4]) const {
    if (row >= tile.rows) return;
    const int64_t part_row = static_cast<int64_t>(tile.slot) * params_.slot_rows + row;
    float* const accumulator = params_.accumulators + part_row * kLatentDim + warpgroup_ * kHalfDim + cta_.lane % 4 * 2;
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d) {
      *reinterpret_cast<float2*>(accumulator + d * 8) = make_float2(o[d][2 * h], o[d][2 * h + 1]);
    }
    if (warpgroup_ == 0 && cta_.lane % 4 == 0) params_.states[part_row] = state;
  }
};

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SM90_CONSUMER_CUH_
