// A row of logits in the hands of a cluster of CTAs: passes over it, reductions, and the search for a distance from its
// largest logit.
#ifndef XLA_GPU_OPS_SAMPLE_ROW_CUH_
#define XLA_GPU_OPS_SAMPLE_ROW_CUH_

#include <climits>
#include <cstdint>

#include "ffi/device/cluster.cuh"
#include "ffi/ops/sample/packed_logits.cuh"
#include "ffi/ops/sample/sample_math.h"

namespace xla_gpu::sampling {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxCluster = 8;
constexpr int kBins = 1024;
constexpr int kBinBits = 10;
constexpr int kHalfBits = 15;  // of a mass: low and high bits have sums of their own, since shared memory adds 32 bits
constexpr uint32_t kMaxLogitsOf32Bits = 1 << 15;  // logits of a CTA whose halves of masses add up to 32 bits
// The first pass of a search: 64 bins for each power of two from 2^-8 to 2^8, where distances that matter lie.
constexpr uint32_t kFirstBin = 0x3b800000 >> 17;  // of 2^-8
constexpr int kFirstShift = 17;
constexpr int kCandidates = 2048;  // logits that one CTA finishes alone

struct Interval {
  uint32_t begin, end;  // bits of distances: [begin, end)
  uint64_t below;       // what the nearer ones weigh
  bool complete;        // the target is reached exactly at the end: no need to look further
};

struct SharedStorage {
  uint32_t low[kBins], high[kBins];
  uint64_t sums[kBins];               // of this CTA; then, in its share of the bins, of the cluster
  uint64_t of_ranks[3][kMaxCluster];  // one number from each CTA, for three uses in turn
  uint64_t of_warps[kWarps];
  Interval found;
  // What is left of the row once it is little: in each CTA its own, then in the first one all of it.
  float logits[kCandidates];
  uint32_t indices[kCandidates];
  int count;
  int bound;  // below this CTA's best score, as an integer that is ordered as scores are
};

template <typename Op>
__device__ __forceinline__ uint64_t WarpReduce(uint64_t value, const Op& op) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = op(value, __shfl_xor_sync(0xffffffff, value, offset));
  return value;
}

// Integers that are ordered as the numbers are.
__device__ __forceinline__ int OrderedOfFloat(float x) {
  const int bits = __float_as_int(x);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}
__device__ __forceinline__ float FloatOfOrdered(int ordered) {
  return __int_as_float(ordered < 0 ? ordered ^ 0x7fffffff : ordered);
}

struct Sum {
  __device__ __forceinline__ uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};
struct Min {
  __device__ __forceinline__ uint64_t operator()(uint64_t a, uint64_t b) const { return a < b ? a : b; }
};
struct Max {
  __device__ __forceinline__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};

// One row, seen by one thread of its cluster.
template <typename T>
class Row {
 public:
  static constexpr int kSize = 16 / sizeof(T);  // logits of 16 bytes

  __device__ Row(const T* logits, int64_t vocab, bool aligned, SharedStorage& shared)
      : logits_(logits),
        vocab_(vocab),
        aligned_(aligned),
        shared_(shared),
        rank_(ClusterRank()),
        ranks_(ClusterSize()) {}

