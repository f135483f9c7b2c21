// The producer warps of the TMA prefill kernel (sm90_tma.cuh) for float8 caches. TMA brings the bytes of a key tile to
// shared memory, and all producer warps convert them on their way to the tile that wgmma reads, equal parts each: one
// warp alone would take longer than the products. Conversions are exact.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_FLOAT8_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_FLOAT8_CUH_

#include <cstdint>
#include <type_traits>

#include "ffi/device/float8.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/tensor_map.cuh"
#include "ffi/ops/paged_attention/prefill/pipeline.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_producer.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_scheduler.cuh"

namespace xla_gpu::prefill {

// A producer warp, of four or eight. Warp 0 also schedules work tiles, 1 and 2 load the bytes of K and V, and 3 loads
// Q.
template <typename Traits>
struct TmaFloat8Warp : TmaKvWarp<Traits, /*kIsValues=*/false> {
  using Base = TmaKvWarp<Traits, /*kIsValues=*/false>;
  using Box = typename Base::Box;
  using Base::cta;
  using T = typename Traits::Element;
  using TileState = typename Traits::TileState;
  using RawState = PipelineState<Traits::kRawStages>;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kTileKeys = Traits::kTileKeys;
  static constexpr int kRawStages = Traits::kRawStages;
  static constexpr int kRowVectors = kHeadDim / 8;    // a lane converts 8 bytes to a 16-byte vector at a time
  static constexpr int kWarpRows = 32 / kRowVectors;  // that a warp converts together
  static constexpr int kStepRows = Traits::kProducerWarps * kWarpRows;  // and all of them
  static constexpr int kSteps = kTileKeys / kStepRows;
  static constexpr int kStepBytes = kStepRows / 8 * Traits::kAtomRowBytes;  // of the tile
  static_assert(kStepRows % 8 == 0 && kTileKeys % kStepRows == 0);
  static constexpr int kAhead = Traits::kConversionsAhead;  // vectors that a lane loads before it converts the first
  static_assert(kAhead <= kSteps);

  const int warp;
  typename Traits::KeyState key;
  typename Traits::ValueState value;
  RawState raw;  // of K and of V

  // As TmaSchedulerWarp::Run.
  template <typename Find>
  __device__ void Run(Find find, bool has_first, const typename TmaSchedulerWarp<Traits>::Planned& first) {
    if (warp == 0) return Schedule(find, has_first, first);
    const TmaQueryWarp<Traits> query{cta};
    typename Traits::QueryState query_state;
    for (TileState work;; work.Advance(), query_state.Advance()) {
      cta.tiles.WaitFull(work);
      if (cta.Tile(work).key_tiles == 0) break;
      if (warp == 3) query.Load(work, query_state);
      Convert(work);
      cta.Arrive(cta.tiles.Empty(work));
    }
    if (warp == 3) query.Finish();
  }

 private:
  // Warp 0 converts the keys of a work tile once it has described the next one.
  template <typename Find>
  __device__ void Schedule(Find find, bool has_first, const typename TmaSchedulerWarp<Traits>::Planned& first) {
    int described = 0;  // work tiles that this warp has not converted
    TileState next;
    const auto find_and_convert = [&](unsigned n, WorkTile* tile, int* splits) {
      const bool found = find(n, tile, splits);
      for (const int left = found ? 1 : 0; described > left; --described, next.Advance()) Convert(next);
      return found;
    };
    TmaSchedulerWarp<Traits>{cta}.Run(find_and_convert, [&] { ++described; }, has_first, first);
  }

  // This warp's share of a work tile's conversions: kWarpRows of every kStepRows rows.
  __device__ void Convert(TileState work) {
    const int tiles = cta.Tile(work).key_tiles;
    const int last = cta.Tile(work).last_key_tile;
    const bool loads = warp == 1 || warp == 2;
    // Loads are kRawStages tiles ahead.
    RawState loading = raw;
#pragma unroll 1
    for (int i = 0; i < kRawStages && i < tiles; ++i, loading.Advance()) {
      if (loads) Load(work, this->LookUp(work, last - i), loading);
    }
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      const bool more = loads && i + kRawStages < tiles;
      Box box{};
      if (more) box = this->LookUp(work, last - i - kRawStages);
      ConvertTile</*kIsValues=*/false>(work, last - i);
      ConvertTile</*kIsValues=*/true>(work, last - i);
      RawState again = raw;  // the same stage, a round later
      again.phase ^= 1;
      if (more) Load(work, box, again);
      key.Advance();
      value.Advance();
      raw.Advance();
    }
  }

