// The operands of handlers that take many, most of them optional.
#ifndef XLA_GPU_HANDLERS_OPTIONAL_OPERANDS_H_
#define XLA_GPU_HANDLERS_OPTIONAL_OPERANDS_H_

#include <array>
#include <cstdint>
#include <optional>

#include "ffi/handlers/check.h"

namespace xla_gpu {

// Operands in the order of an enum. Those from kFirstOptional on are there where the attribute `given` has their bit.
template <int kCount, int kFirstOptional>
class OptionalOperands {
 public:
  ffi::Error Get(const char* op, const ffi::RemainingArgs& args, int64_t given) {
    size_t next = 0;
    for (int i = 0; i < kCount; ++i) {
      if (i >= kFirstOptional && !(given >> (i - kFirstOptional) & 1)) continue;
      if (next < args.size()) operands_[i] = *args.get<ffi::AnyBuffer>(next);
      ++next;
    }
    if (given < 0 || given >> (kCount - kFirstOptional) != 0) {
      return Mismatch(op, "given", StrCat("bits of ", kCount - kFirstOptional, " optional operands"), StrCat(given));
    }
    if (next == args.size()) return ffi::Error::Success();
    return Mismatch(op, "operands", StrCat(next, " for these attributes"), StrCat(args.size()));
  }

  const std::optional<ffi::AnyBuffer>& operator[](int i) const { return operands_[i]; }

 private:
  std::array<std::optional<ffi::AnyBuffer>, kCount> operands_;
};

}  // namespace xla_gpu

#endif  // XLA_GPU_HANDLERS_OPTIONAL_OPERANDS_H_
