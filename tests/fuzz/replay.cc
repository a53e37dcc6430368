// Runs the kept inputs of a fuzz target as an ordinary test, without libFuzzer. So inputs that once found a bug, or
// that reach other lines of code, are tested in every build. FUZZ_CORPUS in the environment is the folder of the
// inputs.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz.h"

namespace {

TEST(Corpus, EveryInputIsTaken) {
  const char *folder = std::getenv("FUZZ_CORPUS");
  ASSERT_NE(folder, nullptr) << "FUZZ_CORPUS is not set: it names a folder, tests/fuzz/corpus/adamw";
  std::vector<std::filesystem::path> files;
  for (const auto &entry : std::filesystem::directory_iterator(folder))
    files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  ASSERT_FALSE(files.empty()) << folder;
  for (const auto &file : files) {
    std::ifstream stream(file, std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
    std::fprintf(stderr, "%s\n", file.c_str());  // if the process dies, this was the last input
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size());
  }
}

}  // namespace
