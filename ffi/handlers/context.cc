#include "ffi/handlers/context.h"

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

}  // namespace xla_gpu
