#include "ffi/testing/fuzz/call.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace xla_gpu::fuzz {
namespace {

constexpr int32_t kCaches[] = {XLA_FFI_DataType_F32, XLA_FFI_DataType_F16, XLA_FFI_DataType_BF16,
                               XLA_FFI_DataType_F8E4M3FN, XLA_FFI_DataType_F8E5M2};
constexpr const char* kNames[] = {
    "scale", "sliding_window", "soft_cap", "check_inputs", "kv_scales", "has_sinks", "value_dim", "", "a",
    "a.b",   "nested"};

// Bytes of an element as the tests' handlers count them; 0 for what they do not know.
int64_t SizeOf(int32_t dtype) {
  switch (dtype) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
    case XLA_FFI_DataType_F8E4M3FN:
    case XLA_FFI_DataType_F8E5M2:
      return 1;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 2;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32:
      return 4;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_C64:
      return 8;
    case XLA_FFI_DataType_C128:
      return 16;
    default:
      return 0;
  }
}

// -1: too large, or not a size.
int64_t Bytes(int32_t dtype, const std::vector<int64_t>& shape) {
  int64_t bytes = std::max<int64_t>(SizeOf(dtype), 1);
  for (int64_t dim : shape) {
    if (dim < 0 || __builtin_mul_overflow(bytes, dim, &bytes) || bytes > kMaxBytes) return -1;
  }
  return bytes;
}

[[noreturn]] void Broken(const char* what, const char* text) {
  std::fprintf(stderr, "xla_gpu_call broke its promise: %s: %s\n", what, text != nullptr ? text : "(null)");
  std::abort();
}

}  // namespace

void* Call::Memory(size_t bytes) {
  // Aligned as XLA and PyTorch align it.
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, std::max<size_t>(bytes, 1)) != 0) std::abort();
  memory_.emplace_back(static_cast<char*>(memory), &std::free);
  constexpr size_t kFromInput = 256;
  uint8_t last = 0;
  for (size_t i = 0; i < bytes; ++i) {
    if (i < kFromInput) last = input_.Byte();
    static_cast<uint8_t*>(memory)[i] = last;
  }
  return memory;
}

int64_t* Call::Dims(const Shape& shape) {
  auto* dims = static_cast<int64_t*>(Memory(0));
  if (!shape.empty()) {
    memory_.pop_back();
    dims = static_cast<int64_t*>(std::malloc(shape.size() * sizeof(int64_t)));
    memory_.emplace_back(reinterpret_cast<char*>(dims), &std::free);
    std::copy(shape.begin(), shape.end(), dims);
  }
  return dims;
}

// The bytes of the next buffer of a sound call, which an operator may read and write whole.
size_t Call::SoundBytes(const std::vector<xla_gpu_buffer>& buffers, int32_t dtype, const Shape& shape) const {
  const int64_t bytes = Bytes(dtype, shape);
  if (bytes >= 0) return static_cast<size_t>(bytes);
  std::string dims;
  for (const int64_t dim : shape) dims += (dims.empty() ? "" : ", ") + std::to_string(dim);
  std::fprintf(stderr, "%s: %s %zu: expected at most %lld bytes, since the fuzz target gives larger ones no memory, ",
               target_, &buffers == &results_ ? "result" : "operand", buffers.size(),
               static_cast<long long>(kMaxBytes));
  std::fprintf(stderr, "got dtype %d, shape [%s]\n", static_cast<int>(dtype), dims.c_str());
  std::abort();
}

void Call::Add(std::vector<xla_gpu_buffer>* buffers, int32_t dtype, const Shape& shape) {
  void* data = Memory(SoundBytes(*buffers, dtype, shape));
  buffers->push_back({data, Dims(shape), static_cast<int32_t>(shape.size()), dtype});
}

void Call::AddNumbers(int32_t dtype, const Shape& shape, int64_t end) {
  const size_t bytes = SoundBytes(operands_, dtype, shape);
  const auto size = static_cast<size_t>(SizeOf(dtype));
  auto* data = static_cast<char*>(std::malloc(std::max<size_t>(bytes, 1)));
  memory_.emplace_back(data, &std::free);
  for (size_t i = 0; i < bytes; i += size) {
    const int64_t number = input_.Number(end);
    std::memcpy(data + i, &number, size);  // little-endian
  }
  operands_.push_back({data, Dims(shape), static_cast<int32_t>(shape.size()), dtype});
}

