// all_reduce_add_rms_norm on GPUs: a CTA a row. A thread adds the residual to what it received and keeps it for the
// norm. Rows too long for the group's memory are all-reduced first.
#include <algorithm>
#include <climits>
#include <type_traits>

#include "ffi/base/cuda_status.h"
#include "ffi/device/dispatch.cuh"
#include "ffi/device/rms_norm.cuh"
#include "ffi/ops/all_reduce/all_reduce.h"
#include "ffi/ops/all_reduce/exchange.cuh"

namespace xla_gpu {
namespace {

constexpr int kMaxAddRmsNormThreads = 512;  // more would leave a thread too few registers
// Of CTAs that send all their rows ahead: they run at once, so that all rows are on their way at once.
constexpr int64_t kMaxExchangeThreads = 128 * kMaxAddRmsNormThreads;

// A call of the group, for the exchanges below.
template <typename T>
struct GroupCall {
  const GroupView& group;
  Call call;
  Deadline deadline;

  __device__ GroupCall(const GroupView& group_, const T* /*x*/, int64_t /*ranks*/, int64_t /*stride*/)
      : group(group_), call(BeginCall(group_)), deadline(group_, call.broken) {}
  __device__ void End() { EndCall(group, call); }
};

// Where a row's vectors come from: `Send` this rank's to the peers, all of a row, then `Sum` each.
template <typename T, int kRanks>
struct FromPeers : GroupCall<T> {
  static constexpr bool kSendsAhead = false, kSumsAhead = false;
  using GroupCall<T>::GroupCall, GroupCall<T>::group, GroupCall<T>::call, GroupCall<T>::deadline;

  __device__ void Send(int64_t row, int64_t i, int64_t vectors, const Vector<T>& own) {
    SendPackets<T, kRanks>(group, call, row * vectors + i, own);
  }
  __device__ Vector<T> Sum(int64_t row, int64_t i, int64_t /*hidden*/, int64_t vectors, bool /*aligned*/,
                           const Vector<T>& own) {
    return SumPackets<T, kRanks>(group, call, row * vectors + i, own, &deadline);
  }
};

// Of two ranks, without packets.
template <typename T>
struct FromPeer : GroupCall<T> {
  static constexpr bool kSendsAhead = true, kSumsAhead = false;
  using GroupCall<T>::GroupCall, GroupCall<T>::group, GroupCall<T>::call, GroupCall<T>::deadline;

  __device__ void Send(int64_t row, int64_t i, int64_t vectors, const Vector<T>& own) {
    SendWords<T, 2>(group, call, row * vectors + i, own);
  }
  __device__ Vector<T> Sum(int64_t row, int64_t i, int64_t /*hidden*/, int64_t vectors, bool /*aligned*/,
                           const Vector<T>& own) {
    return SumWords<T, 2>(group, call, row * vectors + i, own, &deadline);
  }
};

// Vectors of a row that one rank sums: whole warps'.
__host__ __device__ constexpr int64_t RowShare(int64_t vectors, int64_t ranks) {
  return (vectors + 32 * ranks - 1) / (32 * ranks) * 32;
}

// Of more ranks, without packets: two-shot, each sums a share of every row and sends it on, to itself too.
template <typename T, int kRanks>
struct FromShares : GroupCall<T> {
  static constexpr bool kSendsAhead = true, kSumsAhead = true;
  using GroupCall<T>::GroupCall, GroupCall<T>::group, GroupCall<T>::call, GroupCall<T>::deadline;