  // As TmaKvWarp::LoadTile, once all warps have converted what the stage held.
  __device__ void Load(TileState work, const Box& box, RawState state) const {
    const bool is_values = warp == 2;
    const CUtensorMap& map = is_values ? cta.params.v_map : cta.params.k_map;
    const Pipeline<RawState> raw_tiles{cta.RawBarriers(is_values)};
    const uint32_t target = cta.RawTile(is_values, state.stage);
    const uint32_t barrier = raw_tiles.Full(state);
    const int column = cta.Tile(work).rows.kv_head * cta.params.head_columns * 64;
    const int page = box.page < cta.attention.num_pages ? box.page : -1;
    const int box_bytes = cta.params.box_slots * kHeadDim;
    raw_tiles.WaitEmpty(state);
    if (ElectOne()) ArriveExpectTx(barrier, Traits::kRawTileBytes);
    __syncwarp();
#pragma unroll 1
    for (int i = 0, offset = 0; offset < Traits::kRawTileBytes; ++i, offset += box_bytes) {
      const int box_page = __shfl_sync(~0u, page, i);
      const int box_slot = __shfl_sync(~0u, box.slot, i);
      if (ElectOne()) TmaLoadCacheBytes(target + offset, map, barrier, column, box_slot, box_page);
      __syncwarp();
    }
  }

  template <bool kIsValues>
  __device__ void ConvertTile(TileState work, int tile) const {
    using Target = std::conditional_t<kIsValues, typename Traits::ValueElement, typename Traits::Element>;
    const Pipeline<RawState> raw_tiles{cta.RawBarriers(kIsValues)};
    const uint32_t full = kIsValues ? cta.values.Full(value) : cta.keys.Full(key);
    const uint32_t empty = kIsValues ? cta.values.Empty(value) : cta.keys.Empty(key);
    const uint32_t phase = kIsValues ? value.phase : key.phase;
    const int row = warp * kWarpRows + cta.lane / kRowVectors;  // of kStepRows
    const uint32_t source = cta.RawTile(kIsValues, raw.stage) + warp * 256 + cta.lane * 8;
    const uint32_t target = (kIsValues ? cta.Values(value.stage) : cta.Keys(key.stage)) +
                            row / 8 * Traits::kAtomRowBytes +
                            SwizzledOffset(Traits::kAtomBytes, row % 8, cta.lane % kRowVectors);
    WaitBarrier(empty, phase ^ 1);
    raw_tiles.WaitFull(raw);
    if (cta.attention.cache_dtype == DType::kF8E4M3FN) {
      ConvertRows<Target, /*kE4M3=*/true>(source, target);
    } else {
      ConvertRows<Target, /*kE4M3=*/false>(source, target);
    }
    // Unused slots may hold NaN, which a probability of zero does not mask: rows that no row of the work tile sees
    // become zeros.
    const int begin = cta.Tile(work).rows.key_begin - tile * kTileKeys;
    const int end = cta.Tile(work).rows.key_end - tile * kTileKeys;
    if (begin > 0 || end < kTileKeys) {
#pragma unroll 1
      for (int step = 0; step < kSteps; ++step) {
        const int mine = step * kStepRows + row;
        if (mine < begin || mine >= end) StoreVector(target + step * kStepBytes, {});
      }
    }
    FenceProxyAsync();
    cta.Arrive(full);
    if (cta.lane == 0) ArriveBarrier(raw_tiles.Empty(raw));
  }

  // In a software pipeline: a warp waits for shared memory, and for conversions, more than it computes.
  template <typename Target, bool kE4M3>
  __device__ void ConvertRows(uint32_t source, uint32_t target) const {
    uint2 bytes[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) bytes[i] = LoadBytes(source + i * kStepRows * kHeadDim);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const uint2 converted = bytes[i % kAhead];
      if (i + kAhead < kSteps) bytes[i % kAhead] = LoadBytes(source + (i + kAhead) * kStepRows * kHeadDim);
      StoreVector(target + i * kStepBytes, ConvertFloat8<Target, kE4M3>(converted));
    }
  }
  static __device__ uint2 LoadBytes(uint32_t source) {
    uint2 bytes;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(bytes.x), "=r"(bytes.y) : "r"(source) : "memory");
    return bytes;
  }
  static __device__ void StoreVector(uint32_t target, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
  }
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_FLOAT8_CUH_
