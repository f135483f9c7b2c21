// Prefill attention in float16 and bfloat16 for sm_90a, for calls of many short prompts: work tiles of 64 rows, of few
// key tiles each. What they wait for is latencies, so that three CTAs share an SM. A CTA is one warpgroup that
// computes, and whose warps find the next work tile and start its loads in between. The bits are those of
// PrefillTmaKernel.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_ONE_WARPGROUP_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_ONE_WARPGROUP_CUH_

#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/ops/paged_attention/padding_rows.cuh"
#include "ffi/ops/paged_attention/prefill/heuristics.h"
#include "ffi/ops/paged_attention/prefill/online_softmax.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma.cuh"
#include "ffi/ops/paged_attention/prefill/store_rows.cuh"

namespace xla_gpu::prefill {

// The softmax of a warp's 16 rows that leaves out keys which no row of the work tile sees: the same bits in less time
// where a prompt is shorter than a key tile.
struct SeenKeysSoftmax : OnlineSoftmax</*kRowTiles=*/1, /*kRescaleThreshold=*/8> {
  using OnlineSoftmax::OnlineSoftmax;

  // Turns the scores of the keys from `first_position` on into packed numerators. No row sees more than the first
  // `steps` * 16 of them: the other scores are not read, and their numerators are 0.
  template <typename T, int kKeyTiles, typename Rows>
  __device__ void Update(const Rows& rows, const LogitTransform& transform, int first_position, int steps,
                         float (&s)[1][kKeyTiles][4], uint32_t (&p)[kKeyTiles / 2][4]) {
    transform.Transform<SoftCap::kApprox>(s);
    int first_key[2], last_key[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows.VisibleKeys(Row(0, h), &first_key[h], &last_key[h]);
      first_key[h] -= first_position + Lane() % 4 * 2;
      last_key[h] -= first_position + Lane() % 4 * 2;
    }
    float tile_max[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};  // of both rows, even and odd columns
#pragma unroll
    for (int step = 0; step < kKeyTiles / 2; ++step) {
      if (step >= steps) break;
#pragma unroll
      for (int n = step * 2; n < step * 2 + 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = n * 8 + i % 2;
          if (key > last_key[i / 2] || key < first_key[i / 2]) s[0][n][i] = -INFINITY;
          tile_max[i / 2][i % 2] = fmaxf(tile_max[i / 2][i % 2], s[0][n][i]);
        }
      }
    }
    FollowMax(transform, tile_max, 0);
    const float shift[2] = {Shift(transform, state[0][0].max), Shift(transform, state[0][1].max)};
#pragma unroll
    for (int step = 0; step < kKeyTiles / 2; ++step) {
      if (step >= steps) {
#pragma unroll
        for (int i = 0; i < 4; ++i) p[step][i] = 0;
        continue;
      }
#pragma unroll
      for (int n = step * 2; n < step * 2 + 2; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float(&pair)[4] = s[0][n];
          pair[2 * h] = Exp2(fmaf(pair[2 * h], transform.to_log2, -shift[h]));
          pair[2 * h + 1] = Exp2(fmaf(pair[2 * h + 1], transform.to_log2, -shift[h]));
          state[0][h].sum += pair[2 * h] + pair[2 * h + 1];
          p[step][n % 2 * 2 + h] = Pack<T>(pair[2 * h], pair[2 * h + 1]);
        }
      }
    }
  }
};

template <typename Traits>
struct TmaOneWarpgroup {
  using T = typename Traits::Element;
  using Rows = typename Traits::Rows;
  using TileState = typename Traits::TileState;
  static constexpr int kTileKeys = Traits::kTileKeys;

  // What a warp does beside computing, and beside describing work tiles.
  enum Role { kKeyLoader = 1, kValueLoader, kQueryLoader };
  static constexpr int kNone = 0, kSkipped = -1;
  static_assert(Traits::kTileStages == 8);

  static __device__ bool FindsInvalid(const TmaCta<Traits>& cta, const WorkTile& tile) {
    return __any_sync(~0u, FindsInvalidPage<2>(cta.attention, tile, cta.lane, 32));
  }

