// The split kernel of the decode path: each block is a worker and computes the chunks of keys that it owns.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_KERNEL_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_KERNEL_CUH_

#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_merge.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_plan.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_tile.cuh"

namespace xla_gpu::decode {

template <typename S>
using DecodePlan = Plan<S::kThreads, S::kBlockKeys, S::kRows>;

// The chunks of a unit that are a worker's.
struct Share {
  int begin;
  int end;
  bool whole;

  __device__ bool Has(int chunk) const { return begin <= chunk && chunk < end; }
};

template <typename S>
struct SplitShared {
  // Rows are a little longer than a multiple of 128 bytes: columns of neighbouring rows lie in other banks.
  static constexpr int kStride = S::kDim + 4;
  alignas(16) float out[S::kWarps][S::kRows][kStride];
  alignas(16) float4 group_out[S::kRows * S::kDim / 4];  // over the chunks of a group so far
  alignas(16) float4 unit_out[S::kRows * S::kDim / 4];   // over the groups of a unit so far
  Softmax softmax[S::kWarps][S::kRows];
  // Read by all threads of a row and written by one: in turns, by the parity of the chunk.
  Softmax group_softmax[2][S::kRows];
  Softmax unit_softmax[2][S::kRows];
  uint4 query[S::kSteps][32];
  typename DecodePlan<S>::Shared plan;
  // Of the unit at hand, what is needed at the end of a chunk: there are no registers for it.
  UnitPlace place;
  Share share;
  int64_t unit;    // its index
  uint64_t begin;  // of the worker's part of the line
  uint64_t end;
};

// A worker's walk over the line.
template <typename S>
class Worker {
 public:
  __device__ Worker(const DecodeArgs& args, SplitShared<S>& shared) : args_(args), shared_(shared) {}

  __device__ void Run() {
    DecodePlan<S> plan(args_, shared_.plan);
    const uint64_t begin = plan.WorkerBegin(blockIdx.x);
    const uint64_t end = min(plan.WorkerBegin(blockIdx.x + 1), plan.Total());
    if (begin >= end) return Describe({});
    shared_.begin = begin;
    shared_.end = end;
    int index = plan.Find(begin);
    const PlanEntry* entry = &plan.At(index);
    const uint64_t into = begin - entry->begin;
    const unsigned length = static_cast<unsigned>(entry->chunks * entry->blocks);
    unsigned unit = static_cast<unsigned>(into >> 32 ? into / length : static_cast<uint32_t>(into) / length);
    // A chunk that began before belongs to another worker.
    const unsigned blocks = static_cast<unsigned>(entry->blocks);
    int chunk = static_cast<int>((static_cast<unsigned>(into - uint64_t{unit} * length) + blocks - 1) / blocks);
    // If the worker before has begun the unit in which this one begins, this one is the second and describes it.
    const uint64_t unit_begin = UnitPlace::Of(*entry, unit).begin;
    const bool second = unit_begin < begin && plan.WorkerBegin(blockIdx.x - 1) <= unit_begin;
    Describe(second ? plan.Job(*entry, plan.SequenceOf(index), unit) : MergeJob{});
    while (true) {
      if (UnitPlace::Of(*entry, unit).begin + static_cast<unsigned>(chunk * entry->blocks) >= shared_.end) return;
      if (chunk < entry->chunks) RunUnit(index, plan.SequenceOf(index), unit, chunk);
      chunk = 0;
      entry = &plan.At(index);
      if (++unit == static_cast<unsigned>(entry->units) * static_cast<unsigned>(args_.params.num_kv_heads)) {
        if (entry->end >= shared_.end) return;
        index = plan.Next(index);
        entry = &plan.At(index);
        unit = 0;
      }
    }
  }

 private:
  // Leaves a job behind for the block that merges.
  __device__ void Describe(const MergeJob& job) {
    if (!args_.slots_by_unit && threadIdx.x == 0) *Scratch::Job(args_, blockIdx.x) = job;
  }

