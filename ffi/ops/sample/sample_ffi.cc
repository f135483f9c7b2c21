// sample: checks and bindings of the host and CUDA handlers.
#include <vector>

#include "ffi/device/host_copy.h"
#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/ops/sample/sample.h"

namespace xla_gpu {
namespace {

constexpr char kSampleOp[] = "sample";

struct Buffers {
  ffi::AnyBuffer logits, temperature, top_k, top_p, min_p, seed, step, token, logprob;
};

ffi::Error GetParams(const Buffers& b, SampleParams* params) {
  SampleParams& p = *params;
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(kSampleOp, "logits", b.logits, &p.dtype));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(kSampleOp, "logits", b.logits, 2));
  p.rows = b.logits.dimensions()[0];
  p.vocab = b.logits.dimensions()[1];
  if (p.vocab < 1 || p.vocab >= int64_t{1} << 24) {  // 2^24 masses of 40 bits fit into 64
    return Mismatch(kSampleOp, "logits", "a vocabulary of 1 to 2^24 - 1 tokens, [rows, vocab]",
                    StrCat("shape ", ShapeText(b.logits.dimensions())));
  }
  const struct {
    const char* name;
    const ffi::AnyBuffer& buffer;
    ffi::DataType dtype;
  } numbers[] = {
      {"temperature", b.temperature, ffi::DataType::F32},
      {"top_k", b.top_k, ffi::DataType::S32},
      {"top_p", b.top_p, ffi::DataType::F32},
      {"min_p", b.min_p, ffi::DataType::F32},
      {"step", b.step, ffi::DataType::S32},
      {"token", b.token, ffi::DataType::S32},
      {"logprob", b.logprob, ffi::DataType::F32},
  };
  for (const auto& [name, buffer, dtype] : numbers) {
    XLA_GPU_RETURN_IF_ERROR(CheckDType(kSampleOp, name, buffer, dtype));
    XLA_GPU_RETURN_IF_ERROR(CheckShape(kSampleOp, name, buffer, {p.rows}));
  }
  const ffi::DataType seed_dtype = b.seed.element_type();
  if (seed_dtype != ffi::DataType::S32 && seed_dtype != ffi::DataType::S64) {
    return Mismatch(kSampleOp, "seed", "int32 or int64", DTypeText(seed_dtype));
  }
  XLA_GPU_RETURN_IF_ERROR(CheckShape(kSampleOp, "seed", b.seed, {p.rows}));
  p.logits = b.logits.untyped_data();
  p.temperature = static_cast<const float*>(b.temperature.untyped_data());
  p.top_k = static_cast<const int32_t*>(b.top_k.untyped_data());
  p.top_p = static_cast<const float*>(b.top_p.untyped_data());
  p.min_p = static_cast<const float*>(b.min_p.untyped_data());
  p.seed = b.seed.untyped_data();
  p.seeds_are_64_bit = seed_dtype == ffi::DataType::S64;
  p.step = static_cast<const int32_t*>(b.step.untyped_data());
  p.token = static_cast<int32_t*>(b.token.untyped_data());
  p.logprob = static_cast<float*>(b.logprob.untyped_data());
  return ffi::Error::Success();
}

template <typename Check, typename Run>
ffi::Error Sample(const Buffers& buffers, Check&& check, Run&& run) {
  return NoThrow(kSampleOp, [&]() -> ffi::Error {
    SampleParams params;
    XLA_GPU_RETURN_IF_ERROR(GetParams(buffers, &params));
    XLA_GPU_RETURN_IF_ERROR(ToError(check(params)));
    return ToError(run(params));
  });
}

ffi::Error SampleHost(CallContext context, ffi::AnyBuffer logits, ffi::AnyBuffer temperature, ffi::AnyBuffer top_k,
                      ffi::AnyBuffer top_p, ffi::AnyBuffer min_p, ffi::AnyBuffer seed, ffi::AnyBuffer step,
                      ffi::Result<ffi::AnyBuffer> token, ffi::Result<ffi::AnyBuffer> logprob, bool /*check_inputs*/) {
  return Sample({logits, temperature, top_k, top_p, min_p, seed, step, *token, *logprob}, CheckSampleRows,
                [&](const SampleParams& params) { return RunSample(params, XlaExecutor(context)); });
}

#ifdef XLA_GPU_WITH_CUDA
ffi::Error SampleCuda(CallContext context, ffi::AnyBuffer logits, ffi::AnyBuffer temperature, ffi::AnyBuffer top_k,
                      ffi::AnyBuffer top_p, ffi::AnyBuffer min_p, ffi::AnyBuffer seed, ffi::AnyBuffer step,
                      ffi::Result<ffi::AnyBuffer> token, ffi::Result<ffi::AnyBuffer> logprob, bool check_inputs) {
  const auto check = [&](const SampleParams& params) {
    if (!check_inputs || params.rows == 0) return Status::Ok();
    const auto rows = static_cast<size_t>(params.rows);
    std::vector<float> numbers(3 * rows);
    const std::vector<int32_t> zeros(rows);
    const float* const sources[] = {params.temperature, params.top_p, params.min_p};
    for (size_t i = 0; i < 3; ++i) {
      Status status = CopyToHost(numbers.data() + i * rows, sources[i], rows * sizeof(float), context.stream());
      if (!status.ok()) return status;
    }
    SampleParams on_host = params;
    on_host.temperature = numbers.data();
    on_host.top_p = numbers.data() + rows;
    on_host.min_p = numbers.data() + 2 * rows;
    on_host.top_k = on_host.step = zeros.data();  // any number is right
    on_host.seed = zeros.data();
    on_host.seeds_are_64_bit = false;
    return CheckSampleRows(on_host);
  };
  return Sample({logits, temperature, top_k, top_p, min_p, seed, step, *token, *logprob}, check,
                [&](const SampleParams& params) { return LaunchSample(params, context.stream()); });
}
#endif

}  // namespace

// clang-format off
#define XLA_GPU_SAMPLE_SIGNATURE                 \
       Arg<ffi::AnyBuffer>()  /* logits */       \
      .Arg<ffi::AnyBuffer>()  /* temperature */  \
      .Arg<ffi::AnyBuffer>()  /* top_k */        \
      .Arg<ffi::AnyBuffer>()  /* top_p */        \
      .Arg<ffi::AnyBuffer>()  /* min_p */        \
      .Arg<ffi::AnyBuffer>()  /* seed */         \
      .Arg<ffi::AnyBuffer>()  /* step */         \
      .Ret<ffi::AnyBuffer>()  /* token */        \
      .Ret<ffi::AnyBuffer>()  /* logprob */      \
      .Attr<bool>("check_inputs")
// clang-format on

XLA_GPU_DEFINE_HANDLER(xla_gpu_sample_host, SampleHost, XLA_GPU_BIND().XLA_GPU_SAMPLE_SIGNATURE);
#ifdef XLA_GPU_WITH_CUDA
XLA_GPU_DEFINE_HANDLER(xla_gpu_sample_cuda, SampleCuda, XLA_GPU_BIND().XLA_GPU_SAMPLE_SIGNATURE, CaptureTraits());
#endif

}  // namespace xla_gpu
