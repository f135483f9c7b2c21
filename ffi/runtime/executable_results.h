// Dtypes and shapes of an executable's results, as the plug-in says.
#ifndef XLA_GPU_RUNTIME_EXECUTABLE_RESULTS_H_
#define XLA_GPU_RUNTIME_EXECUTABLE_RESULTS_H_

#include <cstdint>
#include <vector>

#include "ffi/runtime/error.h"
#include "ffi/runtime/pjrt_abi.h"

namespace xla_gpu::pjrt {

struct ResultForm {
  int32_t type;  // PJRT_Buffer_Type
  std::vector<int64_t> dims;

  bool operator==(const ResultForm& other) const { return type == other.type && dims == other.dims; }
};

Error FormsOfResults(const Api& plugin, void* loaded_executable, std::vector<ResultForm>* forms);

}  // namespace xla_gpu::pjrt

#endif  // XLA_GPU_RUNTIME_EXECUTABLE_RESULTS_H_