void Call::AddSequences(int64_t tokens, int64_t max_seqs, int64_t pages_per_seq, int64_t pages, int64_t page_size) {
  AddNumbers(XLA_FFI_DataType_S32, {max_seqs}, pages_per_seq * page_size + 1);
  AddNumbers(XLA_FFI_DataType_S32, {max_seqs, pages_per_seq}, pages);
  AddStarts(tokens, max_seqs);
}

void Call::AddStarts(int64_t tokens, int64_t max_seqs) {
  AddNumbers(XLA_FFI_DataType_S32, {max_seqs + 1}, tokens + 1);
  if (input_.Once(2)) {  // in order, as in a batch that is sound
    auto* starts = static_cast<int32_t*>(operands_.back().data);
    std::sort(starts, starts + max_seqs + 1);
  }
  AddNumbers(XLA_FFI_DataType_S32, {1}, max_seqs + 1);
}

// The row of the target's host handler.
const xla_gpu_handler& Call::Handler() const {
  size_t count = 0;
  const xla_gpu_handler* table = xla_gpu_handlers(&count);
  for (size_t i = 0; i < count; ++i) {
    const bool host = std::strcmp(table[i].platform, "Host") == 0;
    if (host && std::strcmp(table[i].target, target_) == 0) return table[i];
  }
  Broken("no such handler", target_);
}

const char* Call::Run(XLA_FFI_Handler* handler, const std::vector<xla_gpu_buffer>& results, int32_t* code) const {
  xla_gpu_call_args args = {};
  args.struct_size = struct_size_;
  args.stages.execute = handler;
  args.operands = operands_.data();
  args.num_operands = operands_.size();
  args.results = results.data();
  args.num_results = results.size();
  args.attributes = attributes_.data();
  args.num_attributes = attributes_.size();
  args.device_ordinal = device_ordinal_;
  return xla_gpu_call(&args, code);
}

// Adds the last result, of the size that the library computes from the operands and attributes so far.
void Call::AddScratch() {
  int64_t bytes = 0;
  int32_t code = XLA_FFI_Error_Code_OK;
  const xla_gpu_buffer result = {&bytes, nullptr, 0, XLA_FFI_DataType_S64};
  Run(Handler().scratch_bytes, {result}, &code);  // attributes may be refused: the call will be too
  const int64_t size = std::max<int64_t>(bytes, 0) / (input_.Once(16) ? 2 : 1);  // handlers refuse too little of it
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, static_cast<size_t>(std::max<int64_t>(size, 1))) != 0) std::abort();
  memory_.emplace_back(static_cast<char*>(memory), &std::free);
  results_.push_back({memory, Dims({size}), 1, XLA_FFI_DataType_U8});
}

// ---- Anything ----
void Call::AnyBuffer(std::vector<xla_gpu_buffer>* buffers) {
  const auto dtype = static_cast<int32_t>(input_.Once(32) ? input_.Raw<int32_t>() : input_.Below(40));
  Shape shape(static_cast<size_t>(input_.Below(6)));
  for (int64_t& dim : shape) dim = input_.Number(5);
  void* data = Memory(static_cast<size_t>(std::max<int64_t>(Bytes(dtype, shape), 0)));
  xla_gpu_buffer& buffer =
      buffers->emplace_back(xla_gpu_buffer{data, Dims(shape), static_cast<int32_t>(shape.size()), dtype});
  if (input_.Once(32)) buffer.data = nullptr;
  if (input_.Once(32)) buffer.dims = nullptr;
  if (input_.Once(32)) buffer.rank = input_.Once(2) ? 65 : -1;
}

