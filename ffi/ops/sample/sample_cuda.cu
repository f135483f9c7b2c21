// sample on a GPU, without sorting: a cluster of CTAs takes a row and passes over its logits, which after the first
// time come from L1 and L2. One pass finds the largest, one adds up the softmax. top-k and top-p search for a distance
// from the largest logit, 1024 bins at a time, until a bin is a single float32 number. As soon as what may be kept is
// little, one CTA collects it and finishes alone. The last pass takes the largest of logit + Gumbel among what is left.
//
// NOTE: all sums are of integers, and all comparisons are total. So neither the number of CTAs nor their order changes
// a bit, and the host finds the same token.
#include <algorithm>

#include "ffi/base/cuda_status.h"
#include "ffi/device/cluster.cuh"
#include "ffi/device/dispatch.cuh"
#include "ffi/ops/sample/row.cuh"
#include "ffi/ops/sample/sample.h"

namespace xla_gpu {
namespace sampling {
namespace {

__device__ __forceinline__ float MaxNan(float a, float b) {
  float max;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(max) : "f"(a), "f"(b));
  return max;
}

// The rank of a logit's score: the largest is the token.
__device__ __forceinline__ uint64_t RankOfScore(const RowOptions& options, float sharpness, float distance,
                                                uint32_t index) {
  const Philox random = RandomWords(options.seed, index / 4, options.step);
  const uint32_t word = index % 4 == 0   ? random.words[0]
                        : index % 4 == 1 ? random.words[1]
                        : index % 4 == 2 ? random.words[2]
                                         : random.words[3];
  return RankOf(Score(distance, sharpness, word), index);
}

// The token of a row that is sampled; in the first CTA of the cluster. `argmax`: the index of the largest logit.
template <typename T>
__device__ uint32_t Draw(Row<T>& row, const T* logits, const RowOptions& options, float largest, uint32_t argmax,
                         int64_t vocab) {
  const float sharpness = options.sharpness();
  uint32_t limit = MinPLimit(options);
  if (options.top_k > 0 && options.top_k < vocab) {
    limit = row.template Search<false>(largest, limit, options.top_k, [](float) { return 1u; });
  }
  if (row.idle()) return 0;
  if (options.top_p < 1.0f) {
    const auto weigh = [&](float distance) { return Mass30(distance, sharpness); };
    uint64_t total = 0;
    row.ForEach([&](float logit, uint32_t) {
      const float distance = Distance(largest, logit);
      if (Bits(distance) <= limit) total += weigh(distance);
    });
    total = row.Reduce(total, Sum());
    limit = row.template Search<true>(largest, limit, TopPTarget(options.top_p, total), weigh);
  }
  if (row.idle()) return 0;
  uint64_t best = 0;
  if (row.collected()) {
    row.ForEach([&](float logit, uint32_t i) {
      const float distance = Distance(largest, logit);
      if (Bits(distance) <= limit) best = max(best, RankOfScore(options, sharpness, distance, i));
    });
  } else {
    // A Gumbel number g needs a word below about 2^32 exp(-g). Most words are too large to beat the best score so far,
    // as a rough exponential shows. The scores of the others are computed together, since their code is long.
    constexpr int kSize = Row<T>::kSize;
    constexpr int kInFlight = 2;  // more would leave too few registers
    static_assert(kInFlight * kSize <= 32, "bits of `candidates`");
    const auto score = [&](uint32_t i) {
      const float distance = Distance(largest, static_cast<float>(logits[i]));
      if (Bits(distance) <= limit) best = max(best, RankOfScore(options, sharpness, distance, i));
    };
    // A first bound: the best of one logit from each thread, among them the largest logit, which is always left.
    const uint32_t mine = threadIdx.x == 0 ? argmax : row.FirstIndex();
    if (mine < vocab) score(mine);
    volatile int* const shared_bound = row.SharedBound(best != 0 ? LogitOf(best) : -INFINITY);
    uint32_t candidates = 0;
    row.template ForEachVector<kInFlight>(
        [&](uint32_t begin, const float* values, int u) {
          const float bound = FloatOfOrdered(*shared_bound);
#pragma unroll
          for (int four = 0; four < kSize; four += 4) {
            bool any = false;
#pragma unroll
            for (int j = four; j < four + 4; ++j) any |= Bits(Distance(largest, values[j])) <= limit;
            if (!any) continue;
            const Philox random = RandomWords(options.seed, (begin + four) / 4, options.step);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const float distance = Distance(largest, values[four + j]);
              const float most = 0x1.8p32f * __expf(-(bound + distance * sharpness)) + 256.0f;
              const bool candidate = Bits(distance) <= limit && !(static_cast<float>(random.words[j]) > most);
              candidates |= static_cast<uint32_t>(candidate) << (u * kSize + four + j);
            }
          }
        },
        [&](uint32_t begin, uint32_t step) {
          for (; candidates != 0; candidates &= candidates - 1) {
            const int bit = __ffs(static_cast<int>(candidates)) - 1;
            const uint32_t i = begin + bit / kSize * step + bit % kSize;
            const uint64_t before = best;
            score(i);
            if (best != before) atomicMax(const_cast<int*>(shared_bound), OrderedOfFloat(LogitOf(best)));
          }
        });
  }
  return IndexOf(row.Reduce(best, Max()));
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) SampleKernel(const __grid_constant__ SampleParams p, bool aligned) {
  __shared__ SharedStorage shared;
  const int64_t index = blockIdx.x / ClusterSize();
  const T* const logits = static_cast<const T*>(p.logits) + index * p.vocab;
  const RowOptions options = p.Row(index);
  Row<T> row(logits, p.vocab, aligned, shared);
  ClusterSync();  // all CTAs have begun, and may be written to

  // ---- The largest logit, and whether there is a NaN
  float largest = -INFINITY;
  row.ForEachVector([&](uint32_t, const float* values, int) {
#pragma unroll
    for (int j = 0; j < Row<T>::kSize; ++j) {
      largest = MaxNan(largest, values[j]);
    }
  });
  largest = LogitOf(row.Reduce(RankOf(largest, 0), Max()));
  const bool chooses = largest == largest && largest != -INFINITY && options.valid();
  uint32_t token = 0;
  uint64_t mass = 0;
  if (chooses) {
    // ---- Its index, and the softmax's sum
    uint64_t argmax = ~uint64_t{0};
    row.ForEachVector([&](uint32_t begin, const float* values, int) {
#pragma unroll
      for (int j = 0; j < Row<T>::kSize; ++j) {
        mass += Mass40(Distance(largest, values[j]));
        if (values[j] == largest) argmax = min(argmax, static_cast<uint64_t>(begin + j));
      }
    });
    mass = row.Reduce(mass, Sum());
    token = static_cast<uint32_t>(row.Reduce(argmax, Min()));
    if (options.temperature > 0.0f) token = Draw(row, logits, options, largest, token, p.vocab);
  }
  if (ClusterRank() == 0 && threadIdx.x == 0) {
    p.token[index] = chooses ? static_cast<int32_t>(token) : -1;
    p.logprob[index] =
        chooses ? LogProbability(largest, static_cast<float>(logits[token]), mass) : __int_as_float(0x7fc00000);
  }
  ClusterSync();  // shared memory that others read lasts until they have
}

// CTAs of a row: as many as let all rows run at once. No bit depends on it.
template <typename T>
Status ChooseCluster(const SampleParams& p, unsigned* size) {
  *size = 1;
  cudaFuncAttributes code;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&code, SampleKernel<T>));
  if (code.ptxVersion < 90) return Status::Ok();
  int device = 0, processors = 0;
  XLA_GPU_RETURN_IF_CUDA(cudaGetDevice(&device));
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const int64_t most = std::min<int64_t>(kMaxCluster, p.vocab / (kThreads * Row<T>::kSize) + 1);
  while (*size * 2 <= most && p.rows * *size * 2 <= 2 * processors) *size *= 2;
  return Status::Ok();
}

template <typename T>
Status Launch(const SampleParams& p, Stream stream) {
  unsigned cluster = 1;
  if (Status status = ChooseCluster<T>(p, &cluster); !status.ok()) return status;
  if (p.rows >= (int64_t{1} << 31) / cluster) {
    return Status::InvalidArgument("sample: logits: expected fewer than 2^28 rows");
  }
  const bool aligned =
      (reinterpret_cast<uintptr_t>(p.logits) | static_cast<uintptr_t>(p.vocab * static_cast<int64_t>(sizeof(T)))) %
          16 ==
      0;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.rows) * cluster);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  XLA_GPU_RETURN_IF_CUDA(cudaLaunchKernelEx(&config, SampleKernel<T>, p, aligned));
  return Status::Ok();
}

}  // namespace
}  // namespace sampling

Status LaunchSample(const SampleParams& params, Stream stream) {
  if (params.rows == 0) return Status::Ok();
  return DispatchFloat(params.dtype, "sample: logits",
                       [&](auto zero) { return sampling::Launch<decltype(zero)>(params, stream); });
}

}  // namespace xla_gpu
