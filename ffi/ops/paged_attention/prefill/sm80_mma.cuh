// Prefill attention in float16 and bfloat16 with mma.sync, for sm_80 and up. A CTA of four warps keeps the Q of a work
// tile in shared memory and walks over the key tiles from the last visible one back to the first, with an online
// softmax. The next tiles' copies overlap with the arithmetic.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM80_MMA_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM80_MMA_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/float8.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/ops/paged_attention/prefill/online_softmax.cuh"
#include "ffi/ops/paged_attention/prefill/rows.cuh"
#include "ffi/ops/paged_attention/prefill/tile_scheduler.cuh"

namespace xla_gpu::prefill {

// kDim: head_dim, rounded up; the rest of a row is zeros in shared memory. kFloat8Cache: the cache holds float8 values,
// which are copied raw and converted on their way to the tile. At most 99 KiB of shared memory, the limit of a CTA on
// sm_86 and sm_89; two CTAs on an SM of sm_80 and sm_90.
template <typename T, int kDim, bool kFloat8Cache>
struct MmaTraits {
  using Element = T;
  static constexpr int kHeadDim = kDim;
  static constexpr bool kFloat8 = kFloat8Cache;
  // Query rows of a warp, in steps of 16. 32 where registers allow: each fragment of K and V then feeds two products,
  // and shared memory no longer bounds the tensor cores.
  static constexpr int kWarpRows = kDim == 256 ? 16 : 32;
  static constexpr int kTileKeys = kDim == 256 && kFloat8Cache ? 32 : 64;  // keys of a key tile
  static constexpr int kStages = kDim == 256 || kFloat8Cache ? 1 : 2;      // of K and of V
};

// A CTA's computation of a work tile.
template <typename Traits>
struct MmaWorkTile {
  using T = typename Traits::Element;
  static constexpr int kDim = Traits::kHeadDim;
  static constexpr int kWarpRows = Traits::kWarpRows;
  static constexpr int kKeys = Traits::kTileKeys;
  static constexpr int kStages = Traits::kStages;
  static constexpr bool kFp8 = Traits::kFloat8;
  static constexpr bool kChecksPages = false;  // see RunWorkTile
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kRowTiles = kWarpRows / 16;
  static constexpr int kKeyTiles = kKeys / 8;
  static constexpr int kDimTiles = kDim / 8;
  static constexpr int kRowVectors = kDim / 8;  // 16-byte vectors of a row
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kTileBytes = kKeys * kDim * 2;
  static constexpr int kRawBytes = kFp8 ? kKeys * kDim : 0;
  static constexpr int kThreadVectors = kKeys * kRowVectors / kThreads;  // of a tile, copied by one thread
  static_assert(kKeys * kRowVectors % kThreads == 0 && kKeys <= kThreads && kWarpRows % 16 == 0 && kKeys % 16 == 0);
  static_assert(kStages == 1 || !kFp8, "float8 tiles have one converted stage");

  // Shared memory, from the start: Q, K stages, V stages, raw K, raw V, row offsets of two tiles.
  static constexpr int kQueryBytes = kRows * kDim * 2;
  static constexpr int kKeyStart = kQueryBytes;
  static constexpr int kValueStart = kKeyStart + kStages * kTileBytes;
  static constexpr int kRawStart = kValueStart + kStages * kTileBytes;
  static constexpr int kOffsetStart = kRawStart + 2 * kRawBytes;
  static constexpr int kSharedBytes = kOffsetStart + 2 * kKeys * static_cast<int>(sizeof(int64_t));

  using Scheduler = SingleTileScheduler<kThreads, kRows>;
  static_assert(sizeof(typename Scheduler::Storage) <= kOffsetStart);

  const PagedAttentionParams& params;
  char* const shared;  // aligned to a row, up to 512 bytes
  const uint32_t shared_address;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;

  __device__ MmaWorkTile(const PagedAttentionParams& params, char* shared)
      : params(params), shared(shared), shared_address(SharedAddress(shared)) {}

  // Byte offset of 16-byte vector `vec` of a row in a tile of rows of kDim elements. The XOR swizzle spreads the eight
  // rows that one ldmatrix reads over all banks.
  static __device__ int SwizzledOffset(int row, int vec) { return (row * kRowVectors + (vec ^ (row & 7))) * 16; }

  // From the address of a vector to that of the vector `vectors` further in the same row, where `vectors` has no bit in
  // common with the vector's number. Needs rows that are aligned to their size.
  static __device__ uint32_t AdvanceVectors(uint32_t address, int vectors) { return address ^ (vectors * 16); }

  // Makes `x` opaque to the compiler, so that nothing derived from it is hoisted out of the loop.
  static __device__ void KeepInLoop(uint32_t& x) { asm volatile("" : "+r"(x)); }

