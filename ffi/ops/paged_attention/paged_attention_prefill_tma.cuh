// Prefill attention in float16 and bfloat16 for sm_90a, for pages of whole groups of eight slots. As many blocks as the
// GPU has SMs work on tile after tile of query rows (paged_attention_prefill_plan.cuh). In each, the copy engine brings
// tiles of K and V, page by page, into a ring in shared memory, and warpgroups compute, 64 rows each. A warpgroup's
// scores of one tile of keys run on the tensor cores together with the sum of values of the tile before, beneath the
// softmax; the warpgroups take turns, so that the softmax of one runs beneath the products of the others; and the first
// scores of the next tile of rows run beside the last values of this one.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_PREFILL_TMA_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_PREFILL_TMA_CUH_

#include <cstdint>
#include <type_traits>

#include "ffi/device/cached_copy.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/tensor_map.cuh"
#include "ffi/device/wgmma.cuh"
#include "ffi/ops/paged_attention/paged_attention_prefill_common.cuh"
#include "ffi/ops/paged_attention/paged_attention_prefill_fragments.cuh"
#include "ffi/ops/paged_attention/paged_attention_prefill_plan.cuh"
#include "ffi/ops/paged_attention/paged_attention_prefill_wgmma.cuh"

namespace xla_gpu {

struct PrefillTmaParams {
  PagedAttentionParams attention;
  CUtensorMap k_map;  // [num_pages][num_kv_heads][page_size][head_dim], in boxes of box_rows slots
  CUtensorMap v_map;
  int box_rows;  // divides page_size and the keys of a tile
};

// kDim: head_dim, rounded up to a multiple of 64; the rest of a row is zeros in shared memory. kKeys: keys of a tile.
// kConsumers: warpgroups that compute. k…Stages: tiles in the rings of Q, K and V.
template <typename T, int kDim, int kKeys, int kConsumers, int kQueryStages, int kKeyStages, int kValueStages>
struct PrefillTma {
  using Element = T;
  static constexpr int kTileKeys = kKeys;
  static constexpr int kGroupThreads = 128;
  static constexpr int kThreads = (1 + kConsumers) * kGroupThreads;
  static constexpr int kRows = kConsumers * 64;
  static constexpr int kKeyTiles = kKeys / 8;
  static constexpr int kDimTiles = kDim / 8;
  static constexpr int kChunks = kDim / 8;  // 16-byte chunks of a row
  static constexpr int kSlabs = kDim / 64;  // rows lie in slabs of 64 elements, as the tensor cores read them
  static constexpr int kQuerySlab = kRows * 128;
  static constexpr int kTileSlab = kKeys * 128;
  static constexpr int kQueryBytes = kRows * kDim * 2;
  static constexpr int kTileBytes = kKeys * kDim * 2;
  static constexpr int kSlots = 4;  // tiles of rows that are known at a time

  using Plan = PrefillPlan<kThreads, kRows>;

  // A tile of rows, as the scheduling warp describes it to the others.
  struct Slot {
    PrefillRows rows;
    int last_tile;  // of keys
    int tiles;      // of keys; 0: there are no more tiles of rows
    bool outside;   // some page of the sequence lies outside the cache
  };

  // Shared memory, from the start: Q stages, K stages, V stages, a word for each consumer, slots, plan, barriers.
  static constexpr int kKeyStart = kQueryStages * kQueryBytes;
  static constexpr int kValueStart = kKeyStart + kKeyStages * kTileBytes;
  static constexpr int kSumStart = kValueStart + kValueStages * kTileBytes;
  static constexpr int kSlotStart = kSumStart + kConsumers * kGroupThreads * 4;
  static constexpr int kPlanStart = kSlotStart + kSlots * static_cast<int>(sizeof(Slot));
  static constexpr int kBarrierStart = (kPlanStart + static_cast<int>(sizeof(typename Plan::Storage)) + 7) / 8 * 8;
  // Rings of stages, each with a barrier for full and one for free.
  static constexpr int kQueryRing = 0;
  static constexpr int kKeyRing = kQueryRing + kQueryStages;
  static constexpr int kValueRing = kKeyRing + kKeyStages;
  static constexpr int kSlotRing = kValueRing + kValueStages;
  static constexpr int kCheckRing = kSlotRing + kSlots;  // full: `outside` of the slot is known
  static constexpr int kSingle = kCheckRing + kSlots;    // for the warp that copies, alone
  static constexpr int kSharedBytes = kBarrierStart + (kSingle + 1) * 16;
  static_assert(alignof(Slot) <= 8 && kSlotStart % 8 == 0 && sizeof(Slot) % 8 == 0);
  static_assert(kDim % 64 == 0 && kKeys % 16 == 0 && kKeys <= 256 && kSharedBytes <= 227 * 1024);

