// Runs a fuzz target without libFuzzer:  PROGRAM COUNT SEED FILE...
// Runs each file, then COUNT inputs, which are random or changed files, from the seeds SEED, SEED +
// 1 and so on. Prints each to stderr before it runs, so the last line shows what failed.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

#include "input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using File = std::vector<uint8_t>;

File read(const char* path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) {
    std::fprintf(stderr, "%s: cannot be read\n", path);
    std::exit(2);
  }
  return File(std::istreambuf_iterator<char>(stream), {});
}

File make(fuzz::Random& random, const std::vector<File>& files) {
  File made;
  if (!files.empty() && random.below(4)) made = files[random.below(files.size())];
  if (made.empty()) {
    made.resize(random.below(300));
    random.fill(made.data(), int64_t(made.size()));
  }
  for (uint64_t i = random.below(8); i > 0 && !made.empty(); --i)
    made[random.below(std::min<uint64_t>(made.size(), random.below(2) ? 64 : made.size()))] =
        uint8_t(random.next());
  return made;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  std::vector<File> files;
  for (int i = 3; i < argc; ++i) {
    std::fprintf(stderr, "%s\n", argv[i]);
    files.push_back(read(argv[i]));
    LLVMFuzzerTestOneInput(files.back().data(), files.back().size());
  }
  const uint64_t count = std::strtoull(argv[1], nullptr, 0),
                 seed = std::strtoull(argv[2], nullptr, 0);
  for (uint64_t i = 0; i < count; ++i) {
    std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed + i));
    fuzz::Random random(seed + i);
    const File input = make(random, files);
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%zu files, %llu inputs\n", files.size(), static_cast<unsigned long long>(count));
}