  // Each warp describes every fourth work tile of the CTA, all at the same time.
  struct Scheduler : TmaSchedulerWarp<Traits> {
    using TmaSchedulerWarp<Traits>::cta;
    unsigned next;  // work tile of the CTA
    __device__ Scheduler(const TmaCta<Traits>& cta, int warp)
        : TmaSchedulerWarp<Traits>{cta}, next(static_cast<unsigned>(warp)) {}

    // Describes this warp's next work tile to all warps. key_tiles: kNone where there are no more, kSkipped where its
    // rows see no key or the metadata are invalid, and they have been written here.
    template <typename Find>
    __device__ void Describe(Find find) {
      const TileState state{static_cast<int>(next % Traits::kTileStages), next / Traits::kTileStages % 2};
      cta.tiles.WaitEmpty(state);
      typename Traits::TileStage& stage = cta.Tile(state);
      WorkTile tile;
      if (!find(next, &tile)) {
        if (cta.lane == 0) stage.key_tiles = kNone;
      } else {
        const Rows rows(cta.attention, tile, cta.params.group);
        if (TmaSchedulerWarp<Traits>::Describe(rows, 0, 0, &stage) <= 0 || !tile.valid) {
          const bool nan = !tile.valid || FindsInvalid(cta, tile);
          FillTileRows<T>(rows, cta.attention, 0, 1, nan ? CUDART_NAN_F : 0.0f, nan ? CUDART_NAN_F : -CUDART_INF_F);
          if (cta.lane == 0) stage.key_tiles = kSkipped;
        }
      }
      cta.Arrive(cta.tiles.Full(state));
      next += 4;
    }
  };

  // Loads the key tiles of K or of V, one after the other over all work tiles.
  struct Loader : TmaKvWarp<Traits, /*kIsValues=*/true> {
    using Base = TmaKvWarp<Traits, /*kIsValues=*/true>;
    using Base::cta;
    const bool is_values;
    TileState work;
    PipelineState<1> state;
    int tile = 0, left = 0;
    typename Base::Box box;
    __device__ Loader(const TmaCta<Traits>& cta, bool is_values) : Base{cta}, is_values(is_values) { Enter(); }

    // Looks up the pages of the next key tile, whose loads Load starts: of the next work tile behind the last one. Once
    // for a work tile that is skipped.
    __device__ void LookUpNext() {
      if (--left > 0) {
        --tile;
        box = Base::LookUp(work, tile);
      } else {
        work.Advance();
        Enter();
      }
    }
    __device__ void Load() {
      if (left <= 0) return;
      const uint32_t full = is_values ? cta.values.Full({}) : cta.keys.Full({});
      WaitBarrier(full + static_cast<int>(offsetof(StageBarriers, empty)), state.phase ^ 1);
      Base::LoadTile(is_values ? cta.params.v_map : cta.params.k_map, is_values ? cta.Values(0) : cta.Keys(0), full,
                     work, box, Base::L2Policy(work));
      state.Advance();
    }
    // Whether some keys of a box are seen by a row of the work tile, and some are not.
    __device__ bool PartlySeen(TileState of, int key_tile) const {
      int begin, end;
      Base::SeenRows(of, key_tile, &begin, &end);
      const int row = cta.lane * cta.params.box_slots;
      const int row_end = row + cta.params.box_slots;
      return __any_sync(~0u, (begin > row && begin < row_end) || (end > row && end < row_end));
    }
    __device__ void Clear(uint32_t target, TileState of, int key_tile) const {
      Base::ClearUnseen(target, of, key_tile);
    }

   private:
    __device__ void Enter() {
      cta.tiles.WaitFull(work);
      left = cta.Tile(work).key_tiles;
      tile = cta.Tile(work).last_key_tile;
      if (left > 0) box = Base::LookUp(work, tile);
    }
  };

  // Loads Q of one work tile after the other, and checks their page numbers.
  struct QueryLoader : TmaQueryWarp<Traits> {
    using TmaQueryWarp<Traits>::cta;
    TileState work, checked;
    typename Traits::QueryState state;
    int known_seq = -1;  // whose page numbers have been checked
    bool known_invalid = false;
    explicit __device__ QueryLoader(const TmaCta<Traits>& cta) : TmaQueryWarp<Traits>{cta} {}

