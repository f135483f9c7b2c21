// all_reduce on GPUs. Four kernels: over a device group the low-latency one (each rank sends its whole message to every
// peer, in packets) for small messages; for larger ones, in words, that of two ranks, which send each other all, and
// the two-shot one of more (each rank sums a share and sends it on); and the sum of parts that XLA gathered.
//
// The CTAs of a call depend on the CTAs of the same index on the peers alone, so that they need not all run at once.
#include <algorithm>
#include <climits>
#include <type_traits>

#include "ffi/base/cuda_status.h"
#include "ffi/device/dispatch.cuh"
#include "ffi/ops/all_reduce/all_reduce.h"
#include "ffi/ops/all_reduce/exchange.cuh"

namespace xla_gpu {
namespace {

constexpr int kAllReduceThreads = 256;
constexpr int kMaxTwoShotBlocks = 1024;
constexpr int kTwoShotThreads = 1024;  // of an SM, at least
constexpr int kFewBlocks = 128;

// ---- Low latency ----

template <typename T, int kRanks>
__global__ void __launch_bounds__(kAllReduceThreads) LowLatencyKernel(const __grid_constant__ GroupView group,
                                                                      const T* __restrict__ x,  // [size]
                                                                      T* __restrict__ out,      // [size]
                                                                      int64_t size, bool aligned) {
  const int64_t vectors = (size + Vector<T>::kSize - 1) / Vector<T>::kSize;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kAllReduceThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kAllReduceThreads + threadIdx.x;
  Vector<T> own;
  if (first < vectors) own = LoadVector(x, first, size, aligned);
  const Call call = BeginCall(group);
  Deadline deadline(group, call.broken);
  // All is on its way before the first is waited for.
  if (first < vectors) SendPackets<T, kRanks>(group, call, first, own);
  for (int64_t i = first + step; i < vectors; i += step) {
    SendPackets<T, kRanks>(group, call, i, LoadVector(x, i, size, aligned));
  }
  for (int64_t i = first; i < vectors; i += step) {
    if (i != first) own = LoadVector(x, i, size, aligned);
    StoreVector(out, i, size, aligned, SumPackets<T, kRanks>(group, call, i, own, &deadline));
  }
  EndCall(group, call);
}

// Vectors that a thread of the next kernels has under way at once.
constexpr int kBatch = 4;

// ---- Two ranks ----

template <typename T>
__global__ void __launch_bounds__(kAllReduceThreads) PairKernel(const __grid_constant__ GroupView group,
                                                                const T* __restrict__ x,  // [size]
                                                                T* __restrict__ out,      // [size]
                                                                int64_t size, bool aligned) {
  using V = Vector<T>;
  const int64_t vectors = (size + V::kSize - 1) / V::kSize;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kAllReduceThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kAllReduceThreads + threadIdx.x;
  V own[kBatch];
  const int peer = 1 - group.rank;
  const auto send = [&](const Call& call, int64_t i, const V& vector) { SendWords<T, 2>(group, call, i, vector); };
  const auto add = [&](const V& peers, V* vector) {  // of two, in any order: the same bits
    VectorSum<T> sum;
    sum.Set(*vector);
    sum.Add(peers);
    *vector = sum.Round();
  };
  if (aligned) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b * step < vectors) own[b] = LoadVector(x, first + b * step, size, true);
    }
  }
  const Call call = BeginCall(group);
  Deadline deadline(group, call.broken);
  const WordArea area = Words(group, call, group.rank, peer);
  // All is on its way before the first is waited for.
  if (aligned) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b * step < vectors) send(call, first + b * step, own[b]);
    }
    V peers[kBatch];
    TakeWords(peer, call, area, first, step, vectors, peers, &deadline);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b * step < vectors) {
        add(peers[b], &own[b]);
        StoreVector(out, first + b * step, size, true, own[b]);
      }
    }
  } else {  // one after the other: access to single elements is much code
#pragma unroll 1
    for (int64_t i = first; i < vectors; i += step) send(call, i, LoadVector(x, i, size, false));
#pragma unroll 1
    for (int64_t i = first; i < vectors; i += step) {
      V sum = LoadVector(x, i, size, false), peers[1];
      TakeWords(peer, call, area, i, /*step=*/0, vectors, peers, &deadline);
      add(peers[0], &sum);
      StoreVector(out, i, size, false, sum);
    }
  }
  EndCall(group, call);
}

