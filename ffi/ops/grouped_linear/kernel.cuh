// The kernel: a persistent grid over work tiles, each a stream over the weights of up to 128 features.
//
// The weights are the M operand of mma.m16n8k16 and the rows of x its N operand, as in linear's kernel.cuh. A warp has
// 16 or 32 features and all of k, so that the bits of a row depend on nothing else. A ring of cp.async copies goes on
// across work tiles. Weights need no swizzle, since each lane reads the 16 bytes that it copied itself.
#ifndef XLA_GPU_OPS_GROUPED_LINEAR_KERNEL_CUH_
#define XLA_GPU_OPS_GROUPED_LINEAR_KERNEL_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/ops/grouped_linear/args.h"
#include "ffi/ops/grouped_linear/weights.cuh"
#include "ffi/ops/grouped_linear/work_tiles.cuh"
#include "ffi/ops/linear/kernel.cuh"
#include "ffi/ops/linear/weight_formats.cuh"

namespace xla_gpu::grouped_linear {

template <typename T_, GroupedFormat kFormat_, int kRowTile_>
struct Traits {
  using T = T_;
  static constexpr GroupedFormat kFormat = kFormat_;
  static constexpr int kRowTile = kRowTile_;
  static constexpr int kRowBlocks = kRowTile / 8;
  static constexpr bool kManyRows = kRowTile > 16;
  // Every warp reads all of x from shared memory, so that many rows want many features of a warp.
  static constexpr int kFeatureBlocks = kManyRows ? 2 : 1;  // of 16, of a warp
  static constexpr int kWarps = 4;
  static constexpr int kCtas = kManyRows ? 2 : kRowTile == 8 && HasFourBits(kFormat) ? 5 : 4;  // of an SM
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTileN = kWarps * kFeatureBlocks * 16;
  static constexpr int kWarpRows = 2 * kFeatureBlocks;  // weight rows of a lane: g, g + 8, …
  static constexpr int kElements = linear::ElementsIn16Bytes(LinearFormat(kFormat));
  static constexpr int kBlocks = kManyRows && HasFourBits(kFormat) ? 1 : 2;  // of 16 bytes for each of four lanes
  static constexpr int kBlockK = 4 * kElements;
  static constexpr int kChunkK = kBlocks * kBlockK;  // of a stage
  static constexpr int kWeightBytes = kWarpRows * kBlocks * kThreads * 16;
  static constexpr int kXPieces = kChunkK / 8;  // of 16 bytes, of a row and stage
  static constexpr int kStageBytes = kWeightBytes + kRowTile * kXPieces * 16;
  // Scales or zero points of a row and stage.
  static constexpr int kScales = HasFourBits(kFormat) ? kBlocks : 1;

  // Where piece `piece` of a row of x stands in its row: the eight lanes that shared memory serves at a time, rows g
  // and g + 1 of four lanes each, reach all banks.
  static __device__ int Swizzle(int row, int piece) {
    if constexpr (kFormat == GroupedFormat::kPlain) return piece ^ ((row & 1) << 2);
    if constexpr (HasFourBits(kFormat)) return piece ^ ((piece >> 3 & 1) << 1) ^ (row & 1);
    return piece ^ (row & 1);
  }
};

// Fills the stages of a ring with the chunks of a CTA's work tiles, one after the other.
template <typename Config>
class Loader {
 public:
  using Plan = WorkPlan<Config::kRowTile, Config::kThreads>;

  __device__ Loader(const GroupedArgs& args, const Plan& plan, uint32_t ring)
      : args_(args), plan_(plan), ring_(ring), index_(static_cast<int>(blockIdx.x)) {
    FindTile();
  }

  __device__ void Load() {
    if (tile_.group >= 0) {
      LoadWeights(ring_ + stage_ * Config::kStageBytes);
      LoadX(ring_ + stage_ * Config::kStageBytes + Config::kWeightBytes);
      if (++chunk_ == args_.chunks) {
        chunk_ = 0;
        index_ += static_cast<int>(gridDim.x);
        FindTile();
      }
      stage_ = stage_ + 1 == args_.stages ? 0 : stage_ + 1;
    }
    CommitAsync();
  }

 private:
  __device__ void FindTile() {
    tile_ = plan_.Find(index_);
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int first = tile_.feature_tile * Config::kTileN + warp * Config::kFeatureBlocks * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < Config::kWarpRows; ++r) {
      const int row = first + r * 8;
      const int64_t at = static_cast<int64_t>(max(tile_.group, 0)) * args_.n + row;
      row_[r] = row < args_.n ? args_.weight + at * args_.weight_row_bytes + lane % 4 * 16 : nullptr;
    }
  }

