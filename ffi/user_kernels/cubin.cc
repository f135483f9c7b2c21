#include "ffi/user_kernels/cubin.h"

#include <cstdint>
#include <cstring>
#include <vector>

namespace xla_gpu {
namespace {

// The structures of ELF for 64 bits, as the ELF specification has them.
struct Header {
  unsigned char ident[16];
  uint16_t type, machine;
  uint32_t version;
  uint64_t entry, program_headers, section_headers;
  uint32_t flags;
  uint16_t size, program_header_size, num_program_headers, section_header_size, num_section_headers, names;
};
static_assert(sizeof(Header) == 64);

struct ProgramHeader {
  uint32_t type, flags;
  uint64_t offset, virtual_address, physical_address, file_size, memory_size, alignment;
};
static_assert(sizeof(ProgramHeader) == 56);

struct Section {
  uint32_t name, type;
  uint64_t flags, address, offset, size;
  uint32_t link, info;
  uint64_t alignment, entry_size;
};
static_assert(sizeof(Section) == 64);

struct Symbol {
  uint32_t name;
  uint8_t info, other;
  uint16_t section;
  uint64_t value, size;
};
static_assert(sizeof(Symbol) == 24);

struct Relocation {  // with the addend that SHT_RELA has and SHT_REL has not
  uint64_t offset, info;
  int64_t addend;
};

constexpr uint16_t kMachineCuda = 190;
constexpr uint32_t kSymbolTable = 2, kStringTable = 3, kRelocationsWithAddend = 4, kNote = 7, kNoBits = 8,
                   kRelocations = 9;
constexpr uint16_t kReservedSections = 0xff00;  // symbols that belong to no section
constexpr uint32_t kCudaInfo = 0x70000000;      // .nv.info
constexpr uint32_t kCudaCallGraph = 0x70000001;
constexpr uint32_t kCudaCompatibility = 0x70000086;         // of the form of .nv.info
constexpr uint32_t kCallees = 0xfffffffc;                   // from here on, kinds of callees in the place of a symbol
constexpr uint8_t kSizedAttribute = 4;                      // the last of the forms, which begin at 1
constexpr uint64_t kExecutable = 4, kMercury = 0x10000000;  // of a section's flags
constexpr uint64_t kMaxAlignment = 1 << 16;
constexpr const char* kNoAlignment = "an alignment that is no power of two up to 65536";

class Reader {
 public:
  explicit Reader(std::string_view file) : file_(file) {}

  std::string Damage() {
    if (file_.size() < sizeof(Header)) return "a truncated ELF header";
    const auto header = At<Header>(0);
    if (std::memcmp(header.ident,
                    "\x7f"
                    "ELF\x02\x01",
                    6) != 0 ||
        header.machine != kMachineCuda) {
      return "an ELF header that is no cubin's";
    }
    const auto table = [&](uint64_t offset, uint64_t count, size_t given_size, size_t size) {
      return count == 0 || (given_size == size && Inside(offset, count * size));
    };
    if (!table(header.program_headers, header.num_program_headers, header.program_header_size, sizeof(ProgramHeader)) ||
        !table(header.section_headers, header.num_section_headers, header.section_header_size, sizeof(Section))) {
      return "section or program headers past the end of the file";
    }
    for (size_t i = 0; i < header.num_program_headers; ++i) {
      const auto segment = At<ProgramHeader>(header.program_headers + i * sizeof(ProgramHeader));
      if (!Inside(segment.offset, segment.file_size) || segment.file_size > segment.memory_size) {
        return "segment " + std::to_string(i) + " past the end of the file or of its memory";
      }
      if (!IsAlignment(segment.alignment)) return "segment " + std::to_string(i) + " with " + kNoAlignment;
    }
    for (size_t i = 0; i < header.num_section_headers; ++i) {
      sections_.push_back(At<Section>(header.section_headers + i * sizeof(Section)));
    }
    if (!sections_.empty()) {
      const Section& null = sections_[0];
      if (null.name != 0 || null.type != 0 || null.flags != 0 || null.address != 0 || null.offset != 0 ||
          null.size != 0 || null.link != 0 || null.info != 0 || null.alignment != 0 || null.entry_size != 0) {
        return "a section 0 that is not empty";
      }
    }
    if (!IsStringTable(header.names)) return "a damaged table of section names";
    for (size_t i = 1; i < sections_.size(); ++i) {
      if (const char* what = SectionDamage(sections_[i], sections_[header.names])) {
        return "section " + std::to_string(i) + " with " + what;
      }
    }
    return {};
  }

 private:
  template <typename T>
  T At(uint64_t offset) const {
    T value;  // a copy, since nothing says that the file is aligned
    std::memcpy(&value, file_.data() + offset, sizeof value);
    return value;
  }

  bool Inside(uint64_t offset, uint64_t size) const { return offset <= file_.size() && size <= file_.size() - offset; }

  bool IsStringTable(size_t index) const {
    if (index >= sections_.size()) return false;
    const Section& table = sections_[index];
    return table.type == kStringTable && table.size > 0 && Inside(table.offset, table.size) &&
           file_[table.offset + table.size - 1] == '\0';
  }

  static bool IsAlignment(uint64_t bytes) { return (bytes & (bytes - 1)) == 0 && bytes <= kMaxAlignment; }  // 0 is 1

  uint64_t NumSymbols() const {
    for (const Section& section : sections_) {
      if (section.type == kSymbolTable) return section.size / sizeof(Symbol);
    }
    return 0;
  }