  // Computes the unit's chunks from `chunk` on, as far as they are this worker's.
  __device__ void RunUnit(int entry_index, int sequence, unsigned unit_of_entry, int chunk) {
    const PagedAttentionParams& params = args_.params;
    const PlanEntry& entry = shared_.plan.entries[entry_index];
    const UnitPlace place = UnitPlace::Of(entry, unit_of_entry);
    if (entry.end_key == entry.first_key) return StoreConstant(entry, place);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;

    // The worker has the chunks up to:
    const uint64_t room = shared_.end - place.begin + static_cast<unsigned>(entry.blocks) - 1;
    const uint64_t length = static_cast<unsigned>(entry.chunks * entry.blocks);
    const int end = room >= length
                        ? entry.chunks
                        : static_cast<int>(static_cast<unsigned>(room) / static_cast<unsigned>(entry.blocks));
    const Share share = {chunk, end, chunk == 0 && end == entry.chunks};
    const int begin_key = entry.first_key + chunk * entry.blocks * S::kBlockKeys;
    const int end_key = end == entry.chunks ? entry.end_key : entry.first_key + end * entry.blocks * S::kBlockKeys;

    UnitView unit;
    const int64_t head = place.kv_head * params.head_stride * S::kElementBytes;
    unit.keys = static_cast<const char*>(params.k_cache) + head + lane % 4 * 16;
    unit.values = static_cast<const char*>(params.v_cache) + head + lane / 4 * S::kValueBytes;
    unit.pages = params.block_tables + sequence * params.pages_per_seq;
    unit.entry = &entry;
    unit.row_tile = place.row_tile;
    unit.end_key = end_key;
    unit.hidden_by_end = min(0, entry.end_key - end_key - entry.q_len + 1);
    // The compiler would rather add the parameters' addresses again for each key.
    asm("" : "+l"(unit.keys), "+l"(unit.values), "+l"(unit.pages));

    // Keys are asked for before the query is waited for. Each warp has a tile of every block of keys; past the last key
    // it fetches that key again, and takes its scores away.
    int left = end_key - begin_key - warp * S::kTileKeys;  // keys from the tile's first one on; may be negative
    bool bad = false;
    const Columns<S> columns(args_);
    Lookup lookup;
    lookup.Start(args_, unit, left, S::kTileKeys);
    Query<S> query;
    query.Load(args_, entry, place);
    uint32_t slot = lookup.Slot(args_, &bad);
    KeyTile<S> keys;
    keys.Load(args_, unit.keys, slot, columns);
    lookup.Start(args_, unit, left - S::kBlockKeys, S::kTileKeys);
    __syncthreads();  // what stands there is no longer read
    query.Share(shared_.query);
    if (threadIdx.x == 0) {
      shared_.place = place;
      shared_.share = share;
      shared_.unit = UnitIndex(args_, sequence, place);
    }
    __syncthreads();

    Running<S> running;
    running.Clear();
    int blocks = (end_key - begin_key - 1) / S::kBlockKeys + 1;
    int of_chunk = entry.blocks;
    // NOTE: values are fetched at the top of a turn although there was time to before. Where registers of loads in
    // flight are passed on or merged, the compiler may move them, and wait for them.
    while (true) {
      ValueTile<S> values;
      typename Running<S>::Scores scores;
      if constexpr (S::kOverlap) values.Load(args_, unit.values, slot, columns);
      Running<S>::Multiply(args_, keys, shared_.query, scores);
      if constexpr (!S::kOverlap) values.Load(args_, unit.values, slot, columns);
      slot = lookup.Slot(args_, &bad);
      if constexpr (S::kOverlap) keys.Load(args_, unit.keys, slot, columns);
      left -= S::kBlockKeys;
      lookup.Start(args_, unit, left - S::kBlockKeys, S::kTileKeys);
      running.Weigh(args_, unit, query, left + S::kBlockKeys, scores);
      running.AddValues(values, scores);
      if constexpr (!S::kOverlap) keys.Load(args_, unit.keys, slot, columns);
      --blocks;
      if (--of_chunk > 0 && blocks > 0) continue;
      running.Close(__any_sync(0xffffffffu, bad));
      Stage(*unit.entry, running);
      Collect(*unit.entry, chunk);
      if (blocks == 0) return;
      running.Clear();
      of_chunk = unit.entry->blocks;
      ++chunk;
    }
  }

  // The rows of a sequence without keys: 0, or NaN if it is not valid.
  __device__ void StoreConstant(const PlanEntry& entry, const UnitPlace& place) {
    const int rows = min(entry.q_len * args_.group - place.row_tile * S::kRows, S::kRows);
    const int columns = static_cast<int>(args_.params.head_dim) / 4;
    const Partial nothing = {{-INFINITY, entry.valid ? 0.0f : NAN}, {0.0f, 0.0f, 0.0f, 0.0f}};
    for (int i = static_cast<int>(threadIdx.x); i < rows * columns; i += S::kThreads) {
      const int row = place.row_tile * S::kRows + i / columns;
      StoreRow(args_, RowPlace::Of(args_, entry.q_begin, place.kv_head, row), i % columns * 4, nothing);
    }
  }

