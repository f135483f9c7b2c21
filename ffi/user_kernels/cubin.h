// What can be said of a cubin without a driver. The driver is given its address alone, so it would read past the end of
// one that is cut short.
#ifndef XLA_GPU_USER_KERNELS_CUBIN_H_
#define XLA_GPU_USER_KERNELS_CUBIN_H_

#include <string>
#include <string_view>

namespace xla_gpu {

// What is wrong with a cubin: a part that is not inside the file, or a reference to none. Empty: nothing is. Machine
// code is not looked at.
std::string CubinDamage(std::string_view cubin);

}  // namespace xla_gpu

#endif  // XLA_GPU_USER_KERNELS_CUBIN_H_
