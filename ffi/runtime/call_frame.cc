// xla_gpu_call: a typed XLA FFI handler called without XLA, over raw pointers.
#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/runtime/device.h"
#include "ffi/runtime/error.h"
#include "ffi/runtime/ffi_api.h"
#include "ffi/runtime/handler_metadata.h"
#include "ffi/runtime/xla_gpu.h"

namespace xla_gpu {
namespace {

// No array of XLA has more dimensions. A larger rank means that the field was not set.
constexpr int32_t kMaxRank = 64;

// A dictionary that is nested deeper is taken for one that contains itself.
constexpr int kMaxDictionaryDepth = 32;

// Bits of an element, 0 for a type that buffers and attributes cannot have.
int BitsOf(int32_t dtype) {
  switch (dtype) {
    case XLA_FFI_DataType_S1:
    case XLA_FFI_DataType_U1:
      return 1;
    case XLA_FFI_DataType_S2:
    case XLA_FFI_DataType_U2:
      return 2;
    case XLA_FFI_DataType_S4:
    case XLA_FFI_DataType_U4:
    case XLA_FFI_DataType_F4E2M1FN:
      return 4;
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
    case XLA_FFI_DataType_F8E5M2:
    case XLA_FFI_DataType_F8E3M4:
    case XLA_FFI_DataType_F8E4M3:
    case XLA_FFI_DataType_F8E4M3FN:
    case XLA_FFI_DataType_F8E4M3B11FNUZ:
    case XLA_FFI_DataType_F8E5M2FNUZ:
    case XLA_FFI_DataType_F8E4M3FNUZ:
    case XLA_FFI_DataType_F8E8M0FNU:
      return 8;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 16;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32:
      return 32;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_C64:
      return 64;
    case XLA_FFI_DataType_C128:
      return 128;
    default:
      return 0;
  }
}

Error Invalid(const std::string& where, const std::string& what) {
  return Error::InvalidArgument("xla_gpu_call: " + where + ": " + what);
}

// Operands or results, in the form that handlers take them.
struct Buffers {
  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<void*> pointers;

  Error Fill(const char* kind, const xla_gpu_buffer* given, size_t count) {
    if (given == nullptr && count != 0) return Invalid(std::string(kind) + "s", "null");
    buffers.reserve(count);
    pointers.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      if (Error error = Check(kind, i, given[i]); !error.ok()) return error;
      XLA_FFI_Buffer buffer = {};
      buffer.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
      buffer.dtype = static_cast<XLA_FFI_DataType>(given[i].dtype);
      buffer.data = given[i].data;
      buffer.rank = given[i].rank;
      buffer.dims = const_cast<int64_t*>(given[i].dims);  // handlers only read them
      buffers.push_back(buffer);
      pointers.push_back(&buffers.back());  // stays valid: the room was reserved
    }
    return {};
  }

