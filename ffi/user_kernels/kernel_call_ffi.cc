// kernel_call: the handlers that launch a user's kernel from a cubin. The host handler makes the same checks and then
// says that a GPU is needed.
#include <cstring>
#include <string>

#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/user_kernels/kernel_call.h"

namespace xla_gpu {
namespace {

constexpr char kKernelCallOp[] = "kernel_call";

// Kinds of parameters in the attribute `parameters`, and what `value` and `size` mean.
enum : int64_t {
  kOperand = 0,  // the pointer of operand `value`, aligned to `size` bytes (0: not known)
  kResult = 1,   // the pointer of result `value`, aligned in the same way
  kBits = 2,     // the low `size` bytes of `value`
};

ffi::Error GetTriple(const char* name, ffi::Span<const int64_t> values, const int64_t** triple) {
  if (values.size() != 3) return Mismatch(kKernelCallOp, name, "3 numbers", StrCat(values.size()));
  *triple = values.begin();
  return ffi::Error::Success();
}

// `parameters` is their number, then kind, value and size of each.
ffi::Error GetParameters(ffi::Span<const int64_t> encoded, const ffi::RemainingArgs& operands,
                         const ffi::RemainingRets& results, KernelLaunch* launch) {
  const std::string op = StrCat(kKernelCallOp, ": ", launch->name);
  if (encoded.size() < 1 || encoded.begin()[0] < 0 || encoded.begin()[0] > static_cast<int64_t>(encoded.size()) ||
      encoded.size() != static_cast<size_t>(1 + 3 * encoded.begin()[0])) {
    return Mismatch(op.c_str(), "parameters", "a number and three more for each parameter",
                    StrCat(encoded.size(), " numbers"));
  }
  launch->parameters.reserve(static_cast<size_t>(encoded.begin()[0]));
  for (const int64_t* entry = encoded.begin() + 1; entry != encoded.end(); entry += 3) {
    const int64_t kind = entry[0], value = entry[1], size = entry[2];
    const std::string argument = StrCat("argument ", launch->parameters.size());
    if (kind == kBits) {
      if (size < 1 || size > 8) return Mismatch(op.c_str(), argument.c_str(), "a number of 1 to 8 bytes", StrCat(size));
      launch->parameters.push_back({static_cast<uint64_t>(value), static_cast<uint32_t>(size)});
      continue;
    }
    if (kind != kOperand && kind != kResult) {
      return Mismatch(op.c_str(), argument.c_str(), "an operand, a result or a number", StrCat("kind ", kind));
    }
    const size_t count = kind == kOperand ? operands.size() : results.size();
    const char* const what = kind == kOperand ? "operand" : "result";
    if (value < 0 || static_cast<size_t>(value) >= count) {
      return Mismatch(op.c_str(), argument.c_str(), StrCat("one of ", count, " ", what, "s"), StrCat(what, " ", value));
    }
    const void* pointer;
    if (kind == kOperand) {
      auto buffer = operands.get<ffi::AnyBuffer>(static_cast<size_t>(value));
      if (!buffer) return buffer.error();
      pointer = buffer->untyped_data();
    } else {
      auto buffer = results.get<ffi::AnyBuffer>(static_cast<size_t>(value));
      if (!buffer) return buffer.error();
      pointer = (*buffer)->untyped_data();
    }
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    if (size < 0 || (size > 0 && address % static_cast<uint64_t>(size) != 0)) {
      return Mismatch(op.c_str(), argument.c_str(),
                      StrCat("memory aligned to ", size, " bytes, for which the kernel was compiled"),
                      StrCat(what, " ", value, " at ", address % 256, " bytes past a multiple of 256"));
    }
    launch->parameters.push_back({address, sizeof(void*)});
  }
  return ffi::Error::Success();
}

ffi::Error GetLaunch(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results, std::string_view arch,
                     ffi::Span<const int64_t> block, bool check_inputs, ffi::Span<const int64_t> cluster,
                     bool cooperative, ffi::Span<const uint8_t> cubin, ffi::Span<const int64_t> grid,
                     std::string_view name, ffi::Span<const int64_t> parameters, bool pdl, int64_t shared,
                     KernelLaunch* launch) {
  launch->name = name;
  launch->arch = arch;
  launch->cubin = {reinterpret_cast<const char*>(cubin.begin()), cubin.size()};
  launch->shared_bytes = shared;
  launch->cooperative = cooperative;
  launch->pdl = pdl;
  launch->check_inputs = check_inputs;
  XLA_GPU_RETURN_IF_ERROR(GetTriple("grid", grid, &launch->grid));
  XLA_GPU_RETURN_IF_ERROR(GetTriple("block", block, &launch->block));
  XLA_GPU_RETURN_IF_ERROR(GetTriple("cluster", cluster, &launch->cluster));
  XLA_GPU_RETURN_IF_ERROR(GetParameters(parameters, operands, results, launch));
  return ToError(CheckKernelLaunch(*launch));
}

template <typename... Attributes>
ffi::Error KernelCallHost(CallContext, ffi::RemainingArgs operands, ffi::RemainingRets results,
                          Attributes... attributes) {
  return NoThrow(kKernelCallOp, [&]() -> ffi::Error {
    KernelLaunch launch;
    XLA_GPU_RETURN_IF_ERROR(GetLaunch(operands, results, attributes..., &launch));
    XLA_GPU_RETURN_IF_ERROR(ToError(CheckCubin(launch)));
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      StrCat(kKernelCallOp, ": ", launch.name,
                             ": a CUDA kernel runs on an NVIDIA GPU alone, and this program runs on the CPU"));
  });
}

#ifdef XLA_GPU_WITH_CUDA
template <typename... Attributes>
ffi::Error KernelCallCuda(CallContext context, ffi::RemainingArgs operands, ffi::RemainingRets results,
                          Attributes... attributes) {
  return NoThrow(kKernelCallOp, [&]() -> ffi::Error {
    KernelLaunch launch;
    XLA_GPU_RETURN_IF_ERROR(GetLaunch(operands, results, attributes..., &launch));
    return ToError(LaunchKernel(launch, context.stream()));
  });
}
#endif

}  // namespace

