// What the files of the fake PJRT plug-in share.
#ifndef XLA_GPU_TESTING_FAKE_PJRT_H_
#define XLA_GPU_TESTING_FAKE_PJRT_H_

#include <cstddef>
#include <string>

#include "ffi/runtime/pjrt_abi.h"

namespace fake_pjrt {

// Whether FAKE_PJRT chooses this mode, see fake_pjrt_plugin.cc.
bool IsMode(const char* mode);
// How many results each executable has.
size_t NumResults();
// An error is its text.
void* MakeError(std::string text);
// Puts the functions that compile, serialise and load executables into a plug-in's table.
void SetExecutableEntries(xla_gpu::pjrt::Entry* entries);

}  // namespace fake_pjrt

#endif  // XLA_GPU_TESTING_FAKE_PJRT_H_