std::vector<xla_gpu_attribute>* Call::AnyAttributes(int depth) {
  auto* list = lists_.emplace_back(std::make_unique<std::vector<xla_gpu_attribute>>()).get();
  list->resize(static_cast<size_t>(input_.Below(5)));
  for (xla_gpu_attribute& attribute : *list) {
    if (input_.Once(2)) {
      attribute.name = kNames[input_.Below(std::size(kNames))];
    } else {
      auto* name = names_.emplace_back(std::make_unique<std::string>(input_.Below(9), 'x')).get();
      for (char& letter : *name) letter = static_cast<char>(input_.Byte());
      attribute.name = name->c_str();
    }
    if (input_.Once(64)) attribute.name = nullptr;
    attribute.type = static_cast<int32_t>(input_.Once(32) ? input_.Raw<int32_t>() : 1 + input_.Below(4));
    attribute.dtype = static_cast<int32_t>(input_.Once(32) ? input_.Raw<int32_t>() : input_.Below(34));
    attribute.size = static_cast<size_t>(attribute.type == XLA_FFI_AttrType_SCALAR ? 1 : input_.Below(6));
    if (attribute.type == XLA_FFI_AttrType_DICTIONARY) {
      if (depth > 2 && input_.Once(4)) {  // a dictionary that holds itself
        attribute.data = list->data();
        attribute.size = list->size();
      } else if (depth < 6) {
        const auto* members = AnyAttributes(depth + 1);
        attribute.data = members->data();
        attribute.size = members->size();
      } else {
        attribute.size = 0;
      }
    } else {
      const int64_t element = attribute.type == XLA_FFI_AttrType_STRING ? 1 : SizeOf(attribute.dtype);
      attribute.data = Memory(attribute.size * static_cast<size_t>(std::max<int64_t>(element, 16 * (element == 0))));
    }
    if (input_.Once(32)) attribute.data = nullptr;
    if (attribute.type == XLA_FFI_AttrType_SCALAR && input_.Once(32)) attribute.size = 3;
  }
  return list;
}

void Call::Anything() {
  for (int64_t i = input_.Below(8); i > 0; --i) AnyBuffer(&operands_);
  for (int64_t i = input_.Below(4); i > 0; --i) AnyBuffer(&results_);
  attributes_ = *AnyAttributes(0);
  if (input_.Once(64)) device_ordinal_ = input_.Raw<int32_t>();
  if (input_.Once(64)) struct_size_ = input_.Byte();
}

// ---- The library's operators ----
void Call::SimpleAdd() {
  target_ = "xla_gpu_simple_add";
  const int32_t dtype = kFloats[input_.Below(3)];
  const Shape shape = {input_.Below(5), input_.Below(20)};
  Add(&operands_, dtype, shape);
  Add(&operands_, dtype, shape);
  Add(&results_, dtype, shape);
}

void Call::MergeAttentionStates() {
  target_ = "xla_gpu_merge_attention_states";
  const int32_t dtype = kFloats[input_.Below(3)];
  const Shape rows = {input_.Below(4), 1 + input_.Below(3)};
  const Shape shape = {rows[0], rows[1], 8 * (1 + input_.Below(4))};
  for (int side = 0; side < 2; ++side) {
    Add(&operands_, dtype, shape);
    Add(&operands_, XLA_FFI_DataType_F32, rows);
  }
  Add(&results_, dtype, shape);
  Add(&results_, XLA_FFI_DataType_F32, rows);
}