// clang-format off
#define XLA_GPU_KERNEL_CALL_SIGNATURE                  \
       RemainingArgs()                                 \
      .RemainingRets()                                 \
      .Attr<std::string_view>("arch")                  \
      .Attr<ffi::Span<const int64_t>>("block")         \
      .Attr<bool>("check_inputs")                      \
      .Attr<ffi::Span<const int64_t>>("cluster")       \
      .Attr<bool>("cooperative")                       \
      .Attr<ffi::Span<const uint8_t>>("cubin")         \
      .Attr<ffi::Span<const int64_t>>("grid")          \
      .Attr<std::string_view>("name")                  \
      .Attr<ffi::Span<const int64_t>>("parameters")    \
      .Attr<bool>("pdl")                               \
      .Attr<int64_t>("shared")
#define XLA_GPU_KERNEL_CALL_ATTRIBUTES                                                                        \
  std::string_view, ffi::Span<const int64_t>, bool, ffi::Span<const int64_t>, bool, ffi::Span<const uint8_t>, \
      ffi::Span<const int64_t>, std::string_view, ffi::Span<const int64_t>, bool, int64_t
// clang-format on

XLA_GPU_DEFINE_HANDLER(xla_gpu_kernel_call_host, (KernelCallHost<XLA_GPU_KERNEL_CALL_ATTRIBUTES>),
                       XLA_GPU_BIND().XLA_GPU_KERNEL_CALL_SIGNATURE);
#ifdef XLA_GPU_WITH_CUDA
XLA_GPU_DEFINE_HANDLER(xla_gpu_kernel_call_cuda, (KernelCallCuda<XLA_GPU_KERNEL_CALL_ATTRIBUTES>),
                       XLA_GPU_BIND().XLA_GPU_KERNEL_CALL_SIGNATURE, CaptureTraits());
#endif

}  // namespace xla_gpu