  // Hands this warp's result of a chunk to the block.
  __device__ void Stage(const PlanEntry& entry, const Running<S>& running) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int rows = min(entry.q_len * args_.group - shared_.place.row_tile * S::kRows, S::kRows);
    __syncthreads();  // the last chunk's are no longer read
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
      if (lane % 4 == 0) shared_.softmax[warp][8 * n + lane / 4] = {running.max[n], running.sum[n]};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * n + lane % 4 * 2 + i;
        if (row >= rows) continue;
#pragma unroll
        for (int j = 0; j < S::kOutTiles; j += 2) {
          constexpr int kLaneTiles = S::kValueColumns / 2;
          const int column = (j / kLaneTiles * 8 + lane / 4) * S::kValueColumns + j % kLaneTiles * 2;
          *reinterpret_cast<float4*>(&shared_.out[warp][row][column]) = {
              running.out[j][n][i], running.out[j][n][i + 2], running.out[j + 1][n][i], running.out[j + 1][n][i + 2]};
        }
      }
    }
    __syncthreads();
  }

  // Merges the warps' results of a chunk, and these with those of the chunks before it.
  __device__ void Collect(const PlanEntry& entry, int chunk) {
    const UnitPlace place = shared_.place;
    const Share share = shared_.share;
    const int64_t unit_index = shared_.unit;
    const int parity = chunk % 2;
    const int first = chunk / kGroupChunks * kGroupChunks;
    const int last = min(first + kGroupChunks, entry.chunks) - 1;
    // Of the owners it matters only which are this worker.
    const GroupPlace group = {share.Has(0) ? blockIdx.x : ~0u, share.Has(first) ? blockIdx.x : ~0u,
                              share.Has(last) ? blockIdx.x : ~1u};
    const int rows = min(entry.q_len * args_.group - place.row_tile * S::kRows, S::kRows);
    const int head_dim = static_cast<int>(args_.params.head_dim);
    for (int i = static_cast<int>(threadIdx.x); i < rows * (S::kDim / 4); i += S::kThreads) {
      const int row = i / (S::kDim / 4);
      const int column = i % (S::kDim / 4) * 4;
      if (column >= head_dim) continue;
      Partial of_warp[S::kWarps];
#pragma unroll
      for (int warp = 0; warp < S::kWarps; ++warp) {
        of_warp[warp] = {shared_.softmax[warp][row], *reinterpret_cast<const float4*>(&shared_.out[warp][row][column])};
      }
      MergeParts(of_warp, S::kWarps);
      Partial result = of_warp[0];
      if (!share.whole && !group.Whole()) {
        Scratch::Store(args_, group.Slot(args_, unit_index, chunk, blockIdx.x), row, column, result);
        continue;
      }
      if (chunk > first) {
        Partial before = {shared_.group_softmax[parity][row], shared_.group_out[i]};
        before.Add(result);
        result = before;
      }
      if (chunk < last) {
        if (column == 0) shared_.group_softmax[1 - parity][row] = result.softmax;
        shared_.group_out[i] = result.out;
        if (chunk > kGroupChunks - 1 && share.whole && column == 0) {
          shared_.unit_softmax[1 - parity][row] = shared_.unit_softmax[parity][row];
        }
        continue;
      }
      if (!share.whole) {
        Scratch::Store(args_, group.Slot(args_, unit_index, first, blockIdx.x), row, column, result);
        continue;
      }
      if (first > 0) {
        Partial before = {shared_.unit_softmax[parity][row], shared_.unit_out[i]};
        before.Add(result);
        result = before;
      }
      if (last + 1 < entry.chunks) {
        if (column == 0) shared_.unit_softmax[1 - parity][row] = result.softmax;
        shared_.unit_out[i] = result.out;
        continue;
      }
      StoreRow(args_, RowPlace::Of(args_, entry.q_begin, place.kv_head, place.row_tile * S::kRows + row), column,
               result);
    }
  }

  const DecodeArgs& args_;
  SplitShared<S>& shared_;
};

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerSm)
    DecodeSplitKernel(const __grid_constant__ DecodeArgs args) {
  extern __shared__ __align__(16) char dynamic_shared[];
  AllowDependentLaunch();
  Worker<S>(args, *reinterpret_cast<SplitShared<S>*>(dynamic_shared)).Run();
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_KERNEL_CUH_
