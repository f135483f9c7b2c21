// Copies of boxes out of a tensor in global memory by the copy engine of sm_90, described to it by a tensor map, which
// the host makes.
#ifndef XLA_GPU_DEVICE_TENSOR_MAP_CUH_
#define XLA_GPU_DEVICE_TENSOR_MAP_CUH_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace xla_gpu {

// A tensor of 16-bit elements; dimension 0 is dense, the others have strides in elements. A box has 64 elements in
// dimension 0, `box_rows` in dimension 1 and one in the others. In shared memory it is rows of 128 bytes, the 16-byte
// chunks of row r permuted by XOR with r % 8, if it starts at a multiple of 1024 bytes. What lies outside the tensor
// becomes zeros and is not read.
struct TensorOfRows {
  const void* start;
  uint64_t sizes[4];
  uint64_t strides[3];
  uint32_t box_rows;
  bool bfloat16;
};

// False where the driver has no tensor maps, or not of this kind.
// NOTE: asks the runtime for the driver's function: the library has to load where there is no driver.
inline bool EncodeTensorMap(const TensorOfRows& tensor, CUtensorMap* map) {
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
  const cuuint64_t stride_bytes[3] = {tensor.strides[0] * 2, tensor.strides[1] * 2, tensor.strides[2] * 2};
  const cuuint64_t sizes[4] = {tensor.sizes[0], tensor.sizes[1], tensor.sizes[2], tensor.sizes[3]};
  const cuuint32_t box[4] = {64, tensor.box_rows, 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  return encode(map, tensor.bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
                const_cast<void*>(tensor.start), sizes, stride_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

#ifdef __CUDACC__

__device__ inline void PrefetchTensorMap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// True in one lane of a warp, which the compiler then knows to be one: it needs no loop over lanes around what only one
// can issue.
__device__ inline bool ElectLane() {
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

// Starts the copy of the box at (x, row, y, z) to `shared`; its bytes count at `barrier`. `map` lies in the kernel's
// parameters. By one thread.
__device__ inline void CopyBox(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int x, int row, int y,
                               int z) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(x), "r"(row), "r"(y), "r"(z)
      : "memory");
}

#endif  // __CUDACC__

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_TENSOR_MAP_CUH_