  __device__ void LoadWeights(uint32_t stage) const {
    const int t = static_cast<int>(threadIdx.x) % 4;
    const uint64_t policy = tile_.is_alone ? kEvictFirst : kEvictNormal;
#pragma unroll
    for (int r = 0; r < Config::kWarpRows; ++r) {
#pragma unroll
      for (int j = 0; j < Config::kBlocks; ++j) {
        const int byte = (chunk_ * Config::kBlocks + j) * 64;
        const bool read = row_[r] != nullptr && byte + 16 * t < args_.weight_row_bytes;
        CopyAsync16(stage + ((r * Config::kBlocks + j) * Config::kThreads + static_cast<int>(threadIdx.x)) * 16,
                    read ? row_[r] + byte : args_.weight, read, policy);
      }
    }
  }

  __device__ void LoadX(uint32_t stage) const {
    using T = typename Config::T;
    constexpr int kPieces = Config::kRowTile * Config::kXPieces;
    const int pieces = (tile_.rows + 7) / 8 * 8 * Config::kXPieces;
#pragma unroll
    for (int i = 0; i < (kPieces + Config::kThreads - 1) / Config::kThreads; ++i) {
      const int index = i * Config::kThreads + static_cast<int>(threadIdx.x);
      if (index >= pieces) break;
      const int row = index / Config::kXPieces, piece = index % Config::kXPieces;
      const int at_k = chunk_ * Config::kChunkK + piece * 8;
      const bool read = row < tile_.rows && at_k < args_.k;
      const int64_t at = read ? static_cast<int64_t>(tile_.first_row + row) * args_.k + at_k : 0;
      CopyAsync16(stage + (row * Config::kXPieces + Config::Swizzle(row, piece)) * 16,
                  static_cast<const T*>(args_.x) + at, read);
    }
  }

  const GroupedArgs& args_;
  const Plan& plan_;
  uint32_t ring_;
  int index_;
  int chunk_ = 0;
  int stage_ = 0;
  WorkTile tile_;
  const char* row_[Config::kWarpRows];  // 16 bytes of chunk 0 of rows g, g + 8, … of the warp's; null past the end
};

// Of a lane's weight rows and a stage: scales of float32 sums, and what conversions take.
template <typename Config>
struct Scales {
  float scale[Config::kScales][Config::kWarpRows];
  uint32_t operand[Config::kScales][Config::kWarpRows];

  __device__ void Load(const GroupedArgs& args, const WorkTile& tile, int chunk) {
    using T = typename Config::T;
    constexpr GroupedFormat kFormat = Config::kFormat;
    if constexpr (kFormat == GroupedFormat::kPlain || kFormat == GroupedFormat::kInt8) return;
    if (kFormat == GroupedFormat::kFloat8 && args.scale != WeightScale::kBlock) return;
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int first = tile.feature_tile * Config::kTileN + warp * Config::kFeatureBlocks * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < Config::kWarpRows; ++r) {
      const int row = first + r * 8;
#pragma unroll
      for (int j = 0; j < Config::kScales; ++j) {
        int index = chunk * Config::kScales + j;
        if constexpr (kFormat == GroupedFormat::kMxfp4) index = index * 4 + lane % 4;
        const bool read = tile.group >= 0 && row < args.n && index < args.scales;
        const int64_t matrix = max(tile.group, 0);
        if constexpr (kFormat == GroupedFormat::kFloat8) {
          const int blocks = (args.n + static_cast<int>(kQuantGroup) - 1) / static_cast<int>(kQuantGroup);
          const int64_t at = (matrix * blocks + row / static_cast<int>(kQuantGroup)) * args.scales + index;
          scale[j][r] = read ? static_cast<const float*>(args.weight_scale)[at] : 0.0f;
        } else {
          const int64_t at = (matrix * args.n + row) * args.scales + index;
          if constexpr (kFormat == GroupedFormat::kMxfp4) {
            operand[j][r] = read ? static_cast<const uint8_t*>(args.weight_scale)[at] : 0;
          } else {
            const T of_group = read ? static_cast<const T*>(args.weight_scale)[at] : T(0.0f);
            scale[j][r] = static_cast<float>(of_group) * linear::kInt4Unit<T>;
            operand[j][r] = read && args.zero_point != nullptr ? args.zero_point[at] : 8;
          }
        }
      }
    }
  }

  __device__ Operand<Config::kFormat> Of(int j, int r) const {
    using T = typename Config::T;
    if constexpr (Config::kFormat == GroupedFormat::kMxfp4) return {Mxfp4Factor<T>(operand[j][r])};
    if constexpr (Config::kFormat == GroupedFormat::kInt4) return {linear::OffsetsOf<T>(operand[j][r], 0)};
    return {};
  }
};

