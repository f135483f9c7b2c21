// The fuzz target without libFuzzer, for compilers that have none: the same inputs on every run.
//
//   xla_gpu_fuzz_call_frame [-runs=N] [-seed=N] [file...]
//
// Runs the files, or N generated inputs (default 100000). Each generated input is written to crash-input before it runs
// where XLA_GPU_FUZZ_KEEP is set, so that one that ends the process is at hand.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern uint64_t xla_gpu_fuzz_answered;
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

// Long and short ones; of bytes that are all alike, small, or anything.
std::vector<uint8_t> Generate(std::mt19937_64* random) {
  const auto below = [&](uint64_t end) { return (*random)() % end; };
  std::vector<uint8_t> input(below(4) == 0 ? below(64) : below(2048));
  const uint64_t kind = below(3);
  for (uint8_t& byte : input) byte = static_cast<uint8_t>(kind == 0 || below(8) == 0 ? below(256) : below(16));
  return input;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t runs = 100000, seed = 1, files = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "-runs=", 6) == 0) {
      runs = std::strtoull(argv[i] + 6, nullptr, 10);
    } else if (std::strncmp(argv[i], "-seed=", 6) == 0) {
      seed = std::strtoull(argv[i] + 6, nullptr, 10);
    } else {
      std::ifstream file(argv[i], std::ios::binary);
      const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
      ++files;
    }
  }
  if (files > 0) runs = 0;
  const bool keep = std::getenv("XLA_GPU_FUZZ_KEEP") != nullptr;
  std::mt19937_64 random(seed);
  for (uint64_t i = 0; i < runs; ++i) {
    const std::vector<uint8_t> input = Generate(&random);
    if (keep)
      std::ofstream("crash-input", std::ios::binary)
          .write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%llu inputs (seed %llu), %llu calls answered with a result, nothing found\n",
              static_cast<unsigned long long>(runs + files), static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(xla_gpu_fuzz_answered));
  return 0;
}
