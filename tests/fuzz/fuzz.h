// The common part of fuzz targets: numbers taken from the fuzzer's bytes, memory between guards, and a check that ends
// the process. A target is one file, NAME_fuzz.cc, which defines LLVMFuzzerTestOneInput; its kept inputs are in
// corpus/NAME. tests/fuzz.sh runs it under libFuzzer, and replay.cc in the ordinary build.
//
// Once the input is used up, every number is 0, and 0 always means the ordinary case: so a short input is a plain call.
#ifndef TESTS_FUZZ_FUZZ_H
#define TESTS_FUZZ_FUZZ_H

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "csrc/torch_ext.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

// Ends the process, as a sanitizer does, if a promise of the library is broken.
#define CHECK(promise)                                                             \
  do {                                                                             \
    if (!(promise)) {                                                              \
      std::fprintf(stderr, "%s:%d: not kept: %s\n", __FILE__, __LINE__, #promise); \
      std::abort();                                                                \
    }                                                                              \
  } while (0)

namespace fuzz {

#if defined(__SANITIZE_ADDRESS__)
inline constexpr size_t kGuard = 0;  // the sanitizer's own guards are exact to the byte
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
inline constexpr size_t kGuard = 0;
#else
inline constexpr size_t kGuard = 64;
#endif
#else
inline constexpr size_t kGuard = 64;
#endif

// The fuzzer's bytes, consumed in order.
class Input {
 public:
  Input(const uint8_t *data, size_t size) : data_(data), size_(size) {}

  size_t left() const { return size_; }
  uint8_t Byte() {
    if (size_ == 0) return 0;
    size_--;
    return *data_++;
  }
  // Up to n bytes, unchanged.
  std::vector<uint8_t> Bytes(size_t n) {
    n = n < size_ ? n : size_;
    std::vector<uint8_t> bytes(data_, data_ + n);
    data_ += n;
    size_ -= n;
    return bytes;
  }
  // In 0 ... bound - 1.
  uint32_t Below(uint32_t bound) {
    const uint32_t number = bound > 256 ? Byte() | static_cast<uint32_t>(Byte()) << 8 : Byte();
    return number % bound;
  }
  // True one time in n, and never once the input is used up.
  bool Odd(uint32_t n) { return Byte() >= 256 - 256 / n; }
  template <typename Value, size_t N>
  Value Of(const Value (&values)[N]) {
    return values[Below(N)];
  }

  // A small number, one near a power of two with either sign, or any eight bytes.
  int64_t I64() {
    const uint8_t kind = Byte();
    if (kind < 96) return Byte();
    if (kind < 128) return -static_cast<int64_t>(Byte());
    if (kind < 208) {
      const uint64_t near = (uint64_t{1} << (kind & 63)) + Below(5) - 2;
      return static_cast<int64_t>(kind & 64 ? near : 0 - near);
    }
    if (kind < 216) return kind & 1 ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int64_t>::max();
    return static_cast<int64_t>(Raw<uint64_t>());
  }
  int32_t I32() { return static_cast<int32_t>(I64()); }
  double F64() {
    static const double kValues[] = {0.0,   1.0,    0.5,    1e-3,    -0.0,   -1.0,        1e-300,      1e300,
                                     1e30,  0x1p63, -1e300, 0x1p127, 0x1p53, 0x1p-1074,   1.0 - 1e-16, 1 + 1e-15,
                                     3e38f, 7e-46,  65504,  448,     -448,   2147483648.0};
    const uint8_t kind = Byte();
    if (kind < 8) return std::numeric_limits<double>::infinity() * (kind < 6 ? 0 : kind < 7 ? 1 : -1);
    return kind < 192 ? kValues[kind % (sizeof kValues / sizeof *kValues)] : Raw<double>();
  }
  // At most n bytes without a NUL.
  std::string Text(size_t n) {
    std::string text;
    for (size_t i = Below(static_cast<uint32_t>(n) + 1); i > 0 && size_ > 0 && *data_ != 0; i--)
      text += static_cast<char>(Byte());
    return text;
  }

 private:
  template <typename T>
  T Raw() {
    T value = {};
    const std::vector<uint8_t> bytes = Bytes(sizeof value);
    if (!bytes.empty()) std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }
  const uint8_t *data_;
  size_t size_;
};

inline int64_t SizeOf(tx_dtype dtype) {
  int64_t bytes = 1;
  (void)tx_dtype_size(dtype, &bytes, nullptr);
  return bytes;
}

inline tx_tensor None() {
  return {nullptr, 0, TX_NONE, 0};
}

// Memory of tensors. Each has its own allocation of exactly its size, at any alignment.
class Memory {
 public:
  explicit Memory(Input *input) : input_(input), random_(0x9E3779B97F4A7C15u + input->Byte()) {}

  // A tensor. It contains some of the fuzzer's bytes, the rest is random: either finite numbers or any bits.
  tx_tensor Take(int64_t numel, tx_dtype dtype, int64_t misalign = 0) {
    const size_t bytes = static_cast<size_t>(numel * SizeOf(dtype));
    const size_t begin = kGuard + static_cast<size_t>(misalign);
    blocks_.push_back({std::vector<uint8_t>(begin + bytes + kGuard, 0xA5), begin, bytes, dtype});
    uint8_t *data = blocks_.back().raw.data() + begin;
    Fill(data, bytes, static_cast<size_t>(SizeOf(dtype)));
    const std::vector<uint8_t> given = input_->Bytes(input_->Below(9));
    if (!given.empty() && bytes > 0) std::memcpy(data, given.data(), given.size() < bytes ? given.size() : bytes);
    return {data, numel, dtype, 0};
  }
  template <typename T>
  tx_tensor One(T value, tx_dtype dtype) {
    const tx_tensor t = Take(1, dtype);
    CHECK(static_cast<size_t>(SizeOf(dtype)) == sizeof value);
    std::memcpy(t.data, &value, sizeof value);
    return t;
  }
  tx_tensor F32(float value) { return One(value, TX_F32); }
  // Numbers as other ranks, or a damaged file, could have written them.
  tx_tensor I64s(int64_t numel) {
    const tx_tensor t = Take(numel, TX_I64);
    for (int64_t i = 0; i < numel; i++) {
      const int64_t value = input_->I64();
      std::memcpy(static_cast<uint8_t *>(t.data) + 8 * i, &value, sizeof value);
    }
    return t;
  }

  std::vector<std::vector<uint8_t>> Copy() const {
    std::vector<std::vector<uint8_t>> all;
    for (const Block &block : blocks_)
      all.push_back(block.raw);
    return all;
  }
  void Restore(const std::vector<std::vector<uint8_t>> &all) {
    for (size_t i = 0; i < blocks_.size(); i++)
      if (!all[i].empty()) std::memcpy(blocks_[i].raw.data(), all[i].data(), all[i].size());
  }
  bool HasNan() const {
    for (const Block &block : blocks_) {
      if (block.dtype != TX_F32 && block.dtype != TX_BF16 && block.dtype != TX_F16) continue;
      const size_t size = block.dtype == TX_F32 ? 4 : 2;
      for (size_t i = block.begin; i < block.begin + block.bytes; i += size) {
        if (IsNan(block.raw.data() + i, size, block.dtype)) return true;
      }
    }
    return false;
  }
  bool GuardsAreWhole() const {
    for (const Block &block : blocks_) {
      for (size_t i = 0; i < block.begin; i++) {
        if (block.raw[i] != 0xA5) return false;
      }
      for (size_t i = block.begin + block.bytes; i < block.raw.size(); i++) {
        if (block.raw[i] != 0xA5) return false;
      }
    }
    return true;
  }

 private:
  struct Block {
    std::vector<uint8_t> raw;
    size_t begin, bytes;
    tx_dtype dtype;
  };
  // Exponent and mantissa are in the upper bits of an element.
  static bool IsNan(const uint8_t *element, size_t size, tx_dtype dtype) {
    uint32_t bits = 0;
    std::memcpy(&bits, element, size);
    if (dtype == TX_F16) return (bits & 0x7FFF) > 0x7C00;
    if (dtype == TX_BF16) return (bits & 0x7FFF) > 0x7F80;
    return (bits & 0x7FFFFFFF) > 0x7F800000;
  }
  void Fill(uint8_t *data, size_t bytes, size_t size) {
    static const std::vector<uint8_t> pool = [] {
      std::mt19937_64 random(1);
      std::vector<uint8_t> made(1 << 16);
      for (uint8_t &byte : made)
        byte = static_cast<uint8_t>(random());
      return made;
    }();
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    const size_t offset = random_ >> 52;
    const size_t room = pool.size() - offset;
    for (size_t i = 0; i < bytes; i += room)
      std::memcpy(data + i, pool.data() + offset, bytes - i < room ? bytes - i : room);
    if (input_->Odd(3)) return;
    for (size_t i = size - 1; i < bytes; i += size)
      data[i] &= 0xBF; /* no Inf, no NaN */
  }
  Input *input_;
  uint64_t random_;
  std::deque<Block> blocks_;
};

// A tx_parallel that runs its tasks on the calling thread, and may report an absurd number of threads.
class Parallel {
 public:
  explicit Parallel(Input *input) {
    parallel_.run = [](void *, int64_t n, void (*task)(void *, int64_t), void *arg) {
      for (int64_t i = n; i-- > 0;)
        task(arg, i);
    };
    parallel_.num_threads = input->Odd(4) ? input->I64() : 1 + input->Below(4);
    if (input->Odd(64)) parallel_.size = static_cast<uint64_t>(input->I64());
    is_there_ = !input->Odd(4);
  }
  const tx_parallel *get() const { return is_there_ ? &parallel_ : nullptr; }

 private:
  tx_parallel parallel_ = TX_PARALLEL_INIT;
  bool is_there_ = true;
};

inline bool IsSentence(const tx_error &error) {
  const size_t length = strnlen(error.message, sizeof error.message);
  return length > 0 && length < sizeof error.message;
}

// Makes a call, call(tx_error *), which may succeed or be rejected. A rejection has a message and changes nothing.
// Nothing is written outside the given memory. And the same call without an error struct has the same result. Returns
// the status.
template <typename Call>
tx_status Answer(Memory *memory, Call call) {
  const auto before = memory->Copy();
  tx_error error = {};
  const tx_status status = call(&error);
  const auto after = memory->Copy();
  CHECK(memory->GuardsAreWhole());
  if (status != TX_OK) {
    CHECK(IsSentence(error));
    CHECK(before == after);
  }
  memory->Restore(before);
  CHECK(call(nullptr) == status);
  CHECK(memory->GuardsAreWhole());
  CHECK(memory->HasNan() || memory->Copy() == after); /* which NaN an operation produces is not specified */
  return status;
}

}  // namespace fuzz

#endif
