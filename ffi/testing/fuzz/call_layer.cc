// Calls of the operators around attention and matrix products.

#include "ffi/testing/fuzz/call.h"

namespace xla_gpu::fuzz {

void Call::Linear() {
  target_ = "xla_gpu_linear";
  constexpr int32_t kQuantised[] = {XLA_FFI_DataType_F8E4M3FN, XLA_FFI_DataType_S8, XLA_FFI_DataType_U8};
  static constexpr char kActivations[][13] = {"none", "silu_and_mul", "gelu_and_mul", "relu"};
  const int32_t dtype = kFloats[input_.Below(3)];
  const int32_t weight = input_.Once(3) ? dtype : kQuantised[input_.Below(3)];
  const bool int4 = weight == XLA_FFI_DataType_U8, float8 = weight == XLA_FFI_DataType_F8E4M3FN;
  const bool scale = weight != dtype, zero_point = int4 && input_.Once(2), bias = input_.Once(2);
  const bool residual = input_.Once(2);
  const char* activation = kActivations[input_.Below(input_.Once(16) ? 4 : 3)];
  const bool gated = activation[0] != 'n';
  // A weight of at most 60 KiB: within kMaxBytes.
  const int64_t rows = input_.Below(70), n = 16 * (1 + input_.Below(6)), k = int4 ? 128 : 16 * (1 + input_.Below(10));
  const Shape blocks = {(n + 127) / 128, (k + 127) / 128};
  const Shape of_float8[] = {{1}, {n}, blocks};
  Add(&operands_, dtype, {rows, k});
  Add(&operands_, weight, {n, int4 ? k / 2 : k});
  if (scale) {
    Add(&operands_, int4 ? dtype : int32_t{XLA_FFI_DataType_F32},
        int4     ? Shape{n, k / 128}
        : float8 ? of_float8[input_.Below(3)]
                 : Shape{n});
  }
  if (zero_point) AddNumbers(XLA_FFI_DataType_U8, {n, k / 128}, 16);
  if (bias) Add(&operands_, dtype, {n});
  if (residual) Add(&operands_, dtype, {rows, gated ? n / 2 : n});
  Add(&results_, dtype, {rows, gated ? n / 2 : n});
  attributes_.push_back({"activation", XLA_FFI_AttrType_STRING, 0, activation, std::strlen(activation)});
  AddScalar("bias", XLA_FFI_DataType_PRED, bias);
  AddScalar("check_inputs", XLA_FFI_DataType_PRED, input_.Once(2));
  AddScalar("residual", XLA_FFI_DataType_PRED, residual);
  AddScalar("weight_scale", XLA_FFI_DataType_PRED, scale);
  AddScalar("weight_zero_point", XLA_FFI_DataType_PRED, zero_point);
  AddScratch();
}

void Call::GroupedLinear() {
  target_ = "xla_gpu_grouped_linear";
  constexpr int32_t kQuantised[] = {XLA_FFI_DataType_F8E4M3FN, XLA_FFI_DataType_S8, XLA_FFI_DataType_U8};
  const int32_t dtype = kFloats[input_.Once(16) ? 0 : 1 + input_.Below(2)];
  const int32_t weight = input_.Once(3) ? dtype : kQuantised[input_.Below(3)];
  const bool packed = weight == XLA_FFI_DataType_U8, mxfp4 = packed && input_.Once(2), int4 = packed && !mxfp4;
  const bool scale = weight != dtype, zero_point = int4 && input_.Once(2), bias = input_.Once(2);
  const bool blocks = weight == XLA_FFI_DataType_F8E4M3FN && input_.Once(2);
  // At most 4 groups of 48 by 80 weights of 4 bytes, which are refused, or by 144 of one: within kMaxBytes.
  const int64_t groups = 1 + input_.Below(4), rows = input_.Below(40), n = 16 * (1 + input_.Below(3));
  const int64_t k = int4 ? 128 : mxfp4 ? 32 * (1 + input_.Below(4)) : 16 * (1 + input_.Below(scale ? 9 : 5));
  Add(&operands_, dtype, {rows, k});
  Add(&operands_, weight, {groups, n, packed ? k / 2 : k});
  if (input_.Once(2)) {
    AddNumbers(XLA_FFI_DataType_S32, {groups}, rows + 1);
  } else {
    Add(&operands_, XLA_FFI_DataType_S32, {groups});
  }
  if (mxfp4) {
    Add(&operands_, weight, {groups, n, k / 32});
  } else if (scale) {
    Add(&operands_, int4 ? dtype : int32_t{XLA_FFI_DataType_F32},
        int4     ? Shape{groups, n, k / 128}
        : blocks ? Shape{groups, (n + 127) / 128, (k + 127) / 128}
                 : Shape{groups, n});
  }
  if (zero_point) AddNumbers(XLA_FFI_DataType_U8, {groups, n, k / 128}, 16);
  if (bias) Add(&operands_, dtype, {groups, n});
  Add(&results_, dtype, {rows, n});
  AddScalar("bias", XLA_FFI_DataType_PRED, bias);
  AddScalar("weight_scale", XLA_FFI_DataType_PRED, scale);
  AddScalar("weight_zero_point", XLA_FFI_DataType_PRED, zero_point);
}

// Adds a weight's scale, zero points and bias; returns which of them, a bit each.
int64_t Call::AddOfWeight(int32_t dtype, int32_t stored, int64_t n, int64_t k, bool zero_point, bool bias) {
  const bool int4 = stored == XLA_FFI_DataType_U8, scale = stored != dtype;
  if (scale) Add(&operands_, int4 ? dtype : int32_t{XLA_FFI_DataType_F32}, int4 ? Shape{n, k / 128} : Shape{n});
  if (zero_point) AddNumbers(XLA_FFI_DataType_U8, {n, k / 128}, 16);
  if (bias) Add(&operands_, dtype, {n});
  return scale | zero_point << 1 | bias << 2;
}

void Call::GatedMlp() {
  target_ = "xla_gpu_gated_mlp";
  const int32_t dtype = kFloats[input_.Below(3)];
  const bool int4 = input_.Once(3), int8 = !int4 && input_.Once(2);
  const int32_t stored = int4 ? int32_t{XLA_FFI_DataType_U8} : int8 ? int32_t{XLA_FFI_DataType_S8} : dtype;
  // Weights and rows of at most 60 KiB, as above.
  const int64_t unit = int4 ? 128 : 16, rows = input_.Below(int4 ? 60 : 70);
  const int64_t hidden = unit * (1 + input_.Below(int4 ? 2 : 5)), wide = unit * (1 + input_.Below(int4 ? 1 : 5));
  const bool norm = input_.Once(2), residual = input_.Once(2), zero_points = int4 && input_.Once(2);
  const bool biases = input_.Once(2);
  Add(&operands_, dtype, {rows, hidden});
  Add(&operands_, stored, {2 * wide, int4 ? hidden / 2 : hidden});
  Add(&operands_, stored, {hidden, int4 ? wide / 2 : wide});
  if (norm) Add(&operands_, dtype, {hidden});
  if (residual) Add(&operands_, dtype, {rows, hidden});
  int64_t bits = norm | residual << 1;
  const int64_t n[] = {2 * wide, hidden}, k[] = {hidden, wide};
  for (int i = 0; i < 2; ++i) bits |= AddOfWeight(dtype, stored, n[i], k[i], zero_points, biases) << (2 + 3 * i);
  Add(&results_, dtype, {rows, hidden});
  const char* activation = input_.Once(16) ? "none" : input_.Once(2) ? "silu_and_mul" : "gelu_and_mul";
  attributes_.push_back({"activation", XLA_FFI_AttrType_STRING, 0, activation, std::strlen(activation)});
  AddScalar("check_inputs", XLA_FFI_DataType_PRED, input_.Once(2));
  AddScalar("eps", XLA_FFI_DataType_F32, input_.Once(8) ? input_.Raw<float>() : 1e-5f);
  AddScalar("given", XLA_FFI_DataType_S64, bits);
  AddScalar("round_once", XLA_FFI_DataType_PRED, input_.Once(2));
  AddScalar("weight_offset", XLA_FFI_DataType_F32, input_.Once(8) ? input_.Raw<float>() : 0.0f);
  AddScratch();
}

void Call::AttentionBlock() {
  target_ = "xla_gpu_attention_block";
  const int32_t dtype = kFloats[input_.Below(3)];
  const int32_t float8s[] = {XLA_FFI_DataType_F8E4M3FN, XLA_FFI_DataType_F8E5M2};
  const bool int8 = input_.Once(3), cache_scales = input_.Once(3), norm = input_.Once(2), residual = input_.Once(2);
  const bool biases = input_.Once(2), head_norms = input_.Once(3), sinks = input_.Once(4);
  const int32_t stored = int8 ? int32_t{XLA_FFI_DataType_S8} : dtype;
  const int32_t cache = cache_scales ? float8s[input_.Below(2)] : dtype;
  const int64_t tokens = input_.Below(7), hidden = 16 * (1 + input_.Below(3)), kv_heads = 1 + input_.Below(2);
  const int64_t heads = kv_heads * (1 + input_.Below(3)), head_dim = 16 * (1 + input_.Below(2));
  const int64_t width = (heads + 2 * kv_heads) * head_dim, inner = heads * head_dim, positions = 1 + input_.Below(6);
  const int64_t pages = 1 + input_.Below(5), page_size = 1 + input_.Below(5);
  const int64_t max_seqs = input_.Below(4), pages_per_seq = input_.Below(5);
  const Shape cache_shape =
      input_.Once(2) ? Shape{2, pages, page_size, kv_heads, head_dim} : Shape{pages, page_size, 2 * kv_heads, head_dim};
  Add(&operands_, dtype, {tokens, hidden});
  Add(&operands_, stored, {width, hidden});
  Add(&operands_, stored, {hidden, inner});
  AddNumbers(XLA_FFI_DataType_S32, {tokens}, positions);
  Add(&operands_, XLA_FFI_DataType_F32, {positions, input_.Below(head_dim / 2 + 1), 2});
  Add(&operands_, cache, cache_shape);
  AddNumbers(input_.Once(2) ? XLA_FFI_DataType_S64 : XLA_FFI_DataType_S32, {input_.Below(tokens + 1)},
             pages * page_size);
  AddSequences(tokens, max_seqs, pages_per_seq, pages, page_size);
  if (norm) Add(&operands_, dtype, {hidden});
  if (residual) Add(&operands_, dtype, {tokens, hidden});
  int64_t bits = norm | residual << 1;
  bits |= AddOfWeight(dtype, stored, width, hidden, /*zero_point=*/false, biases) << 2;
  for (int i = 0; i < 2 * head_norms; ++i) Add(&operands_, dtype, {head_dim});
  const int64_t scale_size = input_.Once(2) ? kv_heads : 1;
  for (int i = 0; i < 2 * cache_scales; ++i) Add(&operands_, XLA_FFI_DataType_F32, {scale_size});
  if (sinks) Add(&operands_, XLA_FFI_DataType_F32, {heads});
  bits |= (head_norms ? 3 << 5 : 0) | (cache_scales ? 3 << 7 : 0) | (sinks ? 1 << 9 : 0);
  bits |= AddOfWeight(dtype, stored, hidden, inner, /*zero_point=*/false, biases) << 10;
  Add(&results_, dtype, {tokens, hidden});
  if (input_.Once(2)) {
    results_.push_back(operands_[5]);
  } else {
    Add(&results_, cache, cache_shape);
  }
  AddScalar("check_inputs", XLA_FFI_DataType_PRED, input_.Once(2));
  AddScalar("eps", XLA_FFI_DataType_F32, input_.Once(8) ? input_.Raw<float>() : 1e-5f);
  AddScalar("given", XLA_FFI_DataType_S64, bits);
  AddScalar("interleaved", XLA_FFI_DataType_PRED, input_.Once(2));
  AddScalar("round_once", XLA_FFI_DataType_PRED, input_.Once(2));
  AddScalar("scale", XLA_FFI_DataType_F32, input_.Once(8) ? input_.Raw<float>() : 0.25f);
  AddScalar("sliding_window", XLA_FFI_DataType_S64, input_.Number(6));
  AddScalar("soft_cap", XLA_FFI_DataType_F32, input_.Once(8) ? input_.Raw<float>() : input_.Once(2) ? 5.0f : 0.0f);
  AddScalar("weight_offset", XLA_FFI_DataType_F32, input_.Once(8) ? input_.Raw<float>() : 0.0f);
  AddScratch();
}

void Call::RmsNorm() {
  target_ = "xla_gpu_rms_norm";
  const int32_t dtype = kFloats[input_.Below(3)];
  const bool with_residual = input_.Once(2);
  const Shape shape = {input_.Below(4), input_.Below(40)};
  Add(&operands_, dtype, shape);
  Add(&operands_, dtype, {shape[1]});
  if (with_residual) Add(&operands_, dtype, shape);
  for (int i = 0; i < 1 + with_residual; ++i) Add(&results_, dtype, shape);
  AddScalar("eps", XLA_FFI_DataType_F32, input_.Once(8) ? input_.Raw<float>() : 1e-5f);
  AddScalar("weight_offset", XLA_FFI_DataType_F32, input_.Once(8) ? input_.Raw<float>() : 1.0f);
  AddScalar("round_once", XLA_FFI_DataType_PRED, input_.Once(2));
  AddScalar("has_residual", XLA_FFI_DataType_PRED, with_residual);
}

void Call::SiluAndMul() {
  target_ = input_.Once(2) ? "xla_gpu_silu_and_mul" : "xla_gpu_gelu_and_mul";
  const int32_t dtype = kFloats[input_.Below(3)];
  const Shape out = {input_.Below(4), input_.Below(40)};
  Add(&operands_, dtype, {out[0], 2 * out[1]});
  Add(&results_, dtype, out);
}

void Call::Sample() {
  target_ = "xla_gpu_sample";
  const int64_t rows = input_.Below(4);
  Add(&operands_, kFloats[input_.Below(3)], {rows, 1 + input_.Below(40)});
  Add(&operands_, XLA_FFI_DataType_F32, {rows});  // temperature
  AddNumbers(XLA_FFI_DataType_S32, {rows}, 40);   // top_k
  Add(&operands_, XLA_FFI_DataType_F32, {rows});  // top_p
  Add(&operands_, XLA_FFI_DataType_F32, {rows});  // min_p
  // Numbers that the handler takes: random bits are rarely between 0 and 1.
  if (!input_.Once(4)) {
    for (const size_t operand : {1, 3, 4}) {
      auto* values = static_cast<float*>(operands_[operand].data);
      for (int64_t row = 0; row < rows; ++row) values[row] = static_cast<float>(input_.Below(11)) / 10.0f;
    }
  }
  AddNumbers(input_.Once(2) ? XLA_FFI_DataType_S64 : XLA_FFI_DataType_S32, {rows}, 100);  // seed
  AddNumbers(XLA_FFI_DataType_S32, {rows}, 100);                                          // step
  Add(&results_, XLA_FFI_DataType_S32, {rows});
  Add(&results_, XLA_FFI_DataType_F32, {rows});
  AddScalar("check_inputs", XLA_FFI_DataType_PRED, input_.Once(2));
}

void Call::RotaryEmbedding() {
  target_ = "xla_gpu_rotary_embedding";
  const int32_t dtype = kFloats[input_.Below(3)];
  const int64_t tokens = input_.Below(5), head_dim = input_.Below(40), positions = input_.Below(6);
  const Shape query = {tokens, input_.Below(4), head_dim}, key = {tokens, input_.Below(3), head_dim};
  Add(&operands_, dtype, query);
  Add(&operands_, dtype, key);
  AddNumbers(XLA_FFI_DataType_S32, {tokens}, positions);
  Add(&operands_, XLA_FFI_DataType_F32, {positions, input_.Below(head_dim / 2 + 1), 2});
  Add(&results_, dtype, query);
  Add(&results_, dtype, key);
  AddScalar("interleaved", XLA_FFI_DataType_PRED, input_.Once(2));
  AddScalar("check_inputs", XLA_FFI_DataType_PRED, input_.Once(2));
}

void Call::RotaryAndCache() {
  target_ = "xla_gpu_rotary_and_cache";
  const int32_t dtype = kFloats[input_.Below(3)];
  const int32_t float8s[] = {XLA_FFI_DataType_F8E4M3FN, XLA_FFI_DataType_F8E5M2};
  const bool scales = input_.Once(3), q_norm = input_.Once(2), k_norm = input_.Once(2), bias = input_.Once(2);
  const int32_t cache = scales ? float8s[input_.Below(2)] : dtype;
  const int64_t tokens = input_.Below(7), kv_heads = 1 + input_.Below(2), head_dim = 1 + input_.Below(40);
  const int64_t heads = 1 + input_.Below(4), width = (heads + 2 * kv_heads) * head_dim, positions = 1 + input_.Below(6);
  const int64_t pages = 1 + input_.Below(5), page_size = 1 + input_.Below(5);
  const Shape cache_shape =
      input_.Once(2) ? Shape{2, pages, page_size, kv_heads, head_dim} : Shape{pages, page_size, 2 * kv_heads, head_dim};
  Add(&operands_, dtype, {tokens, width});
  AddNumbers(XLA_FFI_DataType_S32, {tokens}, positions);
  Add(&operands_, XLA_FFI_DataType_F32, {positions, input_.Below(head_dim / 2 + 1), 2});
  Add(&operands_, cache, cache_shape);
  AddNumbers(input_.Once(2) ? XLA_FFI_DataType_S64 : XLA_FFI_DataType_S32, {input_.Below(tokens + 1)},
             pages * page_size);
  const int64_t scale_size = input_.Once(2) ? kv_heads : 1;
  for (int i = 0; i < 2 * scales; ++i) Add(&operands_, XLA_FFI_DataType_F32, {scale_size});
  for (int i = 0; i < q_norm + k_norm; ++i) Add(&operands_, dtype, {head_dim});
  if (bias) Add(&operands_, dtype, {width});
  Add(&results_, dtype, {tokens, heads, head_dim});
  if (input_.Once(2)) {
    results_.push_back(operands_[3]);
  } else {
    Add(&results_, cache, cache_shape);
  }
  AddScalar("check_inputs", XLA_FFI_DataType_PRED, input_.Once(2));
  AddScalar("kv_scales", XLA_FFI_DataType_PRED, scales);
  AddScalar("has_q_norm", XLA_FFI_DataType_PRED, q_norm);
  AddScalar("has_k_norm", XLA_FFI_DataType_PRED, k_norm);
  AddScalar("has_bias", XLA_FFI_DataType_PRED, bias);
  AddScalar("interleaved", XLA_FFI_DataType_PRED, input_.Once(2));
  AddScalar("round_once", XLA_FFI_DataType_PRED, input_.Once(2));
  AddScalar("norm_eps", XLA_FFI_DataType_F32, input_.Once(8) ? input_.Raw<float>() : 1e-5f);
  AddScalar("weight_offset", XLA_FFI_DataType_F32, input_.Once(8) ? input_.Raw<float>() : 0.0f);
}

}  // namespace xla_gpu::fuzz