  const char* SectionDamage(const Section& section, const Section& names) const {
    if (section.name >= names.size) return "a name outside the table of section names";
    // The driver follows both without looking. A section of code has its symbol's number, below that of its registers.
    if (section.link >= sections_.size()) return "an sh_link that is no section";
    if (section.flags & kExecutable) {
      if ((section.info & 0xffffff) >= NumSymbols()) return "code whose sh_info is no symbol";
    } else if (section.type != kSymbolTable && !(section.flags & kMercury) && section.info >= sections_.size()) {
      return "an sh_info that is no section";
    }
    if (!IsAlignment(section.alignment)) return kNoAlignment;
    if (section.type == kNoBits) return nullptr;
    if (section.alignment > 1 && section.offset % section.alignment != 0) return "contents that are not aligned";
    if (!Inside(section.offset, section.size)) return "contents past the end of the file";
    switch (section.type) {
      case kStringTable:
        return section.size == 0 || file_[section.offset + section.size - 1] == '\0'
                   ? nullptr
                   : "strings without a terminating null";
      case kSymbolTable:
        return SymbolsDamage(section);
      case kRelocations:
        return RelocationsDamage(section, 16);
      case kRelocationsWithAddend:
        return RelocationsDamage(section, sizeof(Relocation));
      case kNote:
        return NotesDamage(section);
      case kCudaInfo:
      case kCudaCompatibility:
        return InfoDamage(section);
      case kCudaCallGraph:
        return CallGraphDamage(section);
      default:
        return nullptr;
    }
  }

  const char* SymbolsDamage(const Section& table) const {
    if (table.entry_size != sizeof(Symbol) || table.size % sizeof(Symbol) != 0) return "symbol entries of a wrong size";
    if (!IsStringTable(table.link)) return "symbols without a string table";
    for (uint64_t at = 0; at < table.size; at += sizeof(Symbol)) {
      const auto symbol = At<Symbol>(table.offset + at);
      if (symbol.name >= sections_[table.link].size) return "a symbol whose name is outside the string table";
      if (symbol.section >= kReservedSections) continue;
      if (symbol.section >= sections_.size()) return "a symbol in no section";
      const uint64_t room = sections_[symbol.section].size;
      if (symbol.section != 0 && (symbol.value > room || symbol.size > room - symbol.value)) {
        return "a symbol past the end of its section";
      }
    }
    return nullptr;
  }

  const char* RelocationsDamage(const Section& table, uint64_t size) const {
    if (table.entry_size != size || table.size % size != 0) return "relocation entries of a wrong size";
    if (table.link >= sections_.size() || sections_[table.link].type != kSymbolTable)
      return "relocations without a symbol table";
    if (table.info >= sections_.size()) return "relocations in no section";
    const uint64_t num_symbols = sections_[table.link].size / sizeof(Symbol);
    for (uint64_t at = 0; at < table.size; at += size) {
      const auto offset = At<uint64_t>(table.offset + at), info = At<uint64_t>(table.offset + at + 8);
      if (offset >= sections_[table.info].size) return "a relocation past the end of its section";
      if (info >> 32 >= num_symbols) return "a relocation by no symbol";
    }
    return nullptr;
  }

  // Sizes of a name and of contents and a type; name and contents follow, each filled up to four bytes.
  const char* NotesDamage(const Section& section) const {
    for (uint64_t at = 0; at < section.size;) {
      if (section.size - at < 12) return "a truncated note";
      const uint64_t name = At<uint32_t>(section.offset + at), contents = At<uint32_t>(section.offset + at + 4);
      at += 12;
      const uint64_t size = (name + 3) / 4 * 4 + (contents + 3) / 4 * 4;
      if (size > section.size - at) return "a truncated note";
      at += size;
    }
    return nullptr;
  }

  // Pairs of symbols: a caller, and what it calls.
  const char* CallGraphDamage(const Section& section) const {
    if (section.size % 8 != 0) return "calls of a wrong size";
    for (uint64_t at = 0; at < section.size; at += 8) {
      const auto caller = At<uint32_t>(section.offset + at), callee = At<uint32_t>(section.offset + at + 4);
      if (caller >= NumSymbols() || (callee >= NumSymbols() && callee < kCallees)) return "a call of no symbol";
    }
    return nullptr;
  }

  // Attributes whose value begins with the number of a symbol: constant bank of the parameters, sizes of frame and
  // stack, registers.
  static bool IsOfSymbol(uint8_t attribute) {
    return attribute == 0x0a || attribute == 0x11 || attribute == 0x12 || attribute == 0x23 || attribute == 0x2f;
  }

  // A form, an attribute and a size or value of 16 bits; a sized attribute's bytes follow.
  const char* InfoDamage(const Section& section) const {
    for (uint64_t at = 0; at < section.size;) {
      if (section.size - at < 4) return "a truncated attribute";
      const auto form = At<uint8_t>(section.offset + at), attribute = At<uint8_t>(section.offset + at + 1);
      if (form < 1 || form > kSizedAttribute) return "an attribute of no form";
      const uint64_t size = form == kSizedAttribute ? At<uint16_t>(section.offset + at + 2) : 0;
      at += 4;
      if (size > section.size - at) return "a truncated attribute";
      // NOTE: the numbers of kCudaCompatibility's attributes mean something else.
      if (section.type == kCudaInfo && IsOfSymbol(attribute) &&
          (size < 4 || At<uint32_t>(section.offset + at) >= NumSymbols())) {
        return "an attribute of no symbol";
      }
      at += size;
    }
    return nullptr;
  }

  const std::string_view file_;
  std::vector<Section> sections_;
};

}  // namespace

std::string CubinDamage(std::string_view cubin) { return Reader(cubin).Damage(); }

}  // namespace xla_gpu
