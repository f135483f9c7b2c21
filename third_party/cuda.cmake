# The CUDA compiler: CUDACXX, else nvcc from PATH or CUDA_HOME, else the one that the registry's wheels nvidia-cuda-nvcc,
# -nvvm, -crt, -runtime and -cccl install beside Python. The runtime is linked statically.
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(XLA_GPU_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin)
  if(NOT XLA_GPU_NVCC)
    execute_process(
      COMMAND "${Python3_EXECUTABLE}" -c "import nvidia.cu13; print(list(nvidia.cu13.__path__)[0])"
      OUTPUT_VARIABLE _wheels ERROR_QUIET RESULT_VARIABLE _result OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(_result EQUAL 0)
      find_program(XLA_GPU_NVCC nvcc PATHS "${_wheels}/bin" NO_DEFAULT_PATH)
      # NOTE: the wheels keep libraries in lib, where nvcc looks for lib64.
      set(CMAKE_CUDA_FLAGS_INIT "-L${_wheels}/lib")
    endif()
  endif()
  if(NOT XLA_GPU_NVCC)
    message(FATAL_ERROR
      "CUDA: no nvcc in PATH, CUDA_HOME or Python's packages. Install a CUDA toolkit (12.8 or newer) or\n"
      "  python3 -m pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-crt==13.0.*' "
      "'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*'\n"
      "or build the host handlers alone: XLA_GPU_CUDA=OFF pip install .   (cmake -DXLA_GPU_CUDA=OFF)")
  endif()
  set(CMAKE_CUDA_COMPILER "${XLA_GPU_NVCC}")
endif()

# ---- Architectures: Ampere, Ada and Hopper by name, then the first of each newer generation that the compiler knows (its
# code runs on the later members of the generation too), and PTX of the last for what comes after.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(_nvcc "${CMAKE_CUDA_COMPILER}")
  if(NOT _nvcc)
    set(_nvcc "$ENV{CUDACXX}")
  endif()
  execute_process(COMMAND "${_nvcc}" --list-gpu-arch OUTPUT_VARIABLE _known OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(_architectures 80-real 86-real 89-real 90a-real)
  foreach(_first 100 110 120)
    if("${_known}" MATCHES "compute_${_first}(\n|$)")
      list(APPEND _architectures ${_first}-real)
    endif()
  endforeach()
  list(GET _architectures -1 _last)
  if(_last STREQUAL "90a-real")
    # Code for 90a runs on Hopper alone, and so would its PTX: plain 90 is what later GPUs can compile.
    list(APPEND _architectures 90-virtual)
  else()
    list(POP_BACK _architectures)
    string(REPLACE "-real" "" _last "${_last}")
    list(APPEND _architectures "${_last}")
  endif()
  set(CMAKE_CUDA_ARCHITECTURES "${_architectures}" CACHE STRING "CUDA architectures")
endif()

set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
enable_language(CUDA)
message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")
