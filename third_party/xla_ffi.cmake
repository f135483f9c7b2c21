# The headers of XLA's FFI: found in a pinned jaxlib, checked, and offered as the target xla_gpu::xla_ffi.
set(XLA_GPU_JAXLIB_FOR_HEADERS "0.7.2")

set(_remedy
    "Build with the headers of jaxlib ${XLA_GPU_JAXLIB_FOR_HEADERS}:\n"
    "  python3 -m pip install --no-deps --target ffi-headers jaxlib==${XLA_GPU_JAXLIB_FOR_HEADERS}\n"
    "  cmake -S . -B build -DXLA_GPU_FFI_INCLUDE_DIR=$PWD/ffi-headers/jaxlib/include\n"
    "(`pip install .` does this by itself.)")
string(CONCAT _remedy ${_remedy})

set(_dir "${XLA_GPU_FFI_INCLUDE_DIR}")
if(NOT _dir)
  execute_process(
    # Where jax.ffi.include_dir() says that they are, without the second that importing jax takes.
    COMMAND "${Python3_EXECUTABLE}" -c
            "import importlib.util as u; print(u.find_spec('jaxlib').submodule_search_locations[0] + '/include')"
    OUTPUT_VARIABLE _dir ERROR_VARIABLE _error RESULT_VARIABLE _result OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT _result EQUAL 0)
    message(FATAL_ERROR "XLA FFI headers: ${Python3_EXECUTABLE} has no jaxlib.\n${_remedy}")
  endif()
endif()
set(_header "${_dir}/xla/ffi/api/c_api.h")
if(NOT EXISTS "${_header}")
  message(FATAL_ERROR "XLA FFI headers: ${_header} does not exist.\n${_remedy}")
endif()

file(STRINGS "${_header}" _major REGEX "^#define XLA_FFI_API_MAJOR ")
file(STRINGS "${_header}" _minor REGEX "^#define XLA_FFI_API_MINOR ")
string(REGEX REPLACE ".* ([0-9]+)$" "\\1" _major "${_major}")
string(REGEX REPLACE ".* ([0-9]+)$" "\\1" _minor "${_minor}")
# A runtime accepts handlers built with its own or an older API. torch_xla 2.9.0, the last there is, has 0.1.
if(NOT "${_major}.${_minor}" STREQUAL "0.1")
  message(FATAL_ERROR "XLA FFI headers: ${_dir} is of API ${_major}.${_minor}; needed is 0.1, since torch_xla 2.9.0 "
                      "refuses handlers built with newer headers.\n${_remedy}")
endif()
message(STATUS "XLA FFI headers: API ${_major}.${_minor} in ${_dir}")

add_library(xla_gpu_xla_ffi INTERFACE)
add_library(xla_gpu::xla_ffi ALIAS xla_gpu_xla_ffi)
target_include_directories(xla_gpu_xla_ffi SYSTEM INTERFACE "${_dir}")