void Call::PagedAttention() {
  const bool with_lse = input_.Once(2);
  target_ = with_lse ? "xla_gpu_paged_attention_with_lse" : "xla_gpu_paged_attention";
  const int32_t dtype = kFloats[input_.Below(3)];
  const int32_t cache = input_.Once(3) ? kCaches[3 + input_.Below(2)] : dtype;
  const bool scales = SizeOf(cache) == 1, sinks = input_.Once(4);
  const int64_t tokens = input_.Below(7), kv_heads = 1 + input_.Below(2), heads = kv_heads * (1 + input_.Below(4));
  const int64_t head_dim = 8 * (1 + input_.Below(5)), pages = 1 + input_.Below(5), page_size = 1 + input_.Below(5);
  const int64_t max_seqs = input_.Below(4), pages_per_seq = input_.Below(5);
  Add(&operands_, dtype, {tokens, heads, head_dim});
  Add(&operands_, cache,
      input_.Once(2) ? Shape{2, pages, page_size, kv_heads, head_dim}
                     : Shape{pages, page_size, 2 * kv_heads, head_dim});
  AddSequences(tokens, max_seqs, pages_per_seq, pages, page_size);
  const int64_t scale_size = input_.Once(2) ? kv_heads : 1;
  for (int i = 0; i < 2 * scales; ++i) Add(&operands_, XLA_FFI_DataType_F32, {scale_size});
  if (sinks) Add(&operands_, XLA_FFI_DataType_F32, {heads});
  if (input_.Once(4)) Add(&operands_, XLA_FFI_DataType_U32, {tokens, 1 + input_.Below(3)});  // tree_mask
  Add(&results_, dtype, {tokens, heads, head_dim});
  if (with_lse) Add(&results_, XLA_FFI_DataType_F32, {tokens, heads});
  AddScalar("scale", XLA_FFI_DataType_F32, input_.Once(8) ? input_.Raw<float>() : 0.25f);
  AddScalar("sliding_window", XLA_FFI_DataType_S64, input_.Number(6));
  AddScalar("soft_cap", XLA_FFI_DataType_F32, input_.Once(8) ? input_.Raw<float>() : input_.Once(2) ? 5.0f : 0.0f);
  AddScalar("check_inputs", XLA_FFI_DataType_PRED, input_.Once(2));
  AddScalar("kv_scales", XLA_FFI_DataType_PRED, scales);
  AddScalar("has_sinks", XLA_FFI_DataType_PRED, sinks);
  AddScratch();
}

void Call::ReshapeAndCache() {
  target_ = "xla_gpu_reshape_and_cache";
  const int32_t dtype = kFloats[input_.Below(3)];
  const int32_t cache = input_.Once(3) ? kCaches[3 + input_.Below(2)] : dtype;
  const bool scales = SizeOf(cache) == 1;
  const int64_t tokens = input_.Below(7), kv_heads = 1 + input_.Below(2), head_dim = 8 * (1 + input_.Below(5));
  const int64_t pages = 1 + input_.Below(5), page_size = 1 + input_.Below(5);
  const Shape cache_shape =
      input_.Once(2) ? Shape{2, pages, page_size, kv_heads, head_dim} : Shape{pages, page_size, 2 * kv_heads, head_dim};
  for (int i = 0; i < 2; ++i) Add(&operands_, dtype, {tokens, kv_heads, head_dim});
  Add(&operands_, cache, cache_shape);
  AddNumbers(input_.Once(2) ? XLA_FFI_DataType_S64 : XLA_FFI_DataType_S32, {input_.Below(tokens + 1)},
             pages * page_size);
  const int64_t scale_size = input_.Once(2) ? kv_heads : 1;
  for (int i = 0; i < 2 * scales; ++i) Add(&operands_, XLA_FFI_DataType_F32, {scale_size});
  if (input_.Once(2)) {
    results_.push_back(operands_[2]);
  } else {
    Add(&results_, cache, cache_shape);
  }
  AddScalar("check_inputs", XLA_FFI_DataType_PRED, input_.Once(2));
  AddScalar("kv_scales", XLA_FFI_DataType_PRED, scales);
}

void Call::BidirectionalAttention() {
  target_ = "xla_gpu_bidirectional_attention";
  const int32_t dtype = kFloats[input_.Below(3)];
  // More keys than a tile has, now and then.
  const int64_t tokens = input_.Below(100), kv_heads = 1 + input_.Below(2), heads = kv_heads * (1 + input_.Below(4));
  const int64_t head_dim = 8 * (1 + input_.Below(2)), max_seqs = input_.Below(4);
  Add(&operands_, dtype, {tokens, heads, head_dim});
  for (int i = 0; i < 2; ++i) Add(&operands_, dtype, {tokens, kv_heads, head_dim});
  AddStarts(tokens, max_seqs);
  Add(&results_, dtype, {tokens, heads, head_dim});
  AddScalar("scale", XLA_FFI_DataType_F32, input_.Once(8) ? input_.Raw<float>() : 0.25f);
  AddScalar("sliding_window", XLA_FFI_DataType_S64, input_.Once(8) ? input_.Raw<int64_t>() : input_.Number(70));
  AddScalar("soft_cap", XLA_FFI_DataType_F32, input_.Once(8) ? input_.Raw<float>() : input_.Once(2) ? 5.0f : 0.0f);
  AddScalar("check_inputs", XLA_FFI_DataType_PRED, input_.Once(2));
}

