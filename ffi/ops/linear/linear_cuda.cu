// linear on a GPU: limited by the bandwidth for its weights. Up to 64 rows a launch, see sm90_kernel.cuh and, for
// other GPUs than H100 and H200, kernel.cuh; float32 on CUDA cores.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <random>
#include <string>

#include "ffi/base/cuda_status.h"
#include "ffi/device/launch.cuh"
#include "ffi/ops/linear/kernel.cuh"
#include "ffi/ops/linear/linear.h"
#include "ffi/ops/linear/normed_linear.h"
#include "ffi/ops/linear/simt_f32.cuh"
#include "ffi/ops/linear/sm90_float8_norm.cuh"
#include "ffi/ops/linear/sm90_tile_launch.cuh"

namespace xla_gpu {
namespace {

using linear::LinearArgs;

// A number that no other call of this process has, of 56 random bits above a byte of 0: what marks a counter as one of
// this call.
unsigned long long NextToken() {
  static std::atomic<unsigned long long> state{[] {
    std::random_device device;
    return static_cast<unsigned long long>(device()) << 32 ^ device();
  }()};
  // SplitMix64 (Steele, Lea and Flood, 2014).
  unsigned long long z = state.fetch_add(0x9e3779b97f4a7c15ull, std::memory_order_relaxed);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  z = (z ^ (z >> 31)) & ~0xffull;
  return z == 0 ? 0x100 : z;
}

LinearArgs MakeArgs(const LinearParams& p) {
  LinearArgs args = {};
  args.x = p.x;
  args.weight = static_cast<const char*>(p.weight);
  args.weight_scale = p.weight_scale;
  args.zero_point = p.zero_point;
  args.bias = p.bias;
  args.residual = p.residual;
  args.out = p.out;
  args.rows = static_cast<int>(p.rows);
  args.n = static_cast<int>(p.n);
  args.k = static_cast<int>(p.k);
  args.groups = static_cast<int>((p.k + kQuantGroup - 1) / kQuantGroup);
  args.scale = p.scale;
  args.activation = p.activation;
  args.x_is_split = p.x_is_split;
  args.weight_row_bytes = p.format == WeightFormat::kPlain  ? p.k * static_cast<int64_t>(SizeOf(p.dtype))
                          : p.format == WeightFormat::kInt4 ? p.k / 2
                                                            : p.k;
  return args;
}

template <typename Config>
Status LaunchRows(const LinearParams& p, LinearArgs args, int shared_bytes, Stream stream, LaunchOrder order) {
  const int64_t features = p.activation == Activation::kNone ? kLinearTileN : kLinearTileN / 2;
  const int64_t tiles = (p.out_features() + features - 1) / features;
  args.chunks = (args.k + Config::kChunkK - 1) / Config::kChunkK;
  const int64_t units = tiles * args.chunks;
  if (units > std::numeric_limits<int32_t>::max() / 2) return Status::InvalidArgument("linear: weight: too large");
  const int64_t ctas = std::min(units, kLinearCtas);
  args.units_of_cta = static_cast<int>(units / ctas);
  args.longer_ctas = static_cast<int>(units % ctas);
  args.stages = std::min((shared_bytes - Config::kSumBytes) / Config::kStageBytes, linear::kMaxStages);
  const int bytes = Config::SharedBytes(args.stages);
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(linear::LinearKernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  return LaunchKernel(linear::LinearKernel<Config>, dim3(static_cast<unsigned>(ctas)), dim3(Config::kThreads),
                      static_cast<size_t>(bytes), stream, order, args);
}

// Of the kernels for this format and as many rows as `args` says.
template <typename T, WeightFormat kFormat, int kRowTile>
Status LaunchTile(const LinearParams& p, const LinearArgs& args, int shared_bytes, Stream stream, LaunchOrder order) {
  bool launched = false;
  Status status = linear::LaunchTileSm90<T, kFormat, kRowTile>(args, stream, order, &launched);
  if (!status.ok() || launched) return status;
  return LaunchRows<linear::Traits<T, kFormat, kRowTile>>(p, args, shared_bytes, stream, order);
}

template <typename T, WeightFormat kFormat>
Status LaunchFormat(const LinearParams& p, Stream stream, LaunchOrder order) {
  int device, shared_bytes;
  XLA_GPU_RETURN_IF_CUDA(cudaGetDevice(&device));
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  shared_bytes -= 1024;  // for what a kernel has beside its dynamic shared memory
  // GPUs with little shared memory take 32 rows a launch. A row's bits are the same.
  const int64_t max_rows = shared_bytes >= linear::Traits<T, kFormat, 64>::SharedBytes(2) ? kLinearMaxRows : 32;
  LinearArgs args = MakeArgs(p);
  args.counters = static_cast<unsigned long long*>(p.scratch);
  args.partials = reinterpret_cast<float*>(static_cast<char*>(p.scratch) + LinearCounterBytes(p.n));
  for (int64_t first = 0; first < p.rows; first += max_rows) {
    const int64_t rows = std::min(max_rows, p.rows - first);
    const auto rows_of = [first](const void* array, int64_t columns) -> const void* {
      return array == nullptr ? nullptr : static_cast<const T*>(array) + first * columns;
    };
    args.x = rows_of(p.x, p.k);
    args.residual = rows_of(p.residual, p.out_features());
    args.out = const_cast<void*>(rows_of(p.out, p.out_features()));
    args.rows = static_cast<int>(rows);
    args.token = NextToken();
    Status status;
    switch (LinearRowTile(rows)) {
      case 8:
        status = LaunchTile<T, kFormat, 8>(p, args, shared_bytes, stream, order);
        break;
      case 32:
        status = LaunchTile<T, kFormat, 32>(p, args, shared_bytes, stream, order);
        break;
      default:
        status = LaunchTile<T, kFormat, 64>(p, args, shared_bytes, stream, order);
    }
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

template <typename T>
Status LaunchType(const LinearParams& p, Stream stream, LaunchOrder order) {
  switch (p.format) {
    case WeightFormat::kPlain:
      return LaunchFormat<T, WeightFormat::kPlain>(p, stream, order);
    case WeightFormat::kFloat8:
      return LaunchFormat<T, WeightFormat::kFloat8>(p, stream, order);
    case WeightFormat::kInt8:
      return LaunchFormat<T, WeightFormat::kInt8>(p, stream, order);
    case WeightFormat::kInt4:
      break;
  }
  return LaunchFormat<T, WeightFormat::kInt4>(p, stream, order);
}

}  // namespace

Status LaunchLinear(const LinearParams& params, Stream stream, LaunchOrder order) {
  if (params.rows == 0 || params.n == 0) return Status::Ok();
  switch (params.dtype) {
    case DType::kF16:
      return LaunchType<__half>(params, stream, order);
    case DType::kBF16:
      return LaunchType<__nv_bfloat16>(params, stream, order);
    default:
      return linear::LaunchSimtF32(MakeArgs(params), params.rows, params.format, stream);
  }
}

Status LaunchNormedLinear(const RmsNormParams& norm, const LinearParams& linear, Stream stream, LaunchOrder* order) {
  *order = norm.weight != nullptr ? LaunchOrder::kDependent : LaunchOrder::kFirst;
  bool splits;
  if (Status status = linear::NormSplitsRows(norm, linear, &splits); !status.ok()) return status;
  if (splits) {
    if (Status status = linear::LaunchNormSplitRows(norm, linear, stream); !status.ok()) return status;
    LinearParams of_split = linear;
    of_split.x_is_split = true;
    return LaunchLinear(of_split, stream, *order);
  }
  if (norm.weight != nullptr) {
    if (Status status = LaunchRmsNorm(norm, stream); !status.ok()) return status;
  }
  return LaunchLinear(linear, stream, *order);
}

}  // namespace xla_gpu
