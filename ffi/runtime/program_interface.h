// What torch_xla needs of a compiled program's optimised HLO: the forms of its parameters and of its result.
//
// torch_xla 2.9 reads the whole module of each executable that it gets, parses it and makes a copy of it: 0.2 to 0.5 s
// for a model's 7000 instructions, more than loading a kept executable takes. It never looks at the instructions.
#ifndef XLA_GPU_RUNTIME_PROGRAM_INTERFACE_H_
#define XLA_GPU_RUNTIME_PROGRAM_INTERFACE_H_

#include <string>
#include <string_view>

namespace xla_gpu::pjrt {

// Writes to `out` the module of `bytes`, an HloModuleProtoWithConfig, with its entry computation alone, in which the
// parameters are as they were and one custom call makes the result. False, and nothing is promised of `out`, where the
// bytes are no such module, or one that is divided over devices.
bool InterfaceOfProgram(std::string_view bytes, std::string* out);

}  // namespace xla_gpu::pjrt

#endif  // XLA_GPU_RUNTIME_PROGRAM_INTERFACE_H_