 private:
  static Error Check(const char* kind, size_t index, const xla_gpu_buffer& buffer) {
    const auto invalid = [&](const std::string& what) {
      return Invalid(std::string(kind) + " " + std::to_string(index), what);
    };
    const int64_t bits = BitsOf(buffer.dtype);
    if (bits == 0) return invalid("unknown dtype " + std::to_string(buffer.dtype) + " (expected an XLA_FFI_DataType)");
    if (buffer.rank < 0 || buffer.rank > kMaxRank) {
      return invalid("rank " + std::to_string(buffer.rank) + ", expected 0 to " + std::to_string(kMaxRank));
    }
    if (buffer.rank > 0 && buffer.dims == nullptr) return invalid("dims is null");
    int64_t elements = 1;
    bool too_large = false, empty = false;
    for (int32_t d = 0; d < buffer.rank; ++d) {
      const int64_t dim = buffer.dims[d];
      if (dim < 0) return invalid("dimension " + std::to_string(d) + " is " + std::to_string(dim));
      empty = empty || dim == 0;
      // Zeros count as 1: handlers multiply some dimensions of an empty buffer too.
      too_large = too_large || __builtin_mul_overflow(elements, std::max<int64_t>(dim, 1), &elements);
    }
    if (too_large || elements > std::numeric_limits<int64_t>::max() / bits) {
      return invalid("its size in bytes does not fit 64 bits");
    }
    if (buffer.data == nullptr && !empty) return invalid("data is null");
    return {};
  }
};

// Attributes in the form that handlers take them: sorted by name. A dictionary's are attributes again.
class Attributes {
 public:
  // `path` precedes the names in texts: "options." for those of a dictionary called options.
  Error Fill(const xla_gpu_attribute* given, size_t count, const std::string& path = {}) {
    if (given == nullptr && count != 0) return Invalid("attributes", "null");
    for (size_t i = 0; i < count; ++i) {
      if (Error error = Check(i, given[i], path); !error.ok()) return error;
    }
    std::vector<size_t> order(count);
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(),
              [&](size_t x, size_t y) { return std::string_view(given[x].name) < std::string_view(given[y].name); });
    names_.resize(count);
    types_.resize(count);
    values_.resize(count);
    name_pointers_.resize(count);
    pointers_.resize(count);
    for (size_t i = 0; i < count; ++i) {
      const xla_gpu_attribute& attribute = given[order[i]];
      const std::string_view name(attribute.name);
      if (i > 0 && name == std::string_view(names_[i - 1].ptr, names_[i - 1].len)) {
        return Invalid("attribute " + path + attribute.name, "given twice");
      }
      names_[i] = {name.data(), name.size()};
      name_pointers_[i] = &names_[i];
      types_[i] = static_cast<XLA_FFI_AttrType>(attribute.type);
      pointers_[i] = &values_[i];
      const auto dtype = static_cast<XLA_FFI_DataType>(attribute.dtype);
      void* data = const_cast<void*>(attribute.data);  // handlers only read it
      switch (types_[i]) {
        case XLA_FFI_AttrType_SCALAR:
          values_[i].scalar = {dtype, data};
          break;
        case XLA_FFI_AttrType_ARRAY:
          values_[i].array = {dtype, attribute.size, data};
          break;
        case XLA_FFI_AttrType_STRING:
          values_[i].string = {static_cast<const char*>(data), attribute.size};
          break;
        case XLA_FFI_AttrType_DICTIONARY: {
          auto& nested = nested_.emplace_back(std::make_unique<Attributes>());
          const auto* members = static_cast<const xla_gpu_attribute*>(data);
          Error error = nested->Fill(members, attribute.size, path + attribute.name + ".");
          if (!error.ok()) return error;
          values_[i].dictionary = nested->View();
          break;
        }
      }
    }
    return {};
  }

  XLA_FFI_Attrs View() {
    XLA_FFI_Attrs attrs = {};
    attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
    attrs.size = static_cast<int64_t>(pointers_.size());
    attrs.types = types_.data();
    attrs.names = name_pointers_.data();
    attrs.attrs = pointers_.data();
    return attrs;
  }

 private:
  union Value {
    XLA_FFI_Scalar scalar;
    XLA_FFI_Array array;
    XLA_FFI_ByteSpan string;
    XLA_FFI_Attrs dictionary;
  };

  static Error Check(size_t index, const xla_gpu_attribute& attribute, const std::string& path) {
    if (attribute.name == nullptr) {
      return Invalid("attribute " + path + "(number " + std::to_string(index) + ")", "its name is null");
    }
    const auto invalid = [&](const std::string& what) { return Invalid("attribute " + path + attribute.name, what); };
    switch (attribute.type) {
      case XLA_FFI_AttrType_SCALAR:
        if (attribute.size != 1) return invalid("a scalar of size " + std::to_string(attribute.size) + ", expected 1");
        [[fallthrough]];
      case XLA_FFI_AttrType_ARRAY:
        if (BitsOf(attribute.dtype) < 8) {
          return invalid("dtype " + std::to_string(attribute.dtype) +
                         " cannot be an attribute's (expected an XLA_FFI_DataType of whole bytes)");
        }
        [[fallthrough]];
      case XLA_FFI_AttrType_STRING:
      case XLA_FFI_AttrType_DICTIONARY:
        if (attribute.size != 0 && attribute.data == nullptr) return invalid("data is null");
        if (attribute.type != XLA_FFI_AttrType_STRING && attribute.type != XLA_FFI_AttrType_DICTIONARY &&
            attribute.dtype == XLA_FFI_DataType_PRED) {
          // Handlers read them as bool; other bytes than 0 and 1 would be undefined behaviour.
          const auto* bytes = static_cast<const uint8_t*>(attribute.data);
          for (size_t i = 0; i < attribute.size; ++i) {
            if (bytes[i] > 1) return invalid("a bool of value " + std::to_string(bytes[i]) + ", expected 0 or 1");
          }
        }
        if (std::count(path.begin(), path.end(), '.') >= kMaxDictionaryDepth) return invalid("nested too deeply");
        return {};
      default:
        return invalid("unknown type " + std::to_string(attribute.type) +
                       " (expected SCALAR, ARRAY, STRING or DICTIONARY)");
    }
  }

