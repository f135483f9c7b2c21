// The few structures of the tvm-ffi and DLPack C interfaces that calls of tvm-ffi functions need. They are declared
// here, and not taken from the packages' headers, because the library meets their releases at run time.
#ifndef XLA_GPU_USER_KERNELS_TVM_FFI_ABI_H_
#define XLA_GPU_USER_KERNELS_TVM_FFI_ABI_H_

#include <cstddef>
#include <cstdint>

namespace xla_gpu::tvm_ffi {

// ---- DLPack 1.x ----
inline constexpr int32_t kCpu = 1, kCuda = 2;
enum DtypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E3M4 = 7,
  kFloat8E4M3 = 8,
  kFloat8E4M3B11FNUZ = 9,
  kFloat8E4M3FN = 10,
  kFloat8E4M3FNUZ = 11,
  kFloat8E5M2 = 12,
  kFloat8E5M2FNUZ = 13,
  kFloat8E8M0FNU = 14,
};

struct Device {
  int32_t type;
  int32_t id;
};

struct Dtype {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {  // DLTensor
  void* data;
  Device device;
  int32_t ndim;
  Dtype dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

// ---- tvm-ffi 0.1 ----
inline constexpr int32_t kNone = 0, kAnyInt = 1, kAnyBool = 2, kAnyFloat = 3, kOpaquePointer = 4, kTensorPointer = 7,
                         kRawString = 8, kFirstObject = 64;

struct Any {
  int32_t type_index;
  uint32_t zero;
  union {
    int64_t v_int64;
    double v_float64;
    void* v_ptr;
  };
};
static_assert(sizeof(Any) == 16);

struct ByteArray {
  const char* data;
  size_t size;
};

struct ErrorObject {
  char header[24];  // reference counts, type and deleter
  ByteArray kind;   // "ValueError"
  ByteArray message;
};

}  // namespace xla_gpu::tvm_ffi

#endif  // XLA_GPU_USER_KERNELS_TVM_FFI_ABI_H_
