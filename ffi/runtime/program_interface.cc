#include "ffi/runtime/program_interface.h"

#include <cstddef>
#include <cstdint>

namespace xla_gpu::pjrt {
namespace {

// Numbers of fields, from xla/service/hlo.proto. A field of a protocol buffer keeps its number.
namespace module_with_config {
constexpr uint32_t kModule = 1;
}
namespace module {
constexpr uint32_t kComputations = 3;
constexpr uint32_t kEntryComputationId = 6;
constexpr uint32_t kSchedule = 7;
constexpr uint32_t kCrossProgramPrefetches = 10;
constexpr uint32_t kSpmdOutputSharding = 12;
constexpr uint32_t kProfileInfo = 13;
constexpr uint32_t kSpmdParametersShardings = 14;
constexpr uint32_t kStackFrameIndex = 17;
}  // namespace module
namespace computation {
constexpr uint32_t kInstructions = 2;
constexpr uint32_t kId = 5;
constexpr uint32_t kRootId = 6;
}  // namespace computation
namespace instruction {
constexpr uint32_t kName = 1;
constexpr uint32_t kOpcode = 2;
constexpr uint32_t kShape = 3;
constexpr uint32_t kCustomCallTarget = 28;
constexpr uint32_t kId = 35;
}  // namespace instruction

constexpr uint32_t kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5;  // wire types

// The fields of a message, one after the other.
class Fields {
 public:
  explicit Fields(std::string_view message) : rest_(message) {}

  // Goes to the next field. False at the end, where `ok` stays true, or where the bytes are no message.
  bool Next() {
    if (rest_.empty()) return false;
    const std::string_view before = rest_;
    uint64_t tag = 0, size = 0;
    ok_ = Varint(&tag);
    number_ = static_cast<uint32_t>(tag >> 3);
    switch (tag & 7) {
      case kVarint:
        ok_ = ok_ && Varint(&value_);
        break;
      case kBytes:
        ok_ = ok_ && Varint(&size) && Skip(size);
        break;
      case kFixed64:
        ok_ = ok_ && Skip(8);
        break;
      case kFixed32:
        ok_ = ok_ && Skip(4);
        break;
      default:
        ok_ = false;
    }
    whole_ = before.substr(0, before.size() - rest_.size());
    return ok_;
  }

  bool ok() const { return ok_; }
  uint32_t number() const { return number_; }
  uint64_t value() const { return value_; }              // of a varint
  std::string_view content() const { return content_; }  // of bytes, a text or a message
  std::string_view whole() const { return whole_; }      // as it stands in the message

 private:
  bool Varint(uint64_t* value) {
    *value = 0;
    for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      *value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return true;
    }
    return false;
  }

  bool Skip(uint64_t size) {
    if (size > rest_.size()) return false;
    content_ = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return true;
  }

  std::string_view rest_, content_, whole_;
  uint32_t number_ = 0;
  uint64_t value_ = 0;
  bool ok_ = true;
};

void AppendVarint(std::string* out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out->push_back(static_cast<char>(value | 0x80));
  out->push_back(static_cast<char>(value));
}

void AppendBytes(std::string* out, uint32_t number, std::string_view content) {
  AppendVarint(out, number << 3 | kBytes);
  AppendVarint(out, content.size());
  out->append(content);
}

// The value of a message's varint field `number`; 0, the default, where it has none.
uint64_t NumberIn(std::string_view message, uint32_t number) {
  uint64_t found = 0;
  for (Fields fields(message); fields.Next();) {
    if (fields.number() == number) found = fields.value();
  }
  return found;
}

bool IsParameter(std::string_view message) {
  for (Fields fields(message); fields.Next();) {
    if (fields.number() == instruction::kOpcode) return fields.content() == "parameter";
  }
  return false;
}

// The entry computation: its parameters, and a root without operands.
bool AppendEntry(std::string_view message, std::string* out) {
  const uint64_t root = NumberIn(message, computation::kRootId);
  Fields fields(message);
  while (fields.Next()) {
    if (fields.number() != computation::kInstructions || IsParameter(fields.content())) {
      out->append(fields.whole());
    } else if (NumberIn(fields.content(), instruction::kId) == root) {
      std::string made;
      Fields parts(fields.content());
      while (parts.Next()) {
        const uint32_t number = parts.number();
        if (number == instruction::kName || number == instruction::kShape || number == instruction::kId) {
          made.append(parts.whole());
        }
      }
      if (!parts.ok()) return false;
      AppendBytes(&made, instruction::kOpcode, "custom-call");
      AppendBytes(&made, instruction::kCustomCallTarget, "result");
      AppendBytes(out, computation::kInstructions, made);
    }
  }
  return fields.ok();
}

bool AppendModule(std::string_view message, std::string* out) {
  const uint64_t entry = NumberIn(message, module::kEntryComputationId);
  bool found = false;
  Fields fields(message);
  while (fields.Next()) {
    switch (fields.number()) {
      case module::kSpmdOutputSharding:
      case module::kSpmdParametersShardings:
        return false;
      case module::kComputations: {
        if (NumberIn(fields.content(), computation::kId) != entry) break;
        std::string made;
        if (!AppendEntry(fields.content(), &made)) return false;
        AppendBytes(out, module::kComputations, made);
        found = true;
        break;
      }
      case module::kSchedule:  // these name instructions that are left out
      case module::kCrossProgramPrefetches:
      case module::kProfileInfo:
      case module::kStackFrameIndex:
        break;
      default:
        out->append(fields.whole());
    }
  }
  return fields.ok() && found;
}

}  // namespace

bool InterfaceOfProgram(std::string_view bytes, std::string* out) {
  out->clear();
  bool found = false;
  Fields fields(bytes);
  while (fields.Next()) {
    if (fields.number() != module_with_config::kModule) {
      out->append(fields.whole());
      continue;
    }
    std::string made;
    if (!AppendModule(fields.content(), &made)) return false;
    AppendBytes(out, module_with_config::kModule, made);
    found = true;
  }
  return fields.ok() && found;
}

}  // namespace xla_gpu::pjrt