  __device__ bool IsOwn(int64_t i, int64_t vectors) const { return i / RowShare(vectors, group.ranks) == group.rank; }
  __device__ void Send(int64_t row, int64_t i, int64_t vectors, const Vector<T>& own) {
    const int64_t share = RowShare(vectors, group.ranks);
    const int owner = static_cast<int>(i / share);
    if (owner == group.rank || call.broken) return;
    StoreAsWords(Words(group, call, owner, group.rank), row * share + i % share, own);
  }
  // Of this rank's own vectors.
  __device__ void SendSum(int64_t row, int64_t i, int64_t vectors, const Vector<T>& own) {
    const int64_t share = RowShare(vectors, group.ranks), at = row * share + i % share;
    const Vector<T> sum = SumWords<T, kRanks>(group, call, at, own, &deadline);
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {  // without its data the peers' patience ends too
      if (r < group.ranks && !deadline.expired()) {
        StoreAsWords(Sums(group, call, r, group.rank), at, sum);
      }
    }
  }
  __device__ Vector<T> Sum(int64_t row, int64_t i, int64_t /*hidden*/, int64_t vectors, bool /*aligned*/,
                           const Vector<T>& /*own*/) {
    const int64_t share = RowShare(vectors, group.ranks), at = row * share + i % share;
    const int owner = static_cast<int>(i / share);
    Vector<T> sum[1];
    TakeWords(owner, call, Sums(group, call, group.rank, owner), at, /*step=*/0, /*vectors=*/INT64_MAX, sum, &deadline);
    return sum[0];
  }
};

template <typename T>
struct FromParts {
  static constexpr bool kSendsAhead = false, kSumsAhead = false;
  const T* x;  // [ranks, num_rows, hidden]
  int64_t ranks, stride;

  __device__ FromParts(const GroupView&, const T* x_, int64_t ranks_, int64_t stride_)
      : x(x_), ranks(ranks_), stride(stride_) {}
  __device__ void Send(int64_t /*row*/, int64_t /*i*/, int64_t /*vectors*/, const Vector<T>& /*own*/) {}
  __device__ Vector<T> Sum(int64_t row, int64_t i, int64_t hidden, int64_t /*vectors*/, bool aligned,
                           const Vector<T>& own) {
    VectorSum<T> sum;
    sum.Set(own);
    for (int64_t r = 1; r < ranks; ++r) sum.Add(LoadVector(x + r * stride + row * hidden, i, hidden, aligned));
    return sum.Round();
  }
  __device__ void End() {}
};

// NOTE: `x` and `sum` may be the same memory: each thread reads a vector before it writes it, and no other's.
template <typename T, typename Source>
__global__ void __launch_bounds__(kMaxAddRmsNormThreads)
    AddRmsNormKernel(const __grid_constant__ GroupView group, const T* x,
                     const T* __restrict__ residual,  // [num_rows, hidden]
                     const T* __restrict__ weight,    // [hidden]
                     T* __restrict__ out,             // [num_rows, hidden]
                     T* sum,                          // [num_rows, hidden]
                     int64_t ranks, int64_t num_rows, int64_t hidden, float eps, bool aligned) {
  using V = Vector<T>;
  __shared__ float shared[kMaxAddRmsNormThreads / 32];
  const int64_t vectors = (hidden + V::kSize - 1) / V::kSize;
  const int64_t first = threadIdx.x;
  // Rows are rarely longer than a CTA: what a thread's first vector needs is loaded while the call begins.
  V first_weight, first_added, first_own;
  if (first < vectors) {
    first_own = LoadVector(x + blockIdx.x * hidden, first, hidden, aligned);
    first_weight = LoadVector(weight, first, hidden, aligned);
    first_added = LoadVector(residual + blockIdx.x * hidden, first, hidden, aligned);
  }
  Source source(group, x, ranks, num_rows * hidden);
  // Of many rows all is on its way before the first is waited for.
  const auto for_each = [&](auto function) {
    for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
      for (int64_t i = first; i < vectors; i += blockDim.x) function(row, i);
    }
  };
  const auto own_of = [&](int64_t row, int64_t i) {
    return i == first && row == blockIdx.x ? first_own : LoadVector(x + row * hidden, i, hidden, aligned);
  };
  if constexpr (Source::kSendsAhead) {
    for_each([&](int64_t row, int64_t i) { source.Send(row, i, vectors, own_of(row, i)); });
  }
  if constexpr (Source::kSumsAhead) {
    for_each([&](int64_t row, int64_t i) {
      if (source.IsOwn(i, vectors)) source.SendSum(row, i, vectors, own_of(row, i));
    });
  }
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    const int64_t at = row * hidden;
    V kept = first_own;
    if (row != blockIdx.x && first < vectors) kept = LoadVector(x + at, first, hidden, aligned);
    if (!Source::kSendsAhead) {
      if (first < vectors) source.Send(row, first, vectors, kept);
      for (int64_t i = first + blockDim.x; i < vectors; i += blockDim.x) {
        source.Send(row, i, vectors, LoadVector(x + at, i, hidden, aligned));
      }
    }
    float squares = 0.0f;
    for (int64_t i = first; i < vectors; i += blockDim.x) {
      const bool is_first = i == first;
      const V own = is_first ? kept : LoadVector(x + at, i, hidden, aligned);
      const V added = is_first && row == blockIdx.x ? first_added : LoadVector(residual + at, i, hidden, aligned);
      VectorSum<T> total;
      total.Set(source.Sum(row, i, hidden, vectors, aligned, own));
      total.Add(added);
      const V rounded = total.Round();
      StoreVector(sum + at, i, hidden, aligned, rounded);
      if (is_first) kept = rounded;
      AddSquares(rounded, &squares);
    }
    const float scale = RmsNormScale(CtaSum(squares, shared), hidden, eps);
    for (int64_t i = first; i < vectors; i += blockDim.x) {
      const V value = i == first ? kept : LoadVector<T>(sum + at, i, hidden, aligned);
      const V factor = i == first ? first_weight : LoadVector(weight, i, hidden, aligned);
      StoreVector(out + at, i, hidden, aligned, RmsNormVector(value, scale, factor, {}));
    }
  }
  source.End();
}