  // Registers of a thread, in place of those that the launch gives each; together no more than an SM has.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 56 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 224 : 160;

  // A place in a ring, and how often the ring has been gone around, in its lowest bit.
  template <int kStages, int kRing>
  struct Place {
    int stage = 0;
    uint32_t round = 0;
    __device__ void Advance() {
      if (++stage == kStages) {
        stage = 0;
        round ^= 1;
      }
    }
    __device__ uint32_t Barrier(uint32_t barriers) const { return barriers + (kRing + stage) * 16; }
  };
  using QueryPlace = Place<kQueryStages, kQueryRing>;
  using KeyPlace = Place<kKeyStages, kKeyRing>;
  using ValuePlace = Place<kValueStages, kValueRing>;
  using SlotPlace = Place<kSlots, kSlotRing>;

  const PrefillTmaParams& tma;
  const PagedAttentionParams& params;
  char* const shared;  // aligned to 1024 bytes
  const uint32_t shared_address;
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;  // in the warpgroup
  const int lane = static_cast<int>(threadIdx.x) % 32;

  __device__ PrefillTma(const PrefillTmaParams& tma, char* shared)
      : tma(tma), params(tma.attention), shared(shared), shared_address(SharedAddress(shared)) {}

  template <typename AnyPlace>
  __device__ uint32_t Full(AnyPlace place) const {
    return place.Barrier(shared_address + kBarrierStart);
  }
  template <typename AnyPlace>
  __device__ uint32_t Free(AnyPlace place) const {
    return Full(place) + 8;
  }
  __device__ uint32_t Checked(SlotPlace place) const { return Full(place) + kSlots * 16; }
  __device__ uint32_t Single() const { return shared_address + kBarrierStart + kSingle * 16; }
  __device__ Slot& At(SlotPlace place) const { return reinterpret_cast<Slot*>(shared + kSlotStart)[place.stage]; }
  // Byte offset of a chunk of a row, in slabs of `slab` bytes.
  static __device__ int ChunkOffset(int slab, int row, int chunk) {
    return chunk / 8 * slab + row * 128 + ((chunk ^ row) & 7) * 16;
  }
  // Lets go of a stage or slot, for this warp.
  __device__ void Release(uint32_t barrier) const {
    __syncwarp();
    if (lane == 0) ArriveBarrier(barrier);
  }

  __device__ void Run() {
#if XLA_GPU_HAS_WGMMA
    const Plan plan(params, *reinterpret_cast<typename Plan::Storage*>(shared + kPlanStart));
    if (plan.HasUnownedRows() && blockIdx.y == 0) FillUnownedRows<T>(params, blockIdx.x, gridDim.x);
    if (blockIdx.x >= plan.Total()) return;
    if (threadIdx.x < kSingle + 1) {
      const int ring = static_cast<int>(threadIdx.x);
      const uint32_t barrier = shared_address + kBarrierStart + ring * 16;
      constexpr int kConsumerWarps = kConsumers * 4;
      InitBarrier(barrier, ring < kKeyRing ? 32 : 1);
      // Slots: also the three warps that copy.
      InitBarrier(barrier + 8, ring < kSlotRing ? kConsumerWarps : kConsumerWarps + 3);
      FenceForTensorCores();
    }
    __syncthreads();
    // The same in all lanes of a warp, and known to the compiler to be.
    const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
    if (group == 0) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
      const int warp = __shfl_sync(~0u, thread / 32, 0);
      if (warp == 0) {
        CopyTiles</*kValues=*/false>();
      } else if (warp == 1) {
        FindTiles(plan);
      } else if (warp == 2) {
        CopyTiles</*kValues=*/true>();
      } else {
        CopyQueries();
      }
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
      Consume(group - 1);
    }
#endif
  }