  std::vector<XLA_FFI_ByteSpan> names_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<Value> values_;
  std::vector<std::unique_ptr<Attributes>> nested_;
  std::vector<XLA_FFI_ByteSpan*> name_pointers_;
  std::vector<void*> pointers_;
};

// The frame of one call. Its arrays live in the members; `this` must not move.
class CallFrame {
 public:
  Error Fill(const xla_gpu_call_args& args) {
    if (Error error = operands_.Fill("operand", args.operands, args.num_operands); !error.ok()) return error;
    if (Error error = results_.Fill("result", args.results, args.num_results); !error.ok()) return error;
    if (Error error = attributes_.Fill(args.attributes, args.num_attributes); !error.ok()) return error;
    operand_types_.assign(args.num_operands, XLA_FFI_ArgType_BUFFER);
    result_types_.assign(args.num_results, XLA_FFI_RetType_BUFFER);
    return {};
  }

  Error Run(XLA_FFI_ExecutionStage stage, XLA_FFI_Handler* handler, XLA_FFI_ExecutionContext* context) {
    if (handler == nullptr) return {};
    // A handler is instantiated for its attributes alone, as XLA does it: one instance may serve many buffers.
    const bool with_buffers = stage != XLA_FFI_ExecutionStage_INSTANTIATE;
    XLA_FFI_CallFrame frame = {};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = FfiApi();
    frame.ctx = context;
    frame.stage = stage;
    frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
    frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
    if (with_buffers) {
      frame.args.size = static_cast<int64_t>(operands_.pointers.size());
      frame.args.types = operand_types_.data();
      frame.args.args = operands_.pointers.data();
      frame.rets.size = static_cast<int64_t>(results_.pointers.size());
      frame.rets.types = result_types_.data();
      frame.rets.rets = results_.pointers.data();
    }
    frame.attrs = attributes_.View();
    Error error = Guarded("the handler", [&] { return TakeError(handler(&frame)); });
    // A future is waited for even beside an error: its task may still write the buffers.
    if (frame.future != nullptr) {
      Error asynchronous = TakeFuture(frame.future);
      if (error.ok()) error = std::move(asynchronous);
    }
    return error;
  }

 private:
  Buffers operands_, results_;
  Attributes attributes_;
  std::vector<XLA_FFI_ArgType> operand_types_;
  std::vector<XLA_FFI_RetType> result_types_;
};

Error Call(const xla_gpu_call_args* args) {
  if (args == nullptr) return Error::InvalidArgument("xla_gpu_call: args is null");
  if (args->struct_size != sizeof(xla_gpu_call_args)) {
    return Error::InvalidArgument("xla_gpu_call: struct_size is " + std::to_string(args->struct_size) + ", expected " +
                                  std::to_string(sizeof(xla_gpu_call_args)) +
                                  ": the caller and the library are of different versions");
  }
  if (args->device_ordinal < -1) {
    return Invalid("device_ordinal", std::to_string(args->device_ordinal) + ", expected a CUDA device or -1 (host)");
  }
  XLA_FFI_Handler_Traits traits = 0;
  Error error = CheckStages(args->stages, "the library", XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR, &traits);
  if (!error.ok()) {
    error.message = "xla_gpu_call: " + error.message;
    return error;
  }
  CallFrame frame;
  if (error = frame.Fill(*args); !error.ok()) return error;
  const DeviceScope device(args->device_ordinal);
  if (!device.error().ok()) {
    return {device.error().code,
            "xla_gpu_call: device " + std::to_string(args->device_ordinal) + ": " + device.error().message};
  }
  XLA_FFI_ExecutionContext context(args->stream, args->device_ordinal);
  const struct {
    XLA_FFI_ExecutionStage stage;
    XLA_FFI_Handler* handler;
  } stages[] = {{XLA_FFI_ExecutionStage_INSTANTIATE, args->stages.instantiate},
                {XLA_FFI_ExecutionStage_PREPARE, args->stages.prepare},
                {XLA_FFI_ExecutionStage_INITIALIZE, args->stages.initialize},
                {XLA_FFI_ExecutionStage_EXECUTE, args->stages.execute}};
  for (const auto& [stage, handler] : stages) {
    if (error = frame.Run(stage, handler, &context); !error.ok()) return error;
  }
  return {};
}

}  // namespace
}  // namespace xla_gpu

extern "C" const char* xla_gpu_call(const xla_gpu_call_args* args, int32_t* code) {
  return xla_gpu::Report(xla_gpu::Guarded("xla_gpu_call", [&] { return xla_gpu::Call(args); }), code);
}