template <typename T>
struct Shape {
  int64_t vectors;
  unsigned threads;
  int64_t blocks;
  bool aligned;

  explicit Shape(const AllReduceAddRmsNormParams& p) {
    vectors = (p.hidden + Vector<T>::kSize - 1) / Vector<T>::kSize;
    threads = static_cast<unsigned>(std::clamp<int64_t>((vectors + 31) / 32 * 32, 32, kMaxAddRmsNormThreads));
    blocks = std::min<int64_t>(p.num_rows, 1 << 16);
    const uintptr_t bits = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.residual) |
                           reinterpret_cast<uintptr_t>(p.weight) | reinterpret_cast<uintptr_t>(p.out) |
                           reinterpret_cast<uintptr_t>(p.sum);
    aligned = bits % 16 == 0 && p.hidden % Vector<T>::kSize == 0;
  }
};

template <typename T, typename Source>
Status LaunchRows(const AllReduceAddRmsNormParams& p, const void* x, int64_t ranks, const GroupView& group,
                  Stream stream) {
  const Shape<T> shape(p);
  const int64_t most = Source::kSendsAhead ? kMaxExchangeThreads / shape.threads : INT_MAX;
  const auto blocks = static_cast<unsigned>(std::min(shape.blocks, most));
  AddRmsNormKernel<T, Source><<<blocks, shape.threads, /*shared_mem=*/0, stream>>>(
      group, static_cast<const T*>(x), static_cast<const T*>(p.residual), static_cast<const T*>(p.weight),
      static_cast<T*>(p.out), static_cast<T*>(p.sum), ranks, p.num_rows, p.hidden, p.eps, shape.aligned);
  XLA_GPU_RETURN_IF_LAUNCH_FAILED();
  return Status::Ok();
}

