# The CUDA compiler and the architectures: cuda_toolchain.py finds and checks them before anything is compiled.
#
# CMAKE_CUDA_COMPILER and CMAKE_CUDA_ARCHITECTURES, CUDACXX and CUDAARCHS mean what they mean in CMake, but for three values of
# the architectures: `native` is 90a on Hopper, whose fast kernels need it; `all` and `all-major` leave out what the kernels do
# not run on. Nothing said is native where there is a GPU, else all.
set(_asked "${CMAKE_CUDA_ARCHITECTURES}")
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(_asked "$ENV{CUDAARCHS}")
endif()
execute_process(
  COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/cuda_toolchain.py"
          "--nvcc=${CMAKE_CUDA_COMPILER}" "--architectures=${_asked}"
          "--host-compiler=${CMAKE_CUDA_HOST_COMPILER}" "--flags=${CMAKE_CUDA_FLAGS}"
  OUTPUT_VARIABLE _toolchain ERROR_VARIABLE _error RESULT_VARIABLE _result)
if(NOT _result EQUAL 0)
  string(STRIP "${_error}" _error)
  message(FATAL_ERROR "${_error}")
endif()
string(REGEX MATCH "^([^\n]*)\n([^\n]*)\n([^\n]*)\n(.*)$" _ "${_toolchain}")
set(_nvcc "${CMAKE_MATCH_1}")
set(_wheels "${CMAKE_MATCH_2}")
set(_architectures "${CMAKE_MATCH_3}")
string(STRIP "${CMAKE_MATCH_4}" _notes)
if(_notes)
  message(STATUS "CUDA: ${_notes}")
endif()

set(CMAKE_CUDA_COMPILER "${_nvcc}")
if(_wheels)
  # NOTE: the wheels keep libraries in lib, where nvcc looks for lib64.
  set(CMAKE_CUDA_FLAGS_INIT "-L${_wheels}/lib")
endif()
# In the cache what a build says the first time stays, as CMake has it; not the words that are resolved here.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "${_architectures}" CACHE STRING "CUDA architectures")
endif()
set(CMAKE_CUDA_ARCHITECTURES "${_architectures}")

set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
enable_language(CUDA)
message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")