 private:
  // ---- the warp that finds tiles and looks at the sequences' pages
  __device__ void FindTiles(const Plan& plan) const {
    SlotPlace place;
    int known_seq = -1;  // a sequence whose pages have been looked at; each lane remembers one of its own
    bool known_outside = false;
    PrefillTile tile;
    for (unsigned n = 0; plan.Find(n, &tile); ++n) {
      WaitBarrier(Free(place), place.round ^ 1);
      Slot& slot = At(place);
      if (lane == 0) {
        slot.rows = PrefillRows(params, tile, kRows);
        const int first_tile = slot.rows.key_begin / kKeys;
        slot.last_tile = (slot.rows.key_end + kKeys - 1) / kKeys - 1;
        slot.tiles = slot.last_tile + 1 - first_tile;
      }
      __syncwarp();
      // Rows that see no key are written here.
      const bool computed = tile.valid && slot.tiles > 0;
      if (computed) Release(Full(place));
      if (tile.valid && __shfl_sync(~0u, known_seq, tile.seq % 32) != tile.seq) {
        const bool outside = __any_sync(~0u, FindsPageOutside<2>(params, tile, lane, 32));
        if (lane == tile.seq % 32) {
          known_seq = tile.seq;
          known_outside = outside;
        }
      }
      const bool outside = __shfl_sync(~0u, static_cast<int>(known_outside), tile.seq % 32) != 0;
      if (computed) {
        if (lane == 0) slot.outside = outside;
        Release(Checked(place));
        place.Advance();
      } else {
        const bool wrong = !tile.valid || outside;
        FillTile<T>(slot.rows, params, 0, 1, wrong ? CUDART_NAN_F : 0.0f, wrong ? CUDART_NAN_F : -CUDART_INF_F);
        __syncwarp();
      }
    }
    WaitBarrier(Free(place), place.round ^ 1);
    if (lane == 0) At(place).tiles = 0;
    Release(Full(place));
  }

  // ---- the warp that copies Q
  __device__ void CopyQueries() const {
    constexpr int kStepRows = 32 / kChunks;
    const T* const query = static_cast<const T*>(params.query) + lane % kChunks * 8;
    const bool in_row = lane % kChunks * 8 < params.head_dim;
    SlotPlace slot;
    QueryPlace place;
    for (;; slot.Advance(), place.Advance()) {
      WaitBarrier(Full(slot), slot.round);
      if (At(slot).tiles == 0) break;
      const PrefillRows& rows = At(slot).rows;
      WaitBarrier(Free(place), place.round ^ 1);
      const uint32_t target = shared_address + place.stage * kQueryBytes;
      for (int first = 0; first < kRows; first += 32) {
        // Of one row for each lane, passed on to those that copy it.
        const int head_row = first + lane < rows.count ? static_cast<int>(rows.HeadRow(first + lane)) : -1;
#pragma unroll 4
        for (int step = 0; step < 32; step += kStepRows) {
          const int row = step + lane / kChunks;
          const int source = __shfl_sync(~0u, head_row, row);
          const bool valid = source >= 0 && in_row;
          CopyAsync16(target + ChunkOffset(kQuerySlab, first + row, lane % kChunks),
                      query + (valid ? source * params.head_dim : 0), valid);
        }
      }
      ArriveAfterCopies(Full(place));
      Release(Free(slot));
    }
    // A thread must not end before its copies.
    CommitAsync();
    WaitAsync<0>();
  }

  // ---- the warps that have K and V copied
  // A tile of keys: what lane i knows of box i.
  struct Box {
    int page;  // as the table has it; -1: not read
    int row;   // slot of the page where the box begins
    bool cut;  // some of its rows are seen by a row of the block, and some are not
  };

  template <bool kValues>
  __device__ void CopyTiles() const {
    const CUtensorMap& map = kValues ? tma.v_map : tma.k_map;
    if (lane == 0) PrefetchTensorMap(map);
    SlotPlace slot;
    std::conditional_t<kValues, ValuePlace, KeyPlace> place;
    uint32_t single_round = 0;
    for (;; slot.Advance()) {
      WaitBarrier(Full(slot), slot.round);
      int left = At(slot).tiles;
      if (left == 0) break;
      int tile = At(slot).last_tile;
      Box next = LookUp(slot, tile);
      for (; left > 0; --left, --tile) {
        const Box box = next;
        // The next page numbers arrive while this tile's copies are under way; nothing may look at them before.
        if (left > 1) next = LookUp(slot, tile - 1);
        WaitBarrier(Free(place), place.round ^ 1);
        const uint32_t target = shared_address + (kValues ? kValueStart : kKeyStart) + place.stage * kTileBytes;
        if (kValues && __any_sync(~0u, box.cut)) {
          StartTile(map, target, Single(), slot, box);
          WaitBarrier(Single(), single_round);
          single_round ^= 1;
          ClearUnseen(target, slot, tile);
          Release(Full(place));
        } else {
          StartTile(map, target, Full(place), slot, box);
        }
        place.Advance();
      }
      Release(Free(slot));
    }
  }