// The sums of a warp's features for the rows of a work tile.
template <typename Config>
class Accumulator {
 public:
  static constexpr bool kMayHaveGroups =
      Config::kFormat == GroupedFormat::kFloat8 || Config::kFormat == GroupedFormat::kInt4;

  __device__ void Clear() {
    Zero(sum_);
    if constexpr (kMayHaveGroups) Zero(total_);
  }

  // Adds the products of a stage, for `row_blocks` blocks of 8 rows at least. Rows that are not there have any numbers.
  __device__ void Add(const char* stage, const Scales<Config>& scales, int row_blocks, bool grouped) {
    constexpr int kMost = Config::kRowBlocks;
    if (kMost == 1 || row_blocks == 1) {
      AddBlocks<1>(stage, scales, grouped);
    } else if (kMost == 2 || row_blocks == 2) {
      AddBlocks < kMost<2 ? kMost : 2>(stage, scales, grouped);
    } else if (row_blocks <= 4) {
      AddBlocks < kMost<4 ? kMost : 4>(stage, scales, grouped);
    } else {
      AddBlocks<kMost>(stage, scales, grouped);
    }
  }

  // The sum of feature m * 16 + g + i / 2 * 8 for row b * 8 + 2 t + i % 2.
  __device__ float Sum(int m, int b, int i, bool grouped) const {
    if constexpr (kMayHaveGroups) {
      if (grouped) return total_[m][b][i];
    }
    return sum_[m][b][i];
  }

 private:
  using Sums = float[Config::kFeatureBlocks][Config::kRowBlocks][4];

  template <int kUsedBlocks>
  __device__ void AddBlocks(const char* stage, const Scales<Config>& scales, bool grouped) {
    using T = typename Config::T;
    constexpr GroupedFormat kFormat = Config::kFormat;
    const int tid = static_cast<int>(threadIdx.x), g = tid % 32 / 4, t = tid % 4;
    const uint4* weights = reinterpret_cast<const uint4*>(stage) + tid;
    const uint4* x = reinterpret_cast<const uint4*>(stage + Config::kWeightBytes) + g * Config::kXPieces;
    const uint32_t magic = linear::ConversionMagic<T, LinearFormat(kFormat)>();
#pragma unroll
    for (int j = 0; j < Config::kBlocks; ++j) {
      uint4 raw[Config::kWarpRows];
      Operand<kFormat> operand[Config::kWarpRows];
#pragma unroll
      for (int r = 0; r < Config::kWarpRows; ++r) {
        raw[r] = weights[(r * Config::kBlocks + j) * Config::kThreads];
        operand[r] = scales.Of(HasFourBits(kFormat) ? j : 0, r);
      }
#pragma unroll
      for (int h = 0; h < Config::kElements / 8; ++h) {
        uint32_t a[2][Config::kFeatureBlocks][4];  // [step][16 rows]
#pragma unroll
        for (int r = 0; r < Config::kWarpRows; ++r) {
          uint32_t to[4];
          ConvertEight<T, kFormat>(raw[r], h, operand[r], magic, to);
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i / 2][r / 2][r % 2 + i % 2 * 2] = to[i];
        }
        const uint4* from = x + Config::Swizzle(g, (j * 4 + t) * (Config::kElements / 8) + h);
#pragma unroll
        for (int b = 0; b < kUsedBlocks; ++b) {
          const uint4 values = OrderX<kFormat>(from[b * 8 * Config::kXPieces]);
#pragma unroll
          for (int m = 0; m < Config::kFeatureBlocks; ++m) Mma16x8x16<T>(sum_[m][b], a[0][m], values.x, values.y);
#pragma unroll
          for (int m = 0; m < Config::kFeatureBlocks; ++m) Mma16x8x16<T>(sum_[m][b], a[1][m], values.z, values.w);
        }
      }
      if constexpr (kFormat == GroupedFormat::kInt4) EndGroup<kUsedBlocks>(scales.scale[j]);
    }
    if constexpr (kFormat == GroupedFormat::kFloat8) {
      if (grouped) EndGroup<kUsedBlocks>(scales.scale[0]);
    }
  }

  static __device__ void Zero(Sums& sums) {
#pragma unroll
    for (auto& block : sums) {
#pragma unroll
      for (auto& c : block) c[0] = c[1] = c[2] = c[3] = 0.0f;
    }
  }

  template <int kUsedBlocks>
  __device__ void EndGroup(const float (&scale)[Config::kWarpRows]) {
#pragma unroll
    for (int m = 0; m < Config::kFeatureBlocks; ++m) {
#pragma unroll
      for (int b = 0; b < kUsedBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          total_[m][b][i] = fmaf(scale[2 * m + i / 2], sum_[m][b][i], total_[m][b][i]);
          sum_[m][b][i] = 0.0f;
        }
      }
    }
  }

  Sums sum_;
  Sums total_;  // of all groups so far
};

