// TMA loads (sm_90): the copy engine brings a box of a tensor in global memory to shared memory. A tensor map, made on
// the host, describes the tensor and the box.
#ifndef XLA_GPU_DEVICE_TENSOR_MAP_CUH_
#define XLA_GPU_DEVICE_TENSOR_MAP_CUH_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace xla_gpu {

// A paged cache of 16-bit elements (of 8-bit ones: EncodePagedBytes): rows are its slots, `row_stride` elements apart,
// in pages `page_stride` elements apart. The tensor map sees it as [pages][page_rows / 8][columns / 64][8][64], so that
// a box of `box_rows` rows and `box_columns` columns lies in shared memory as [box_rows / 8][box_columns / 64] swizzle
// atoms. A 128-byte swizzle atom is 8 rows of 128 bytes, aligned to 1024 bytes, with the 16-byte vectors of row r
// permuted by XOR with r % 8. Boxes outside the tensor read nothing and become zeros.
struct PagedTensor {
  const void* start;
  uint64_t columns;    // a multiple of 64, from `start` on; they may belong to several heads
  uint64_t page_rows;  // a multiple of 8
  uint64_t pages;
  uint64_t row_stride;
  uint64_t page_stride;
  uint32_t box_rows;
  uint32_t box_columns;
  bool bfloat16;
};

// False where the driver has no tensor maps, or none of this shape.
// NOTE: the driver's function comes from the runtime: the library must load where there is no driver.
inline bool EncodeTensor(const void* start, int rank, const cuuint64_t* sizes, const cuuint64_t* stride_bytes,
                         const cuuint32_t* box, CUtensorMapDataType type, CUtensorMapSwizzle swizzle,
                         CUtensorMap* map) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<Encode>(error == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr);
  }();
  if (encode == nullptr) return false;
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  return encode(map, type, static_cast<cuuint32_t>(rank), const_cast<void*>(start), sizes, stride_bytes, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
constexpr CUtensorMapDataType TensorMapType(bool bfloat16) {
  return bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

inline bool EncodePagedTensor(const PagedTensor& tensor, CUtensorMap* map) {
  const cuuint64_t sizes[5] = {64, 8, tensor.columns / 64, tensor.page_rows / 8, tensor.pages};
  const cuuint64_t stride_bytes[4] = {tensor.row_stride * 2, 128, tensor.row_stride * 16, tensor.page_stride * 2};
  const cuuint32_t box[5] = {64, 8, tensor.box_columns / 64, tensor.box_rows / 8, 1};
  return EncodeTensor(tensor.start, 5, sizes, stride_bytes, box, TensorMapType(tensor.bfloat16),
                      CU_TENSOR_MAP_SWIZZLE_128B, map);
}

// The same of a cache of 8-bit elements, in rows as they are: the tensor map sees it as [pages][page_rows][columns],
// and a box lies in shared memory as [box_rows][box_columns] bytes.
inline bool EncodePagedBytes(const PagedTensor& tensor, CUtensorMap* map) {
  const cuuint64_t sizes[3] = {tensor.columns, tensor.page_rows, tensor.pages};
  const cuuint64_t stride_bytes[2] = {tensor.row_stride, tensor.page_stride};
  const cuuint32_t box[3] = {tensor.box_columns, tensor.box_rows, 1};
  return EncodeTensor(tensor.start, 3, sizes, stride_bytes, box, CU_TENSOR_MAP_DATA_TYPE_UINT8,
                      CU_TENSOR_MAP_SWIZZLE_NONE, map);
}

// A dense tensor [tokens][heads][columns] of 16-bit elements, columns a multiple of 64, in boxes of `box_tokens` by
// `box_heads` rows and all columns. A box lies in shared memory as [columns / 64][box_tokens * box_heads] rows of 128
// bytes: columns of swizzle atoms, as above.
inline bool EncodeQueryTensor(const void* start, uint64_t tokens, uint64_t heads, uint64_t columns, uint32_t box_tokens,
                              uint32_t box_heads, bool bfloat16, CUtensorMap* map) {
  const cuuint64_t sizes[4] = {64, heads, tokens, columns / 64};
  const cuuint64_t stride_bytes[3] = {columns * 2, heads * columns * 2, 128};
  const cuuint32_t box[4] = {64, box_heads, box_tokens, static_cast<cuuint32_t>(columns / 64)};
  return EncodeTensor(start, 4, sizes, stride_bytes, box, TensorMapType(bfloat16), CU_TENSOR_MAP_SWIZZLE_128B, map);
}

#ifdef __CUDACC__

__device__ inline void PrefetchTensorMap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// True in one lane of a warp (elect.sync). The compiler knows that it is one lane, and needs no loop over lanes around
// instructions with uniform operands.
__device__ inline bool ElectOne() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred chosen;\n"
      "elect.sync _|chosen, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, chosen;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// Starts the load of the box of a paged cache at atom column `atom_column` (64 columns each) and atom row `atom_row` (8
// slots each) of page `page` to `shared`; its bytes count at `barrier`. `map` lies in the kernel's parameters. By one
// thread.
__device__ inline void TmaLoadCacheBox(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int atom_column,
                                       int atom_row, int page) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %3, %4, %5, "
      "%6}], [%2];" ::"r"(shared),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(0), "r"(atom_column), "r"(atom_row), "r"(page)
      : "memory");
}

// The same with an L2 policy: kEvictFirst or kEvictNormal.
__device__ inline void TmaLoadCacheBox(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int atom_column,
                                       int atom_row, int page, uint64_t l2_policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, "
      "%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(0), "r"(atom_column), "r"(atom_row), "r"(page),
      "l"(l2_policy)
      : "memory");
}

// The same for a cache as EncodePagedBytes describes it, from byte `column` of slot `slot` on.
__device__ inline void TmaLoadCacheBytes(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int column,
                                         int slot, int page) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(column), "r"(slot), "r"(page)
      : "memory");
}

// As TmaLoadCacheBox, for a box of Q that begins at (token, head).
__device__ inline void TmaLoadQueryRows(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int head,
                                        int token) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %3}], "
      "[%2];" ::"r"(shared),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(0), "r"(head), "r"(token)
      : "memory");
}

#endif  // __CUDACC__

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_TENSOR_MAP_CUH_