    // Of the next work tile.
    __device__ void Load() {
      cta.tiles.WaitFull(work);
      if (cta.Tile(work).key_tiles > 0) {
        TmaQueryWarp<Traits>::Load(work, state);
        state.Advance();
      }
      work.Advance();
    }
    __device__ void CheckPages() {
      cta.tiles.WaitFull(checked);
      typename Traits::TileStage& stage = cta.Tile(checked);
      if (stage.key_tiles <= 0) {
        cta.Arrive(cta.checked.Full(checked));  // of no use but for the barrier's phase
        checked.Advance();
        return;
      }
      const Rows& rows = stage.rows;
      if (rows.seq != known_seq) {
        const int context_len = rows.first_position + rows.q_len;
        known_invalid = FindsInvalid(cta, {rows.seq, rows.q_begin, rows.q_len, context_len, true, 0, 0, 0, -1});
        known_seq = rows.seq;
      }
      if (cta.lane == 0) stage.invalid_page = known_invalid;
      cta.Arrive(cta.checked.Full(checked));
      checked.Advance();
    }
  };
};

template <typename Traits>
struct TmaOneWarpgroupConsumer : TmaConsumer<Traits> {
  using Base = TmaConsumer<Traits>;
  using All = TmaOneWarpgroup<Traits>;
  using Base::cta;
  using T = typename Traits::Element;
  using TileState = typename Traits::TileState;
  static constexpr int kTileKeys = Traits::kTileKeys;

  __device__ explicit TmaOneWarpgroupConsumer(const TmaCta<Traits>& cta) : Base(cta, 0) {}

  template <typename Find>
  __device__ void Run(int warp, Find find) const {
    typename All::Scheduler scheduler(cta, warp);
    scheduler.Describe(find);
    const bool loads = warp == All::kKeyLoader || warp == All::kValueLoader;
    typename All::Loader loader(cta, warp == All::kValueLoader);
    typename All::QueryLoader query_loader(cta);
    if (loads) loader.Load();
    if (warp == All::kQueryLoader) {
      query_loader.Load();
      query_loader.CheckPages();
    }

    typename Base::TileTransform transform(cta.attention, /*kv_head=*/0);
    SeenKeysSoftmax softmax(warp * 16);
    TileState work;
    typename Traits::QueryState query;
    typename Traits::KeyState key;
    typename Traits::ValueState value;
    for (unsigned n = 0;; ++n, work.Advance()) {
      cta.tiles.WaitFull(work);
      const int key_tiles = cta.Tile(work).key_tiles;
      if (key_tiles == All::kNone) break;
      if (n % 4 == 0) scheduler.Describe(find);
      if (key_tiles == All::kSkipped) {
        if (loads) {
          loader.LookUpNext();
          loader.Load();
        }
        if (warp == All::kQueryLoader) {
          query_loader.CheckPages();
          query_loader.Load();
        }
        cta.Arrive(cta.tiles.Empty(work));
        continue;
      }
      if (warp == All::kQueryLoader) query_loader.CheckPages();
      const int first = cta.Tile(work).first_key_tile;
      float o[1][Base::kDimTiles][4];
      Base::Clear(o[0]);
      softmax.Reset();
      Base::WaitQuery(query);
      for (int tile = cta.Tile(work).last_key_tile; tile >= first; --tile) {
        float s[1][Base::kKeyTiles][4];
        uint32_t p[Base::kKeyTiles / 2][4];
        // Page numbers of the next key tile arrive beside the scores.
        if (loads) loader.LookUpNext();
        cta.keys.WaitFull(key);
        WgmmaFence();
        Base::StartScores(query.stage, /*part=*/0, key.stage, s[0]);
        WgmmaCommit();
        WgmmaWait<0>();
        WgmmaFenceOperand(s[0]);
        cta.Arrive(cta.keys.Empty(key));
        key.Advance();
        if (tile == first) cta.Arrive(cta.query.Empty(query));
        if (warp == All::kKeyLoader) loader.Load();
        if (warp == All::kQueryLoader && tile == first) query_loader.Load();
        const int seen = min(cta.Tile(work).rows.key_end - tile * kTileKeys, kTileKeys);
        softmax.Update<T>(cta.Tile(work).rows, transform, tile * kTileKeys, (seen + 15) / 16, s, p);
        if (softmax.NeedsRescale()) softmax.Rescale(o);
        cta.values.WaitFull(value);
        if (loader.PartlySeen(work, tile)) {
          if (warp == All::kValueLoader) loader.Clear(cta.Values(value.stage), work, tile);
          __syncthreads();
        }
        WgmmaFence();
        Base::StartValues(value.stage, p, o[0]);
        WgmmaCommit();
        WgmmaWait<0>();
        WgmmaFenceOperand(o[0]);
        cta.Arrive(cta.values.Empty(value));
        value.Advance();
        if (warp == All::kValueLoader) loader.Load();
      }
      query.Advance();
      cta.checked.WaitFull(work);
      StoreSectors<T>(softmax, cta.attention, cta.Tile(work).rows, transform, o, cta.Tile(work).invalid_page);
      cta.Arrive(cta.tiles.Empty(work));
    }
    if (warp == All::kQueryLoader) query_loader.Finish();
  }
};