// ---- Two-shot ----

// A CTA has a warp for each rank, warp 0 for its own: that one sums this rank's share and sends it on, while each of
// the others sends a peer its share of x and takes what that peer summed. Lane l of CTA b has vectors 32 b + l, and so
// on, of a share.
template <typename T, int kRanks>
__global__ void __launch_bounds__(kRanks * 32, kTwoShotThreads / (kRanks * 32))
    TwoShotKernel(const __grid_constant__ GroupView group,
                  const T* __restrict__ x,  // [size]
                  T* __restrict__ out,      // [size]
                  int64_t size, bool aligned) {
  using V = Vector<T>;
  const int rank = group.rank, ranks = group.ranks;
  const int64_t vectors = (size + V::kSize - 1) / V::kSize;
  const int64_t share = (vectors + ranks - 1) / ranks;  // vectors that one rank sums
  // Each rank begins with another peer, so that all links are in use.
  const auto rank_after = [&](int q) { return rank + q < ranks ? rank + q : rank + q - ranks; };
  const int q = static_cast<int>(threadIdx.x) / 32;
  const int owner = rank_after(q);  // of the share
  const int64_t begin = owner * share, count = q < ranks ? min(share, vectors - begin) : 0;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x % 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * 32;
  V own;
  if (first < count) own = LoadVector(x, begin + first, size, aligned);
  const Call call = BeginCall(group);
  Deadline deadline(group, call.broken);
  const auto own_of = [&](int64_t i) { return i == first ? own : LoadVector(x, begin + i, size, aligned); };
  if (q == 0) {
    for (int64_t i = first; i < count; i += step) {
      const V sum = SumWords<T, kRanks>(group, call, i, own_of(i), &deadline);
#pragma unroll
      for (int r = 1; r < kRanks; ++r) {  // without its data the peers' patience ends too
        if (r < ranks && !deadline.expired()) StoreAsWords(Sums(group, call, rank_after(r), rank), i, sum);
      }
      StoreVector(out, begin + i, size, aligned, sum);
    }
  } else {
    const WordArea words = Words(group, call, owner, rank), sums = Sums(group, call, rank, owner);
    for (int64_t i = first; i < count && !call.broken; i += step) StoreAsWords(words, i, own_of(i));
    for (int64_t i = first; i < count; i += step) {
      V sum[1];
      TakeWords(owner, call, sums, i, /*step=*/0, /*vectors=*/INT64_MAX, sum, &deadline);
      StoreVector(out, begin + i, size, aligned, sum[0]);
    }
  }
  EndCall(group, call);
}

// ---- Gathered parts ----

template <typename T>
__global__ void __launch_bounds__(kAllReduceThreads) SumPartsKernel(const T* __restrict__ parts,  // [ranks, size]
                                                                    T* __restrict__ out,          // [size]
                                                                    int64_t ranks, int64_t size, bool aligned) {
  const int64_t vectors = (size + Vector<T>::kSize - 1) / Vector<T>::kSize;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kAllReduceThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kAllReduceThreads + threadIdx.x; i < vectors; i += step) {
    VectorSum<T> sum;
    sum.Set(LoadVector(parts, i, size, aligned));
    for (int64_t r = 1; r < ranks; ++r) sum.Add(LoadVector(parts + r * size, i, size, aligned));
    StoreVector(out, i, size, aligned, sum.Round());
  }
}

// ---- Launch ----

template <typename T>
bool IsAligned(const AllReduceParams& p) {
  return (reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.out)) % 16 == 0 &&
         p.size % Vector<T>::kSize == 0;
}

unsigned Blocks(int64_t items, int64_t threads, int64_t most) {
  return static_cast<unsigned>(std::clamp<int64_t>((items + threads - 1) / threads, 1, most));
}

template <typename T>
Status LaunchParts(const AllReduceParams& p, Stream stream) {
  const int64_t vectors = (p.size + Vector<T>::kSize - 1) / Vector<T>::kSize;
  SumPartsKernel<T><<<Blocks(vectors, kAllReduceThreads, 1 << 16), kAllReduceThreads, /*shared_mem=*/0, stream>>>(
      static_cast<const T*>(p.x), static_cast<T*>(p.out), p.ranks, p.size, IsAligned<T>(p));
  XLA_GPU_RETURN_IF_LAUNCH_FAILED();
  return Status::Ok();
}