// Removes something, adds something, or changes a field such that the memory still covers the buffer.
void Call::Change() {
  auto* buffers = input_.Once(3) ? &results_ : &operands_;
  auto* buffer = buffers->empty() ? nullptr : &(*buffers)[input_.Below(static_cast<int64_t>(buffers->size()))];
  auto* attribute =
      attributes_.empty() ? nullptr : &attributes_[input_.Below(static_cast<int64_t>(attributes_.size()))];
  switch (input_.Below(9)) {
    case 0:
      if (buffer != nullptr) buffers->erase(buffers->begin() + (buffer - buffers->data()));
      break;
    case 1:
      if (buffer != nullptr) buffers->push_back(*buffer);
      break;
    case 2:  // fewer elements than there is room for
      if (buffer != nullptr && buffer->rank > 0) {
        int64_t& dim = const_cast<int64_t*>(buffer->dims)[input_.Below(buffer->rank)];
        dim = dim > 0 ? input_.Below(dim) : dim;
      }
      break;
    case 3:  // without the last dimension, unless that was the zero that made the buffer small
      if (buffer != nullptr && buffer->rank > 0) {
        const Shape before(buffer->dims, buffer->dims + buffer->rank), after(before.begin(), before.end() - 1);
        if (Bytes(buffer->dtype, after) <= Bytes(buffer->dtype, before)) --buffer->rank;
      }
      break;
    case 4:  // narrower elements, or of the same width
      if (buffer != nullptr) {
        const auto dtype = static_cast<int32_t>(input_.Below(34));
        if (SizeOf(dtype) != 0 && SizeOf(dtype) <= SizeOf(buffer->dtype)) buffer->dtype = dtype;
      }
      break;
    case 5:
      if (attribute != nullptr) attributes_.erase(attributes_.begin() + (attribute - attributes_.data()));
      break;
    case 6:
      if (attribute != nullptr) attribute->name = kNames[input_.Below(std::size(kNames))];
      break;
    case 7:
      if (attribute != nullptr) {
        attribute->dtype = static_cast<int32_t>(input_.Below(34));
        attribute->data = Memory(16 * std::max<size_t>(attribute->size, 1));  // for any dtype's elements
      }
      break;
    default:
      if (attribute != nullptr && attribute->dtype == XLA_FFI_DataType_PRED) attribute->data = Memory(1);
      break;
  }
}

void Call::Operator() {
  constexpr void (Call::* kOperators[])() = {
      &Call::PagedAttention, &Call::ReshapeAndCache,  &Call::MergeAttentionStates,
      &Call::SimpleAdd,      &Call::RmsNorm,          &Call::SiluAndMul,
      &Call::Sample,         &Call::RotaryAndCache,   &Call::RotaryEmbedding,
      &Call::Linear,         &Call::KernelCall,       &Call::GatedMlp,
      &Call::AttentionBlock, &Call::GroupedLinear,    &Call::BidirectionalAttention,
      &Call::MlaAttention,   &Call::ConcatAndCacheMla};
  (this->*kOperators[input_.Below(std::size(kOperators))])();
  for (int64_t i = input_.Once(2) ? input_.Below(4) : 0; i > 0; --i) Change();
}

// ---- The call ----
bool Call::Run(XLA_FFI_Handler* handler) {
  int32_t code = -1;
  const char* text = Run(target_ == nullptr ? handler : Handler().execute, results_, &code);
  if (code < XLA_FFI_Error_Code_OK || code > XLA_FFI_Error_Code_UNAUTHENTICATED) Broken("error code", text);
  if ((text == nullptr) != (code == XLA_FFI_Error_Code_OK)) Broken("text without code or code without text", text);
  if (text != nullptr && text[0] == '\0') Broken("an empty text", text);
  if (text != nullptr && code == XLA_FFI_Error_Code_INTERNAL) Broken("an internal error on the host", text);
  return code == XLA_FFI_Error_Code_OK;
}

}  // namespace xla_gpu::fuzz