  // body(index of the first, logits[kSize], u), for this thread's vectors: u counts from 0 to kUnroll - 1, and their
  // loads are in flight together. Then after(index of the first, step) for these kUnroll together: from u to u + 1 it
  // is `step` logits.
  template <int kUnroll, typename Body, typename After>
  __device__ __forceinline__ void ForEachVector(const Body& body, const After& after) const {
    const uint32_t vectors = Vectors();
    const uint32_t step = ranks_ * kThreads;
    for (uint32_t i = rank_ * kThreads + threadIdx.x; i < vectors; i += kUnroll * step) {
      PackedLogits loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i + u * step < vectors) loaded[u] = Load(i + u * step);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i + u * step < vectors) Visit(i + u * step, loaded[u], u, body);
      }
      after(i * kSize, step * kSize);
    }
  }
  template <typename Body>
  __device__ __forceinline__ void ForEachVector(const Body& body) const {
    ForEachVector<4>(body, [](uint32_t, uint32_t) {});
  }

  template <typename Body>  // body(logit, index)
  __device__ __forceinline__ void ForEach(const Body& body) const {
    if (collected_) {
      for (int i = threadIdx.x; i < shared_.count; i += kThreads) body(shared_.logits[i], shared_.indices[i]);
      return;
    }
    ForEachVector([&](uint32_t first, const float* logits, int) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        body(logits[j], first + j);
      }
    });
  }

  __device__ __forceinline__ void Sync() const {
    if (ranks_ == 1) {
      __syncthreads();
    } else {
      ClusterSync();
    }
  }

  // The largest of the CTA's `mine`, in shared memory.
  __device__ int* SharedBound(float mine) {
    if (threadIdx.x == 0) shared_.bound = INT_MIN;
    __syncthreads();
    const int of_warp = __reduce_max_sync(0xffffffff, OrderedOfFloat(mine));
    if (threadIdx.x % 32 == 0) atomicMax(&shared_.bound, of_warp);
    __syncthreads();
    return &shared_.bound;
  }
  // Of this thread's first vector.
  __device__ __forceinline__ uint32_t FirstIndex() const { return (rank_ * kThreads + threadIdx.x) * kSize; }
  __device__ __forceinline__ bool collected() const { return collected_; }
  // Whether this CTA has nothing to do any more, since the first one finishes alone.
  __device__ __forceinline__ bool idle() const { return collected_ && rank_ != 0; }

  // Over the cluster, the same in every thread.
  template <typename Op>
  __device__ uint64_t Reduce(uint64_t value, const Op& op) {
    value = WarpReduce(value, op);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared_.of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    uint64_t* const slot = shared_.of_ranks[turn_];
    turn_ = (turn_ + 1) % 3;
    if (threadIdx.x < ranks_) {
      value = shared_.of_warps[0];
      for (int warp = 1; warp < kWarps; ++warp) value = op(value, shared_.of_warps[warp]);
      SharedOf(slot, threadIdx.x)[rank_] = value;
    }
    Sync();
    value = slot[0];
    for (uint32_t r = 1; r < ranks_; ++r) value = op(value, slot[r]);
    return value;
  }

  // Of the logits up to `limit`, in the order of their distances, as many as make `weigh` add up to `target`: returns
  // bits between the last one's distance and the next one's; `limit` where there is less than that.
  template <bool kMass, typename Weigh>
  __device__ uint32_t Search(float largest, uint32_t limit, uint64_t target, const Weigh& weigh) {
    Interval now = {0, limit + 1, 0, false};
    int shift = kFirstShift;
    for (bool first = true;; first = false) {
      Histogram<kMass>(largest, now, first, shift, weigh);
      const Interval next = Find(now, first, shift, target);
      if (next.end == 0) return limit;
      now = next;
      if (first && !collected_) Collect(largest, now.end);
      if (idle() || now.complete || now.end - now.begin == 1) return now.end - 1;
      shift = max(32 - __clz(now.end - now.begin - 1) - kBinBits, 0);
    }
  }

 private:
  __device__ __forceinline__ uint32_t Vectors() const { return static_cast<uint32_t>((vocab_ + kSize - 1) / kSize); }

  // Past the row's end logits are minus infinity: no choice.
  __device__ __forceinline__ PackedLogits Load(uint32_t i) const {
    if (aligned_) return reinterpret_cast<const PackedLogits*>(logits_)[i];
    const auto* const row = reinterpret_cast<const typename LogitBits<T>::Type*>(logits_);
    constexpr int kOfWord = kSize / 4;
    PackedLogits packed;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      packed.words[word] = 0;
#pragma unroll
      for (int j = 0; j < kOfWord; ++j) {
        const int64_t at = static_cast<int64_t>(i) * kSize + word * kOfWord + j;
        packed.words[word] |= static_cast<uint32_t>(at < vocab_ ? row[at] : LogitBits<T>::kMinusInfinity) << (16 * j);
      }
    }
    return packed;
  }

  template <typename Body>
  __device__ __forceinline__ void Visit(uint32_t i, const PackedLogits& packed, int u, const Body& body) const {
    float logits[kSize];
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      logits[j] = LogitBits<T>::Value(
          static_cast<typename LogitBits<T>::Type>(packed.words[j * 4 / kSize] >> (16 * (j % (kSize / 4)))));
    }
    body(i * kSize, logits, u);
  }

  // Where the first CTA's memory holds all logits up to `end`, makes them the row. The others are then idle.
  __device__ void Collect(float largest, uint32_t end) {
    if (threadIdx.x == 0) shared_.count = 0;
    __syncthreads();
    ForEachVector([&](uint32_t first, const float* logits, int) {
      uint32_t near = 0;
#pragma unroll
      for (int j = 0; j < kSize; ++j) near |= (Bits(Distance(largest, logits[j])) < end) << j;
      if (near == 0 || *static_cast<volatile int*>(&shared_.count) > kCandidates) return;
      int at = atomicAdd(&shared_.count, __popc(near));
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        if ((near >> j & 1) == 0) continue;
        if (at < kCandidates) {
          shared_.logits[at] = logits[j];
          shared_.indices[at] = first + j;
        }
        ++at;
      }
    });
    __syncthreads();
    const auto mine = static_cast<uint64_t>(shared_.count);
    const uint64_t total = Reduce(threadIdx.x == 0 ? mine : 0, Sum());
    if (total > kCandidates) return;
    collected_ = true;
    if (rank_ != 0) return;
    int at = static_cast<int>(mine);
    for (uint32_t r = 1; r < ranks_; ++r) {
      const int count = *SharedOf(&shared_.count, r);
      const float* const logits = SharedOf(shared_.logits, r);
      const uint32_t* const indices = SharedOf(shared_.indices, r);
      for (int i = threadIdx.x; i < count; i += kThreads) {
        shared_.logits[at + i] = logits[i];
        shared_.indices[at + i] = indices[i];
      }
      at += count;
    }
    __syncthreads();
    if (threadIdx.x == 0) shared_.count = at;
    ranks_ = 1;
    __syncthreads();
  }

  // Adds up the weights of `now`'s logits by bin, and leaves each CTA of the cluster the sums of its share of the bins.
  // The first bins are those of kFirstBin: what is nearer or farther than they reach counts with the first or the last.
  template <bool kMass, typename Weigh>
  __device__ void Histogram(float largest, const Interval& now, bool first, int shift, const Weigh& weigh) {
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
      shared_.low[bin] = shared_.high[bin] = 0;
      shared_.sums[bin] = 0;
    }
    __syncthreads();
    const uint32_t origin = first ? kFirstBin << kFirstShift : now.begin;
    const auto add = [&](float logit) {
      const float distance = Distance(largest, logit);
      const uint32_t key = Bits(distance);
      if (key - now.begin >= now.end - now.begin) return;
      const uint32_t weight = weigh(distance);
      if (kMass && weight == 0) return;
      const uint32_t bin = min((max(key, origin) - origin) >> shift, static_cast<uint32_t>(kBins - 1));
      atomicAdd(&shared_.low[bin], kMass ? weight & ((1u << kHalfBits) - 1) : weight);
      if (kMass && weight >> kHalfBits != 0) atomicAdd(&shared_.high[bin], weight >> kHalfBits);
    };
    const auto accumulate = [&] {
      __syncthreads();
      for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
        shared_.sums[bin] += shared_.low[bin] + (static_cast<uint64_t>(shared_.high[bin]) << kHalfBits);
        shared_.low[bin] = shared_.high[bin] = 0;
      }
      __syncthreads();
    };
    if (collected_) {
      for (int i = threadIdx.x; i < shared_.count; i += kThreads) add(shared_.logits[i]);
      accumulate();
    } else {
      const uint32_t vectors = Vectors();
      const uint32_t step = ranks_ * kThreads;
      const uint32_t rounds = (vectors + step - 1) / step;
      constexpr uint32_t kRounds = kMaxLogitsOf32Bits / (kThreads * kSize);
      for (uint32_t begin = 0; begin < rounds; begin += kRounds) {
        const uint32_t end = min(begin + kRounds, rounds);
#pragma unroll 4
        for (uint32_t round = begin; round < end; ++round) {
          const uint32_t i = round * step + rank_ * kThreads + threadIdx.x;
          if (i >= vectors) break;
          Visit(i, Load(i), 0, [&](uint32_t, const float* logits, int) {
#pragma unroll
            for (int j = 0; j < kSize; ++j) {
              add(logits[j]);
            }
          });
        }
        accumulate();
      }
    }
    Sync();
    const int share = kBins / static_cast<int>(ranks_);
    const int first_bin = static_cast<int>(rank_) * share;
    for (int bin = first_bin + threadIdx.x; bin < first_bin + share; bin += kThreads) {
      uint64_t sum = shared_.sums[bin];
      for (uint32_t r = 1; r < ranks_; ++r) sum += SharedOf(shared_.sums, (rank_ + r) % ranks_)[bin];
      shared_.sums[bin] = sum;  // of this CTA's share no other one reads
    }
  }

  // The bin in which the target is reached, as an interval; its end is 0 where it is not reached.
  __device__ Interval Find(const Interval& now, bool first, int shift, uint64_t target) {
    const int share = kBins / static_cast<int>(ranks_);
    const int first_bin = static_cast<int>(rank_) * share;
    const int each = (share + kThreads - 1) / kThreads;  // bins of a thread, neighbours
    const int begin = first_bin + min(static_cast<int>(threadIdx.x) * each, share);
    const int end = first_bin + min(static_cast<int>(threadIdx.x + 1) * each, share);
    __syncthreads();
    uint64_t mine = 0;
    for (int bin = begin; bin < end; ++bin) mine += shared_.sums[bin];
    // What the bins before this thread's weigh: in its warp, then in its CTA, then in the cluster.
    uint64_t upto = mine;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint64_t other = __shfl_up_sync(0xffffffff, upto, offset);
      if (static_cast<int>(threadIdx.x % 32) >= offset) upto += other;
    }
    if (threadIdx.x % 32 == 31) shared_.of_warps[threadIdx.x / 32] = upto;
    if (threadIdx.x == 0) shared_.found.end = 0;
    __syncthreads();
    uint64_t before = now.below + upto - mine, total = 0;
    for (int warp = 0; warp < kWarps; ++warp) {
      if (warp < static_cast<int>(threadIdx.x / 32)) before += shared_.of_warps[warp];
      total += shared_.of_warps[warp];
    }
    uint64_t* const slot = shared_.of_ranks[turn_];
    turn_ = (turn_ + 1) % 3;
    if (threadIdx.x < ranks_) SharedOf(slot, threadIdx.x)[rank_] = total;
    Sync();
    for (uint32_t r = 0; r < rank_; ++r) before += slot[r];
    if (before < target && before + mine >= target) {  // one thread of the cluster, or none
      int bin = begin;
      while (before + shared_.sums[bin] < target) before += shared_.sums[bin++];
      Interval found;
      found.below = before;
      found.complete = before + shared_.sums[bin] == target;
      if (first) {
        found.begin = bin == 0 ? 0 : (kFirstBin + bin) << kFirstShift;
        found.end = bin == kBins - 1 ? now.end : (kFirstBin + bin + 1) << kFirstShift;
      } else {
        found.begin = now.begin + (static_cast<uint32_t>(bin) << shift);
        found.end = found.begin + (1u << shift);
      }
      found.end = min(found.end, now.end);
      for (uint32_t r = 0; r < ranks_; ++r) *SharedOf(&shared_.found, r) = found;
    }
    Sync();
    return shared_.found;
  }

  const T* const logits_;
  const int64_t vocab_;
  const bool aligned_;
  SharedStorage& shared_;
  const uint32_t rank_;
  uint32_t ranks_;
  int turn_ = 0;
  bool collected_ = false;
};

}  // namespace xla_gpu::sampling

#endif  // XLA_GPU_OPS_SAMPLE_ROW_CUH_
