// Functions that are registered as handlers and must be refused: built with an FFI API that no runtime has yet, or no
// handlers of the typed FFI at all. They differ in the version that they report; none may ever run.
#include <cstdlib>
#include <stdexcept>

#include "xla/ffi/api/c_api.h"

namespace {

XLA_FFI_Error* Answer(XLA_FFI_CallFrame* frame, int major, int minor) {
  if (frame->extension_start == nullptr || frame->extension_start->type != XLA_FFI_Extension_Metadata) {
    std::abort();  // it was run, though its version had been refused
  }
  XLA_FFI_Metadata* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame->extension_start)->metadata;
  metadata->api_version.major_version = major;
  metadata->api_version.minor_version = minor;
  return nullptr;
}

}  // namespace

#define TEST_HANDLER(name) \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame* frame)

TEST_HANDLER(xla_gpu_test_next_minor) { return Answer(frame, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR + 1); }
TEST_HANDLER(xla_gpu_test_next_major) { return Answer(frame, XLA_FFI_API_MAJOR + 1, 0); }
TEST_HANDLER(xla_gpu_test_no_version) { return Answer(frame, 0, 0); }

// Its headers expect a larger metadata struct than ours, and report it as XLA's do.
TEST_HANDLER(xla_gpu_test_refuses_question) {
  XLA_FFI_Error_Create_Args args = {};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = "Unexpected XLA_FFI_Metadata size: expected 1000, got 256";
  args.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
  return frame->api->XLA_FFI_Error_Create(&args);
}

TEST_HANDLER(xla_gpu_test_throws) {
  static_cast<void>(frame);
  throw std::runtime_error("a C++ exception out of a handler");
}