  // ---- Copies
  __device__ void LoadQuery(const TileRows<>& rows) {
    const T* const query = static_cast<const T*>(params.query);
#pragma unroll 4
    for (int i = thread; i < kRows * kRowVectors; i += kThreads) {
      const int row = i / kRowVectors;
      const int vec = i % kRowVectors;
      const bool valid = row < rows.count && vec * 8 < params.head_dim;
      const T* source = valid ? query + rows.HeadRow(row) * params.head_dim + vec * 8 : query;
      CopyAsync16(shared_address + SwizzledOffset(row, vec), source, valid);
    }
  }

  // Byte offsets of the keys of key tile `index`: thread i looks up key i. Keys that no row of this CTA sees get -1 and
  // are zeros in shared memory, so that the contents of unused slots take no part.
  __device__ int64_t LookUp(const TileRows<>& rows, int index) const {
    const int position = index * kKeys + thread;
    if (thread >= kKeys || position < rows.key_begin || position >= rows.key_end) return -1;
    return KeyOffset(params, rows.seq, position) * (kFp8 ? 1 : 2);
  }
  __device__ int64_t* Offsets(int index) const {
    return reinterpret_cast<int64_t*>(shared + kOffsetStart) + (index & 1) * kKeys;
  }

  // Starts the copy of key tile `index` of K or V. `cache`: this thread's vector of the kv head's element (0, 0, head,
  // 0). kWhole: all keys are seen and all vectors are below head_dim.
  template <bool kWhole>
  __device__ void LoadTile(const char* cache, int tile_start, int raw_start, int index) const {
    const int64_t* const offsets = Offsets(index) + thread / kRowVectors;
    const bool in_row = thread % kRowVectors * 8 < params.head_dim;
    const int stage = kStages == 2 ? (index & 1) * kTileBytes : 0;
#pragma unroll
    for (int i = 0; i < kThreadVectors; ++i) {
      const int64_t offset = offsets[i * (kThreads / kRowVectors)];
      const bool valid = kWhole || (in_row && offset >= 0);
      const char* const source = cache + (valid ? offset : 0);
      if constexpr (kFp8) {
        CopyAsync8(shared_address + raw_start + (i * kThreads + thread) * 8, source, valid);
      } else {
        const int row = i * (kThreads / kRowVectors) + thread / kRowVectors;
        CopyAsync16(shared_address + tile_start + stage + SwizzledOffset(row, thread % kRowVectors), source, valid);
      }
    }
  }
  __device__ void LoadTile(const TileRows<>& rows, const char* cache, int tile_start, int raw_start, int index) const {
    const int position = index * kKeys;
    if (position >= rows.key_begin && position + kKeys <= rows.key_end && params.head_dim == kDim) {
      LoadTile</*kWhole=*/true>(cache, tile_start, raw_start, index);
    } else {
      LoadTile</*kWhole=*/false>(cache, tile_start, raw_start, index);
    }
  }

  // float8 only: converts what this thread copied into the tile.
  template <bool kE4M3>
  __device__ void ConvertTile(int tile_start, int raw_start) const {
#pragma unroll
    for (int i = 0; i < kThreadVectors; ++i) {
      const int row = (i * kThreads + thread) / kRowVectors;
      const uint2 raw = *reinterpret_cast<const uint2*>(shared + raw_start + (i * kThreads + thread) * 8);
      *reinterpret_cast<uint4*>(shared + tile_start + SwizzledOffset(row, thread % kRowVectors)) =
          ConvertFloat8<T, kE4M3>(raw);
    }
  }
  __device__ void ConvertTile(int tile_start, int raw_start) const {
    if (params.cache_dtype == DType::kF8E4M3FN) {
      ConvertTile</*kE4M3=*/true>(tile_start, raw_start);
    } else {
      ConvertTile</*kE4M3=*/false>(tile_start, raw_start);
    }
  }