  // The rows [*begin, *end) of a tile of keys are seen by some row of the block.
  __device__ void SeenRows(SlotPlace slot, int tile, int* begin, int* end) const {
    *begin = max(At(slot).rows.key_begin - tile * kKeys, 0);
    *end = min(At(slot).rows.key_end - tile * kKeys, kKeys);
  }

  __device__ Box LookUp(SlotPlace slot, int tile) const {
    int begin, end;
    SeenRows(slot, tile, &begin, &end);
    const int row = lane * tma.box_rows;
    const int row_end = row + tma.box_rows;
    const auto page_size = static_cast<unsigned>(params.page_size);
    const unsigned position = static_cast<unsigned>(tile) * kKeys + row;
    const unsigned index = position / page_size;
    int page = -1;
    if (row < end && row_end > begin) {
      page = __ldg(params.block_tables + At(slot).rows.seq * params.pages_per_seq + index);
    }
    const bool cut = (begin > row && begin < row_end) || (end > row && end < row_end);
    return {page, static_cast<int>(position - index * page_size), cut};
  }

  // Starts the copies of a tile to `target`. Boxes that are not read, and wrong pages, lie outside the tensor: they
  // become zeros.
  __device__ void StartTile(const CUtensorMap& map, uint32_t target, uint32_t barrier, SlotPlace slot,
                            const Box& box) const {
    const int kv_head = At(slot).rows.kv_head;
    const int page = box.page < params.num_pages ? box.page : -1;
    const int box_bytes = tma.box_rows * 128;
    if (ElectLane()) ArriveExpecting(barrier, kTileBytes);
    __syncwarp();
    constexpr int kBatch = 4;  // boxes, whose pages are passed on together
    for (int first = 0, offset = 0; offset < kTileSlab; first += kBatch, offset += kBatch * box_bytes) {
      int pages[kBatch], rows[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        pages[i] = __shfl_sync(~0u, page, first + i);
        rows[i] = __shfl_sync(~0u, box.row, first + i);
      }
      if (ElectLane()) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (offset + i * box_bytes < kTileSlab) {
#pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab) {
              CopyBox(target + slab * kTileSlab + offset + i * box_bytes, map, barrier, slab * 64, rows[i], kv_head,
                      pages[i]);
            }
          }
        }
      }
      __syncwarp();
    }
  }

  // A probability of zero keeps out any value but infinity and NaN, which unused slots may hold: rows of V that no row
  // of the block sees become zeros. Those in boxes of their own are not read; the others are overwritten here.
  __device__ void ClearUnseen(uint32_t target, SlotPlace slot, int tile) const {
    int begin, end;
    SeenRows(slot, tile, &begin, &end);
    const int box_rows = tma.box_rows;
    ClearRows(target, begin / box_rows * box_rows, begin);
    ClearRows(target, end, (end + box_rows - 1) / box_rows * box_rows);
    FenceForTensorCores();
  }

  __device__ void ClearRows(uint32_t tile, int begin, int end) const {
    for (int i = begin * 8 + lane; i < end * 8; i += 32) {
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + slab * kTileSlab + i * 16), "r"(0)
                     : "memory");
      }
    }
  }

  // ---- the warpgroups that compute
  using Softmax = PrefillSoftmax<1, 8>;

  __device__ void Consume(int group) const {
    SlotPlace slot;
    QueryPlace query_place;
    KeyPlace key_place;
    ValuePlace value_place;
    WaitBarrier(Full(slot), slot.round);
    int left = At(slot).tiles;  // of keys, whose scores have not been started
    if (left == 0) return;
    int position = At(slot).last_tile * kKeys;

    // NOTE: caches of 16-bit elements have no scales, which alone depend on the kv head.
    const PrefillScores scores(params, /*kv_head=*/0);
    Softmax softmax(group * 64 + thread / 32 * 16);
    float o[1][kDimTiles][4];
    float s[1][kKeyTiles][4];
    uint32_t p[kKeyTiles / 2][4];
    Clear(o[0]);

    WaitBarrier(Full(query_place), query_place.round);
    WaitBarrier(Full(key_place), key_place.round);
    FenceForTensorCores();
    FenceWgmma();
    StartScores(group, query_place.stage, key_place.stage, s[0]);
    CommitWgmma();
    if (group == kConsumers - 1) PassTurn(group);
    WaitWgmma<0>();
    ReadAfterWgmma(s[0]);
    Release(Free(key_place));
    key_place.Advance();
    if (--left == 0) Release(Free(query_place));
    softmax.Update(At(slot).rows, scores, position, NeedsMask(slot, position), s);
    PackProbabilities(s[0], p);

    SlotPlace ended = slot;
    for (;;) {
      const bool ends = left == 0;  // p is of a tile of rows' last keys, the scores of the next one's first
      if (ends) {
        ended = slot;
        slot.Advance();
        query_place.Advance();
        WaitBarrier(Full(slot), slot.round);
        left = At(slot).tiles;
        if (left == 0) break;
        position = At(slot).last_tile * kKeys;
        WaitBarrier(Full(query_place), query_place.round);
        // Q was written by ordinary copies.
        FenceForTensorCores();
      } else {
        position -= kKeys;
      }
      const bool mask = NeedsMask(slot, position);
      WaitBarrier(Full(key_place), key_place.round);
      WaitBarrier(Full(value_place), value_place.round);
      SyncNamed(kTurnBarrier + group, 2 * kGroupThreads);
      FenceWgmma();
      StartScores(group, query_place.stage, key_place.stage, s[0]);
      CommitWgmma();
      StartValues(value_place.stage, p, o[0]);
      CommitWgmma();
      PassTurn(group);
      WaitWgmma<1>();
      ReadAfterWgmma(s[0]);
      Release(Free(key_place));
      key_place.Advance();
      if (--left == 0) Release(Free(query_place));
      const Softmax before = softmax;
      if (ends) softmax.Reset();
      softmax.Update(At(slot).rows, scores, position, mask, s);
      // Nobody reads this; but the assembler would put off the exponentials until after the wait, which they are to
      // bridge.
      softmax.StoreSums(shared + kSumStart + (threadIdx.x - kGroupThreads) * 4);
      WaitWgmma<0>();
      ReadAfterWgmma(o[0]);
      Release(Free(value_place));
      value_place.Advance();
      if (ends) {
        Finish(ended, before, scores, o);
        Clear(o[0]);
      } else if (softmax.NeedsRescale()) {
        softmax.Rescale(o);
      }
      PackProbabilities(s[0], p);
    }
    // One turn was passed before the first.
    if (group == 0) SyncNamed(kTurnBarrier, 2 * kGroupThreads);
    WaitBarrier(Full(value_place), value_place.round);
    FenceWgmma();
    StartValues(value_place.stage, p, o[0]);
    CommitWgmma();
    WaitWgmma<0>();
    ReadAfterWgmma(o[0]);
    Finish(ended, softmax, scores, o);
  }

  __device__ void PassTurn(int group) const {
    ArriveNamed(kTurnBarrier + (group + 1 == kConsumers ? 0 : group + 1), 2 * kGroupThreads);
  }

  __device__ bool NeedsMask(SlotPlace slot, int position) const {
    const PrefillRows& rows = At(slot).rows;
    return position + kKeys - 1 > rows.first_row_last_key || position < rows.last_row_first_key;
  }

  __device__ void Finish(SlotPlace slot, const Softmax& softmax, const PrefillScores& scores,
                         const float (&o)[1][kDimTiles][4]) const {
    WaitBarrier(Checked(slot), slot.round);
    softmax.template FinishInRegisters<T>(params, At(slot).rows, scores, o, At(slot).outside);
    Release(Free(slot));
  }

  static __device__ void Clear(float (&o)[kDimTiles][4]) {
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[d][i] = 0.0f;
    }
  }

  __device__ void StartScores(int group, int query_stage, int key_stage, float (&s)[kKeyTiles][4]) const {
    const uint32_t q = shared_address + query_stage * kQueryBytes + group * 64 * 128;
    const uint32_t k = shared_address + kKeyStart + key_stage * kTileBytes;
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      Wgmma<T>(s, DescribeRows(q + step / 4 * kQuerySlab + step % 4 * 32),
               DescribeRows(k + step / 4 * kTileSlab + step % 4 * 32), step > 0);
    }
  }

  __device__ void StartValues(int stage, const uint32_t (&p)[kKeyTiles / 2][4], float (&o)[kDimTiles][4]) const {
    const uint32_t v = shared_address + kValueStart + stage * kTileBytes;
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      WgmmaColumns<T>(o, p[step], DescribeColumns(v + step * 16 * 128, kTileSlab));
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

  static constexpr int kTurnBarrier = 1;  // and on: a consumer's turn to start products
};

template <typename Kernel>
__global__ void __launch_bounds__(XLA_GPU_HAS_WGMMA ? Kernel::kThreads : 32, 1)
    PrefillTmaKernel(const __grid_constant__ PrefillTmaParams params) {
#if XLA_GPU_HAS_WGMMA
  extern __shared__ __align__(1024) char shared[];
  Kernel(params, shared).Run();
#endif
}

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_PREFILL_TMA_CUH_
