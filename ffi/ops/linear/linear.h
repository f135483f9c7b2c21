// linear: the product of a few rows with a weight matrix, plain or quantised.
#ifndef XLA_GPU_OPS_LINEAR_LINEAR_H_
#define XLA_GPU_OPS_LINEAR_LINEAR_H_

#include <algorithm>
#include <cstdint>

#include "ffi/base/dtype.h"
#include "ffi/base/status.h"
#include "ffi/device/launch_order.h"
#include "ffi/device/stream.h"
#include "ffi/host/executor.h"

namespace xla_gpu {

enum class WeightFormat {
  kPlain,   // T[n, k]
  kFloat8,  // float8_e4m3fn[n, k]
  kInt8,    // int8[n, k]
  kInt4,    // uint8[n, k / 2], groups of 128 along k; xla_gpu/quantization.py describes the bytes
};

enum class WeightScale {
  kNone,
  kTensor,   // float32[1]
  kChannel,  // float32[n]
  kBlock,    // float32[ceil(n / 128), ceil(k / 128)]
  kGroup,    // T[n, k / 128]
};

enum class Activation { kNone, kSiluAndMul, kGeluAndMul };

inline constexpr int64_t kQuantGroup = 128;  // elements of a group or of a block's side

struct LinearParams {
  const void* x;              // T[rows, k]
  const void* weight;         // [n, k] in `format`
  const void* weight_scale;   // as `scale` says
  const uint8_t* zero_point;  // [n, k / 128], or null: 8; with kInt4 alone
  const void* bias;           // T[n], or null
  const void* residual;       // T[rows, out_features], or null
  void* out;                  // T[rows, out_features]
  void* scratch;              // LinearScratchBytes(params) bytes
  int64_t rows;
  int64_t n;
  int64_t k;
  DType dtype;  // T
  WeightFormat format;
  WeightScale scale;
  Activation activation;
  bool x_is_split = false;  // `scratch` has x already, as two terms; x is not read. See LaunchNormedLinear

  // With an activation the first half of the n features is the gate.
  int64_t out_features() const { return activation == Activation::kNone ? n : n / 2; }
};

// ---- How the CUDA kernel of kernel.cuh divides its work; scratch memory is sized in every build, also in one without
// CUDA, and for every GPU ----

inline constexpr int64_t kLinearTileN = 128;   // features of a work tile
inline constexpr int64_t kLinearMaxRows = 64;  // of one launch
// The linearised space of (work tile, chunk of k) is divided among this many CTAs, whatever the GPU has: the order of
// summation, and so the bits, depend on n and k alone. 132 is the number of SMs of an H100 or H200.
inline constexpr int64_t kLinearCtas = 132;

// Rows are computed in tiles of 8, 32 or 64.
constexpr int64_t LinearRowTile(int64_t rows) { return rows <= 8 ? 8 : rows <= 32 ? 32 : kLinearMaxRows; }

constexpr int64_t LinearCounterBytes(int64_t n) {
  const int64_t tiles = (n + kLinearTileN - 1) / kLinearTileN;
  return (tiles * 8 + 255) / 256 * 256;
}

// ---- More than 32 rows of bfloat16 beside float8 weights, on sm_90a: the rows as two terms of float8, and a power of
// two for each kSplitK values of a row ----

inline constexpr int64_t kSplitK = 256;
constexpr int64_t SplitTermBytes(int64_t k) { return (2 * kLinearMaxRows * k + 255) / 256 * 256; }
constexpr int64_t SplitRowsBytes(int64_t k) {
  return SplitTermBytes(k) + (k + kSplitK - 1) / kSplitK * kLinearMaxRows * 4;
}

// A counter for each work tile, and two partial work tiles of float32 for each CTA; in the same place split rows.
inline int64_t LinearScratchBytes(const LinearParams& shapes) {
  if (shapes.dtype == DType::kF32 || shapes.rows == 0 || shapes.n == 0) return 0;
  const int64_t row_tile = LinearRowTile(shapes.rows);
  const bool splits = shapes.format == WeightFormat::kFloat8 && row_tile == kLinearMaxRows;
  return std::max(LinearCounterBytes(shapes.n) + 2 * kLinearCtas * kLinearTileN * row_tile * 4,
                  splits ? SplitRowsBytes(shapes.k) : 0);
}

Status RunLinear(const LinearParams& params, const Executor& executor);
Status LaunchLinear(const LinearParams& params, Stream stream, LaunchOrder order = LaunchOrder::kFirst);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_LINEAR_LINEAR_H_