// Without packets. Rows that the group's memory has no room for go in pieces.
template <typename T, typename Source>
Status LaunchPieces(const AllReduceAddRmsNormParams& p, int64_t most, Stream stream) {
  for (int64_t row = 0; row < p.num_rows; row += most) {
    const int64_t at = row * p.hidden * static_cast<int64_t>(sizeof(T));
    AllReduceAddRmsNormParams piece = p;
    piece.num_rows = std::min(most, p.num_rows - row);
    piece.x = static_cast<const char*>(p.x) + at;
    piece.residual = static_cast<const char*>(p.residual) + at;
    piece.out = static_cast<char*>(p.out) + at;
    piece.sum = static_cast<char*>(p.sum) + at;
    if (Status status = LaunchRows<T, Source>(piece, piece.x, 1, *p.group, stream); !status.ok()) return status;
  }
  return Status::Ok();
}

template <typename T, int kRanks>
using FromWords = std::conditional_t<kRanks == 2, FromPeer<T>, FromShares<T, kRanks>>;

template <typename T, int kRanks>
Status LaunchGroup(const AllReduceAddRmsNormParams& p, Stream stream) {
  const GroupView& group = *p.group;
  const int64_t vectors = Shape<T>(p).vectors;
  // With the norm's work around them, words are the faster ones above half the size.
  const int64_t low_latency_bytes = kRanks == 2 ? group.low_latency_bytes / 2 : group.low_latency_bytes;
  if (p.num_rows * vectors * 16 <= low_latency_bytes) {
    return LaunchRows<T, FromPeers<T, kRanks>>(p, p.x, 1, group, stream);
  }
  const int64_t row_bytes = (kRanks == 2 ? vectors : RowShare(vectors, group.ranks)) * 16;
  if (row_bytes <= group.words_bytes()) {
    return LaunchPieces<T, FromWords<T, kRanks>>(p, group.words_bytes() / row_bytes, stream);
  }
  const AllReduceParams reduce = {p.x, p.sum, p.num_rows * p.hidden, 1, p.dtype, p.group};
  if (Status status = LaunchAllReduce(reduce, stream); !status.ok()) return status;
  return LaunchRows<T, FromParts<T>>(p, p.sum, 1, group, stream);
}

template <typename T>
Status Launch(const AllReduceAddRmsNormParams& p, Stream stream) {
  if (p.group == nullptr) return LaunchRows<T, FromParts<T>>(p, p.x, p.ranks, GroupView{}, stream);
  if (p.group->ranks <= 2) return LaunchGroup<T, 2>(p, stream);
  if (p.group->ranks <= 4) return LaunchGroup<T, 4>(p, stream);
  return LaunchGroup<T, kMaxRanks>(p, stream);
}

template <typename T, int kRanks>
Status Load() {
  cudaFuncAttributes attributes;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&attributes, (AddRmsNormKernel<T, FromPeers<T, kRanks>>)));
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&attributes, (AddRmsNormKernel<T, FromWords<T, kRanks>>)));
  return Status::Ok();
}

template <typename T>
Status LoadAddRmsNormType() {
  if (Status status = Load<T, 2>(); !status.ok()) return status;
  if (Status status = Load<T, 4>(); !status.ok()) return status;
  if (Status status = Load<T, kMaxRanks>(); !status.ok()) return status;
  cudaFuncAttributes attributes;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&attributes, (AddRmsNormKernel<T, FromParts<T>>)));
  return Status::Ok();
}

}  // namespace

Status LoadAddRmsNormKernels() {
  if (Status status = LoadAddRmsNormType<float>(); !status.ok()) return status;
  if (Status status = LoadAddRmsNormType<__half>(); !status.ok()) return status;
  return LoadAddRmsNormType<__nv_bfloat16>();
}

Status LaunchAllReduceAddRmsNorm(const AllReduceAddRmsNormParams& params, Stream stream) {
  if (params.num_rows == 0 || params.hidden == 0) return Status::Ok();
  return DispatchFloat(params.dtype, "all_reduce_add_rms_norm: x",
                       [&](auto zero) { return Launch<decltype(zero)>(params, stream); });
}

}  // namespace xla_gpu
