// all_reduce on GPUs. Four kernels: over a device group the low-latency one (each rank sends its whole message to every
// peer, in packets) for small messages; for larger ones that of two ranks, which send each other their words, and the
// two-shot one of more (each rank sums a share and sends it on); and the sum of parts that XLA gathered.
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
constexpr int kTwoShotThreads = 512;
constexpr int kMaxTwoShotBlocks = 64;
constexpr int kFewBlocks = 128;
static_assert(kMaxTwoShotBlocks <= kMaxFlagBlocks);

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
  if (aligned) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b * step < vectors) own[b] = LoadVector(x, first + b * step, size, true);
    }
  }
  const Call call = BeginCall(group);
  Deadline deadline(group, call.broken);
  // All is on its way before the first is waited for.
  if (aligned) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b * step < vectors) SendWords(group, call, first + b * step, own[b]);
    }
    AddWords(group, call, first, step, vectors, own, &deadline);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b * step < vectors) StoreVector(out, first + b * step, size, true, own[b]);
    }
  } else {  // one after the other: access to single elements is much code
#pragma unroll 1
    for (int64_t i = first; i < vectors; i += step) SendWords(group, call, i, LoadVector(x, i, size, false));
#pragma unroll 1
    for (int64_t i = first; i < vectors; i += step) {
      V sum[1] = {LoadVector(x, i, size, false)};
      AddWords(group, call, i, /*step=*/0, vectors, sum, &deadline);
      StoreVector(out, i, size, false, sum[0]);
    }
  }
  EndCall(group, call);
}

// ---- Two-shot ----

// All threads of a CTA: what they stored before is visible to the CTAs of this index on the peers, and the other way
// round. Returns false where a peer did not come.
__device__ bool MeetPeers(const GroupView& group, int stage, const Call& call, Deadline* deadline) {
  const int peer = threadIdx.x;
  bool arrived = !deadline->expired();
  __syncthreads();
  if (arrived && peer < group.ranks && peer != group.rank) {
    StoreRelease(&Control(group, peer)->flags[stage][group.rank][blockIdx.x], call.epoch);
    const uint32_t* flag = &Control(group, group.rank)->flags[stage][peer][blockIdx.x];
    while (static_cast<int32_t>(LoadAcquire(flag) - call.epoch) < 0) {
      if (deadline->Expired(peer, call.epoch)) {
        arrived = false;
        break;
      }
    }
  }
  return __syncthreads_and(arrived);
}

template <typename T, int kRanks>
__global__ void __launch_bounds__(kTwoShotThreads) TwoShotKernel(const __grid_constant__ GroupView group,
                                                                 const T* __restrict__ x,  // [size]
                                                                 T* __restrict__ out,      // [size]
                                                                 int64_t size, bool aligned) {
  using V = Vector<T>;
  const Call call = BeginCall(group);
  Deadline deadline(group, call.broken);
  const int rank = group.rank;
  const int64_t vectors = (size + V::kSize - 1) / V::kSize;
  const int64_t share = (vectors + group.ranks - 1) / group.ranks;  // vectors that one rank sums
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTwoShotThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kTwoShotThreads;

  // Loads and stores this thread's vectors of `owner`'s share, kBatch loads before as many stores. `whole`: true where
  // all vectors are aligned and whole. Others take one vector at a time, since access to single elements is much code.
  const auto for_each = [&](int owner, auto load, auto store) {
    const int64_t begin = owner * share;
    const int64_t count = max(min(share, vectors - begin), int64_t{0});
    if (aligned) {
      constexpr std::true_type kWhole;
      for (int64_t i = first; i < count; i += kBatch * step) {
        V batch[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (i + b * step < count) batch[b] = load(begin, i + b * step, kWhole);
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (i + b * step < count) store(begin, i + b * step, batch[b], kWhole);
        }
      }
    } else {
      constexpr std::false_type kWhole;
#pragma unroll 1
      for (int64_t i = first; i < count; i += step) store(begin, i, load(begin, i, kWhole), kWhole);
    }
  };
  const auto peer_after = [&](int q) { return rank + q < group.ranks ? rank + q : rank + q - group.ranks; };
  const auto area = [&](int owner, int64_t offset) { return reinterpret_cast<V*>(group.regions[owner] + offset); };

  // Every peer gets its share of x; each rank begins with another peer, so that all links are in use.
  if (!call.broken) {
    for (int q = 1; q < group.ranks; ++q) {
      const int peer = peer_after(q);
      V* to = area(peer, group.scatter_offset(rank));
      for_each(
          peer, [&](int64_t begin, int64_t i, auto whole) { return LoadVector(x, begin + i, size, whole); },
          [&](int64_t, int64_t i, const V& v, auto) { __stwt(reinterpret_cast<uint4*>(to + i), AsBits(v)); });
    }
  }
  bool arrived = MeetPeers(group, 0, call, &deadline);

  // This rank's share: summed in the order of ranks, kept and sent on.
  if (arrived) {
    for_each(
        rank,
        [&](int64_t begin, int64_t i, auto whole) {
          const V own = LoadVector(x, begin + i, size, whole);
          V parts[kRanks];
#pragma unroll
          for (int r = 0; r < kRanks; ++r) {
            if (r == rank) {
              parts[r] = own;
            } else if (r < group.ranks) {
              parts[r] = FromBits<T>(__ldcv(reinterpret_cast<const uint4*>(area(rank, group.scatter_offset(r)) + i)));
            }
          }
          VectorSum<T> sum;
          sum.Set(parts[0]);
#pragma unroll
          for (int r = 1; r < kRanks; ++r) {
            if (r < group.ranks) sum.Add(parts[r]);
          }
          return sum.Round();
        },
        [&](int64_t begin, int64_t i, const V& v, auto whole) {
          for (int q = 1; q < group.ranks; ++q) {
            V* to = area(peer_after(q), group.gather_offset(rank));
            __stwt(reinterpret_cast<uint4*>(to + i), AsBits(v));
          }
          StoreVector(out, begin + i, size, whole, v);
        });
  }
  // Without its data no flag is sent: the peers' patience ends too.
  arrived = arrived && MeetPeers(group, 1, call, &deadline);

  for (int owner = 0; owner < group.ranks; ++owner) {
    if (owner == rank && arrived) continue;
    const V* from = area(rank, group.gather_offset(owner));
    for_each(
        owner,
        [&](int64_t, int64_t i, auto) {
          return arrived ? FromBits<T>(__ldcv(reinterpret_cast<const uint4*>(from + i))) : NanVector<T>();
        },
        [&](int64_t begin, int64_t i, const V& v, auto whole) { StoreVector(out, begin + i, size, whole, v); });
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
  const int64_t bytes = kRanks == 2 ? group.max_bytes : group.share_bytes() * group.ranks;
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
      TwoShotKernel<T, kRanks>
          <<<Blocks(share, kTwoShotThreads, kMaxTwoShotBlocks), kTwoShotThreads, /*shared_mem=*/0, stream>>>(
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