template <typename T, int kRanks>
Status LaunchGroup(const AllReduceParams& p, Stream stream) {
  constexpr int64_t kSize = Vector<T>::kSize;
  const GroupView& group = *p.group;
  const bool aligned = IsAligned<T>(p);
  if ((p.size + kSize - 1) / kSize * 16 <= group.low_latency_bytes) {
    LowLatencyKernel<T, kRanks>
        <<<Blocks((p.size + kSize - 1) / kSize, kAllReduceThreads, 128), kAllReduceThreads, 0, stream>>>(
            group, static_cast<const T*>(p.x), static_cast<T*>(p.out), p.size, aligned);
    XLA_GPU_RETURN_IF_LAUNCH_FAILED();
    return Status::Ok();
  }
  // What is larger than the group's memory goes in pieces.
  const int64_t bytes = kRanks == 2 ? group.words_bytes() : group.words_bytes() * group.ranks;
  const int64_t most = bytes / static_cast<int64_t>(sizeof(T));
  for (int64_t at = 0; at < p.size; at += most) {
    const int64_t size = std::min(most, p.size - at);
    const int64_t vectors = (size + kSize - 1) / kSize;
    const T* const x = static_cast<const T*>(p.x) + at;
    T* const out = static_cast<T*>(p.out) + at;
    const bool piece_aligned = aligned && size % kSize == 0;
    if constexpr (kRanks == 2) {
      // A thread has kBatch vectors, and with fewer than kFewBlocks CTAs one.
      const unsigned blocks = std::max(Blocks(vectors, kAllReduceThreads, kFewBlocks),
                                       Blocks(vectors, kAllReduceThreads * kBatch, INT_MAX));
      PairKernel<T><<<blocks, kAllReduceThreads, /*shared_mem=*/0, stream>>>(group, x, out, size, piece_aligned);
    } else {
      const int64_t share = (vectors + group.ranks - 1) / group.ranks;
      TwoShotKernel<T, kRanks><<<Blocks(share, 32, kMaxTwoShotBlocks), kRanks * 32, /*shared_mem=*/0, stream>>>(
          group, x, out, size, piece_aligned);
    }
    XLA_GPU_RETURN_IF_LAUNCH_FAILED();
  }
  return Status::Ok();
}

template <typename T>
Status Launch(const AllReduceParams& p, Stream stream) {
  if (p.group == nullptr) return LaunchParts<T>(p, stream);
  if (p.group->ranks <= 2) return LaunchGroup<T, 2>(p, stream);
  if (p.group->ranks <= 4) return LaunchGroup<T, 4>(p, stream);
  return LaunchGroup<T, kMaxRanks>(p, stream);
}

template <typename Kernel>
Status Load(Kernel kernel) {
  cudaFuncAttributes attributes;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  return Status::Ok();
}

template <typename T, int kRanks>
Status LoadRanks() {
  if (Status status = Load(LowLatencyKernel<T, kRanks>); !status.ok()) return status;
  if constexpr (kRanks == 2) {
    return Load(PairKernel<T>);
  } else {
    return Load(TwoShotKernel<T, kRanks>);
  }
}

template <typename T>
Status LoadAllReduceType() {
  if (Status status = LoadRanks<T, 2>(); !status.ok()) return status;
  if (Status status = LoadRanks<T, 4>(); !status.ok()) return status;
  return LoadRanks<T, kMaxRanks>();
}

}  // namespace

Status LoadAllReduceKernels() {
  if (Status status = LoadAllReduceType<float>(); !status.ok()) return status;
  if (Status status = LoadAllReduceType<__half>(); !status.ok()) return status;
  return LoadAllReduceType<__nv_bfloat16>();
}

Status LaunchAllReduce(const AllReduceParams& params, Stream stream) {
  if (params.size == 0) return Status::Ok();
  return DispatchFloat(params.dtype, "all_reduce: x",
                       [&](auto zero) { return Launch<decltype(zero)>(params, stream); });
}

}  // namespace xla_gpu