// Scale and bias, and the store of a work tile.
template <typename Config>
__device__ void FinishTile(const GroupedArgs& args, const WorkTile& tile, const Accumulator<Config>& sums,
                           bool grouped) {
  using T = typename Config::T;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int first = tile.feature_tile * Config::kTileN + warp * Config::kFeatureBlocks * 16 + lane / 4;
#pragma unroll
  for (int r = 0; r < Config::kWarpRows; ++r) {
    const int feature = first + r * 8;
    if (feature >= args.n) continue;
    const int64_t at = static_cast<int64_t>(tile.group) * args.n + feature;
    float scale = Config::kFormat == GroupedFormat::kMxfp4 ? kMxfp4Unit<T> : 1.0f;
    if (args.scale == WeightScale::kChannel) scale = static_cast<const float*>(args.weight_scale)[at];
    const float bias = args.bias == nullptr ? 0.0f : static_cast<float>(static_cast<const T*>(args.bias)[at]);
#pragma unroll
    for (int b = 0; b < Config::kRowBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = b * 8 + lane % 4 * 2 + i;
        if (row >= tile.rows) continue;
        const float value = sums.Sum(r / 2, b, r % 2 * 2 + i, grouped) * scale + bias;
        static_cast<T*>(args.out)[static_cast<int64_t>(tile.first_row + row) * args.n + feature] =
            static_cast<T>(value);
      }
    }
  }
}

// The rows behind those of all groups.
template <typename T>
__device__ void ZeroRows(const GroupedArgs& args, int first) {
  constexpr int kElements = 16 / sizeof(T);
  const int64_t begin = static_cast<int64_t>(first) * args.n / kElements;
  const int64_t end = static_cast<int64_t>(args.rows) * args.n / kElements;
  auto* const out = static_cast<uint4*>(args.out);
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t i = begin + thread; i < end; i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    out[i] = make_uint4(0, 0, 0, 0);
  }
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtas)
    GroupedLinearKernel(const __grid_constant__ GroupedArgs args) {
  extern __shared__ __align__(128) char shared[];
  using Plan = WorkPlan<Config::kRowTile, Config::kThreads>;
  const bool grouped = Config::kFormat == GroupedFormat::kInt4 || args.scale == WeightScale::kBlock;
  const char* const ring = shared + PlanBytes(args.num_groups);

  Plan plan(args, reinterpret_cast<int*>(shared));
  plan.Make();
  Loader<Config> loader(args, plan, SharedAddress(ring));
  for (int i = 0; i + 1 < args.stages; ++i) loader.Load();
  ZeroRows<typename Config::T>(args, plan.rows_of_groups());

  Accumulator<Config> sums;
  Scales<Config> next_scales;
  int index = static_cast<int>(blockIdx.x), stage = 0;
  WorkTile tile = plan.Find(index);
  next_scales.Load(args, tile, 0);
  while (tile.group >= 0) {
    index += static_cast<int>(gridDim.x);
    const WorkTile next = plan.Find(index);
    const int row_blocks = (tile.rows + 7) / 8;
    sums.Clear();
    for (int chunk = 0; chunk < args.chunks; ++chunk) {
      linear::WaitForStage(args.stages - 2);
      __syncthreads();  // all copies of the stage are visible, and the stage before is free
      loader.Load();
      const Scales<Config> scales = next_scales;
      const bool ends = chunk + 1 == args.chunks;
      next_scales.Load(args, ends ? next : tile, ends ? 0 : chunk + 1);
      sums.Add(ring + stage * Config::kStageBytes, scales, row_blocks, grouped);
      stage = stage + 1 == args.stages ? 0 : stage + 1;
    }
    FinishTile(args, tile, sums, grouped);
    tile = next;
  }
}

}  // namespace xla_gpu::grouped_linear

#endif  // XLA_GPU_OPS_GROUPED_LINEAR_KERNEL_CUH_
