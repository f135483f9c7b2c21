#include "ffi/handlers/context.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace xla_gpu {

Stream CallContext::stream() const {
  using Decoding = ::xla::ffi::CtxDecoding<::xla::ffi::PlatformStream<Stream>>;
  const std::optional<Stream> stream = Decoding::Decode(api_, context_, *diagnostic_);
  if (!stream) throw std::runtime_error(diagnostic_->Result());
  return *stream;
}

::xla::ffi::ThreadPool CallContext::thread_pool() const {
  return *::xla::ffi::CtxDecoding<::xla::ffi::ThreadPool>::Decode(api_, context_, *diagnostic_);
}

std::initializer_list<::xla::ffi::Traits> CaptureTraits() {
  // Static lists, whose arrays live as long as they do.
  static const std::initializer_list<::xla::ffi::Traits> capturable = {::xla::ffi::Traits::kCmdBufferCompatible};
  static const std::initializer_list<::xla::ffi::Traits> none = {};
  const char* check_inputs = std::getenv("XLA_GPU_CHECK_INPUTS");
  return check_inputs != nullptr && std::strcmp(check_inputs, "1") == 0 ? none : capturable;
}

}  // namespace xla_gpu
