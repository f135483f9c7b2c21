// TMA loads (sm_90) of boxes of a matrix in row-major order: 128 bytes wide and in the 128-byte swizzle that wgmma
// reads, or wider and as they are.
#ifndef XLA_GPU_DEVICE_TMA_MATRIX_CUH_
#define XLA_GPU_DEVICE_TMA_MATRIX_CUH_

#include <cstdint>

#include "ffi/device/tensor_map.cuh"

namespace xla_gpu {

// [rows, row_bytes], in boxes of `box_rows` rows by 128 bytes. Boxes may reach past the end: that becomes zeros. Rows
// are contiguous and multiples of 16 bytes. False where the driver has no tensor maps.
inline bool EncodeMatrix(const void* start, uint64_t rows, uint64_t row_bytes, uint32_t box_rows, CUtensorMap* map) {
  // Elements of 2 bytes of any type: TMA moves bits.
  const cuuint64_t sizes[2] = {row_bytes / 2, rows};
  const cuuint64_t stride_bytes[1] = {row_bytes};
  const cuuint32_t box[2] = {64, box_rows};
  return EncodeTensor(start, 2, sizes, stride_bytes, box, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B,
                      map);
}

// The same matrix, of elements of 2 bytes, in boxes of `box_rows` rows by `box_columns` times 128 bytes, which lie in
// shared memory one behind the other, [box_columns][box_rows][128 bytes]. Rows are multiples of 128 bytes.
inline bool EncodeMatrixColumns(const void* start, uint64_t rows, uint64_t row_bytes, uint32_t box_rows,
                                uint32_t box_columns, CUtensorMap* map) {
  const cuuint64_t sizes[3] = {64, rows, row_bytes / 128};
  const cuuint64_t stride_bytes[2] = {row_bytes, 128};
  const cuuint32_t box[3] = {64, box_rows, box_columns};
  return EncodeTensor(start, 3, sizes, stride_bytes, box, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B,
                      map);
}

// The same matrix, of elements of 2 bytes, in boxes of `box_rows` rows by `box_columns` times 128 bytes, at most 4,
// which lie in shared memory as in global memory: row behind row, without a swizzle.
inline bool EncodeMatrixRows(const void* start, uint64_t rows, uint64_t row_bytes, uint32_t box_rows,
                             uint32_t box_columns, CUtensorMap* map) {
  const cuuint64_t sizes[2] = {row_bytes / 2, rows};
  const cuuint64_t stride_bytes[1] = {row_bytes};
  const cuuint32_t box[2] = {64 * box_columns, box_rows};
  return EncodeTensor(start, 2, sizes, stride_bytes, box, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_NONE,
                      map);
}

#ifdef __CUDACC__

// Starts the load of the box whose first byte is number `128 * column`, from row `row` on, as EncodeMatrix or
// EncodeMatrixRows describe it. By one thread.
__device__ inline void TmaLoadMatrixBox(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int column, int row,
                                        uint64_t l2_policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, "
      "%4}], [%2], %5;" ::"r"(shared),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(column * 64), "r"(row), "l"(l2_policy)
      : "memory");
}

// The same of a matrix as EncodeMatrixColumns describes it.
__device__ inline void TmaLoadMatrixColumns(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int column,
                                            int row, uint64_t l2_policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, "
      "%4, %5}], [%2], %6;" ::"r"(shared),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(0), "r"(row), "r"(column), "l"(l2_policy)
      : "memory");
}

#endif  // __CUDACC__

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_TMA_MATRIX_CUH_