// A CTA of the kernel. `decode_args`: none, or decode::DecodeArgs where it takes the sequences of the decode path too.
template <typename Traits, typename... DecodeArgs>
__device__ __forceinline__ void RunPrefillTmaOneWarpgroup(const TmaParams& params, const DecodeArgs&... decode_args) {
  extern __shared__ __align__(1024) char shared[];
  const TmaCta<Traits> cta(params, shared);
  const PagedAttentionParams& attention = params.attention;

  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp == 3) InitBarriers(cta);
  PrefetchMetadata(params);

  // ---- Dependent launch: see RunPrefillTma
  const bool behind_decode = params.behind_decode;
  if (!behind_decode) WaitForPreviousKernel();
  AllowDependentLaunch();

  const typename Traits::Scheduler scheduler(attention, params.group.divisor, params.kv_heads, cta.Storage().scheduler);
  if (scheduler.HasPaddingRows() && blockIdx.y == 0) {
    FillPaddingRows<typename Traits::Element>(attention, blockIdx.x, gridDim.x);
  }
  const bool empty = scheduler.IsEmpty();
  if (behind_decode && (!empty || (blockIdx.x == 0 && blockIdx.y == 0))) WaitForPreviousKernel();
  constexpr bool kTakesDecodeRows = sizeof...(DecodeArgs) > 0;
  bool has_decode_rows = false;
  // The only sequence is a prompt if there are work tiles.
  if constexpr (kTakesDecodeRows) has_decode_rows = (empty || attention.max_seqs > 1) && scheduler.HasDecodeRows();
  if (empty && !has_decode_rows) return;
  __syncthreads();
  if (!empty) {
    TmaOneWarpgroupConsumer<Traits>(cta).Run(warp, [&](unsigned n, WorkTile* tile) { return scheduler.Find(n, tile); });
  }
  if constexpr (kTakesDecodeRows) {
    if (!has_decode_rows) return;
    __syncthreads();  // shared memory is no longer read
    TakeWholeTiles<Traits>(decode_args..., shared);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(XLA_GPU_HAS_WGMMA ? Traits::kThreads : 32, kOneWarpgroupCtasPerSm)
    PrefillTmaOneWarpgroupKernel(const __grid_constant__ TmaParams params) {
#if XLA_GPU_HAS_WGMMA
  RunPrefillTmaOneWarpgroup<Traits>(params);
#endif
}

// The same, which also computes the sequences of the decode path: in a kernel of its own, since many short prompts,
// which the other one is for, wait for instructions.
template <typename Traits>
__global__ void __launch_bounds__(XLA_GPU_HAS_WGMMA ? Traits::kThreads : 32, kOneWarpgroupCtasPerSm)
    PrefillAndDecodeOneWarpgroupKernel(const __grid_constant__ TmaParams params,
                                       const __grid_constant__ decode::DecodeArgs decode_args) {
#if XLA_GPU_HAS_WGMMA
  RunPrefillTmaOneWarpgroup<Traits>(params, decode_args);
#endif
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_ONE_WARPGROUP_CUH_