  // ---- Arithmetic
  // `q`, `k`, `v`: addresses of this lane's vector of the first fragment. Those of the other fragments follow by
  // constants; else the compiler computes all of them before the loop over key tiles and runs out of registers.
  __device__ void Scores(uint32_t q, uint32_t k_tile, float (&s)[kRowTiles][kKeyTiles][4]) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][n][i] = 0.0f;
      }
    }
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        LoadMatrix4(a[m], AdvanceVectors(q, 2 * k) + m * 16 * kRowBytes);
      }
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        uint32_t b[4];
        LoadMatrix4(b, AdvanceVectors(k_tile, 2 * k) + n * 8 * kRowBytes);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          Mma16x8x16<T>(s[m][n], a[m], b[0], b[1]);
          Mma16x8x16<T>(s[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  __device__ void AddValues(uint32_t v_tile, const float (&p)[kRowTiles][kKeyTiles][4],
                            float (&o)[kRowTiles][kDimTiles][4]) const {
#pragma unroll
    for (int k = 0; k < kKeyTiles; k += 2) {
      // Two accumulator tiles side by side have the layout of an A fragment.
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[m][i] = Pack<T>(p[m][k + i / 2][i % 2 * 2], p[m][k + i / 2][i % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int d = 0; d < kDimTiles; d += 2) {
        uint32_t b[4];
        LoadMatrix4Transposed(b, AdvanceVectors(v_tile, d) + k * 8 * kRowBytes);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          Mma16x8x16<T>(o[m][d], a[m], b[0], b[1]);
          Mma16x8x16<T>(o[m][d + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // Rows: TileRows<>, or a class derived from it with VisibleKeys of its own.
  template <typename Rows>
  __device__ void Run(const WorkTile& /*tile*/, const Rows& rows) {
    const int vec_start = thread % kRowVectors * (kFp8 ? 8 : 16);
    const char* const key_cache = HeadStart(params, params.k_cache, rows.kv_head) + vec_start;
    const char* const value_cache = HeadStart(params, params.v_cache, rows.kv_head) + vec_start;
    const LogitTransform transform(params, rows.kv_head);

    float o[kRowTiles][kDimTiles][4] = {};
    OnlineSoftmax<kRowTiles> softmax(warp * kWarpRows);
    uint32_t q_fragment = shared_address + SwizzledOffset(warp * kWarpRows + lane % 16, lane / 16);
    uint32_t k_fragment = shared_address + kKeyStart + SwizzledOffset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    uint32_t v_fragment = shared_address + kValueStart + SwizzledOffset(lane % 16, lane / 16);

    const int first_tile = rows.key_begin / kKeys;
    const int last_tile = (rows.key_end + kKeys - 1) / kKeys - 1;
    if (last_tile >= first_tile) {
      if (thread < kKeys) {
        Offsets(last_tile)[thread] = LookUp(rows, last_tile);
        Offsets(last_tile - 1)[thread] = LookUp(rows, last_tile - 1);
      }
      LoadQuery(rows);
      __syncthreads();
      LoadTile(rows, key_cache, kKeyStart, kRawStart, last_tile);
      CommitAsync();
      LoadTile(rows, value_cache, kValueStart, kRawStart + kRawBytes, last_tile);
      CommitAsync();
    }

    for (int tile = last_tile; tile >= first_tile; --tile) {
      const int stage = kStages == 2 ? (tile & 1) * kTileBytes : 0;
      KeepInLoop(q_fragment);
      KeepInLoop(k_fragment);
      KeepInLoop(v_fragment);
      const bool more = tile > first_tile;
      const auto load_key = [&] {
        if (more) LoadTile(rows, key_cache, kKeyStart, kRawStart, tile - 1);
        CommitAsync();
      };
      const auto load_value = [&] {
        if (more) LoadTile(rows, value_cache, kValueStart, kRawStart + kRawBytes, tile - 1);
        CommitAsync();
      };
      // Two commit groups are in flight: this tile's K, then its V.
      WaitAsync<1>();
      if constexpr (kFp8) {
        ConvertTile(kKeyStart, kRawStart);
        __syncthreads();
        load_key();
      } else {
        __syncthreads();
        if constexpr (kStages == 2) load_key();
      }
      const int64_t offset = LookUp(rows, tile - 2);

      float s[kRowTiles][kKeyTiles][4];
      Scores(q_fragment, k_fragment + stage, s);
      if constexpr (kStages == 1 && !kFp8) {
        __syncthreads();
        load_key();
      }

      softmax.Update(rows, transform, tile * kKeys, s);
      if (softmax.NeedsRescale()) softmax.Rescale(o);

      WaitAsync<1>();
      if constexpr (kFp8) {
        ConvertTile(kValueStart, kRawStart + kRawBytes);
        __syncthreads();
        load_value();
      } else {
        __syncthreads();
        if constexpr (kStages == 2) load_value();
      }
      AddValues(v_fragment + stage, s, o);
      if constexpr (kStages == 1 && !kFp8) {
        __syncthreads();
        load_value();
      }
      // Read next after the next iteration's first barrier, and last before this iteration's.
      if (thread < kKeys) Offsets(tile)[thread] = offset;
    }
    WaitAsync<0>();
    // Staged where the warp's own query rows were.
    softmax.template Store<T>(params, rows, transform, o,
                              [&](int row, int d) { return shared + SwizzledOffset(row, d); });
  }
};

template <typename Traits>
__global__ void __launch_bounds__(MmaWorkTile<Traits>::kThreads, 2)
    PrefillMmaKernel(const __grid_constant__ PagedAttentionParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // Code for sm_90a has the wgmma kernels for all caches but float8 ones. What is never launched is not compiled.
  constexpr bool kLaunched = Traits::kFloat8;
#else
  constexpr bool kLaunched = true;
#endif
  if constexpr (kLaunched) {
    extern __shared__ __align__(1024) char shared[];
    RunWorkTile<MmaWorkTile<Traits>, typename Traits::Element>(params, shared);
  }
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM80_MMA_CUH_
