// A call of a public function as data: its memory, its arguments by name, and the ways in which each argument can be
// wrong. api_check.h has the checks.
#ifndef TESTS_CORE_API_CALL_H
#define TESTS_CORE_API_CALL_H

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "csrc/torch_ext_advanced.h"
#include "tests/core/absurd.h"

namespace api {

using absurd::Random;

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInf = std::numeric_limits<double>::infinity();
inline constexpr double kTiny = std::numeric_limits<double>::denorm_min();

// One way to change an argument. must: the call has to fail then, with a message that contains `names`.
struct Change {
  std::string names, what;
  bool must;
  std::function<void()> make;
};

class Call {
 public:
  explicit Call(uint32_t seed) : random(seed) {}
  Call(const Call &) = delete;

  Random random;
  std::function<tx_status(tx_error *)> run;
  std::vector<Change> changes;
  std::string extra;  // results that are not in the call's memory
  tx_parallel *parallel = nullptr;

  // -- memory: each block between guards of its own, compared as a whole ----------------------------------------------

  template <typename T>
  T *New(int64_t n = 1, T value = {}) {
    auto *at = reinterpret_cast<T *>(Take(n * static_cast<int64_t>(sizeof(T)), 0, TX_NONE));
    for (int64_t i = 0; i < n; i++)
      std::memcpy(static_cast<void *>(at + i), &value, sizeof value);
    return at;
  }
  // A tensor of random finite numbers of ordinary magnitude (random bytes for other dtypes), sometimes at an odd
  // address.
  tx_tensor Tensor(int64_t numel, tx_dtype dtype) {
    int64_t item = 1;
    (void)tx_dtype_size(dtype, &item, nullptr);
    uint8_t *data = Take(numel * item, dtype == TX_I64 ? 0 : random.Below(4) == 0 ? 1 + random.Below(3) : 0, dtype);
    for (int64_t i = 0; i < numel * item; i++)
      data[i] = static_cast<uint8_t>(random.Below(256));
    for (int64_t i = 0; i < numel; i++) {
      uint8_t *top = data + (i + 1) * item - 1;
      if (dtype == TX_F32 || dtype == TX_BF16 || dtype == TX_F16) *top = static_cast<uint8_t>((*top & 0x80) | 0x3c);
      if (dtype == TX_I64) std::memset(data + i * item, 0, 8);
    }
    return {data, numel, dtype, 0};
  }
  tx_tensor F32(float value) {
    const tx_tensor t = Tensor(1, TX_F32);
    std::memcpy(t.data, &value, sizeof value);
    return t;
  }
  // Memory to which, according to the header, a call may write anything. It is excluded from comparisons.
  char *Scratch(int64_t bytes) {
    scratch_.push_back({New<char>(bytes), static_cast<size_t>(bytes)});
    return scratch_.back().first;
  }
  void ClearScratch() {
    for (const auto &[at, bytes] : scratch_)
      std::memset(at, 0, bytes);
  }
  const char *Text(const std::string &text) {
    char *at = New<char>(static_cast<int64_t>(text.size()) + 1);
    std::memcpy(at, text.data(), text.size());
    return at;
  }

  using Bytes = std::vector<std::vector<uint8_t>>;
  Bytes Copy() const {
    Bytes all;
    for (const Block &block : blocks_)
      all.emplace_back(block.raw);
    return all;
  }
  void Restore(const Bytes &all) {
    for (size_t i = 0; i < blocks_.size(); i++)
      std::memcpy(blocks_[i].raw.data(), all[i].data(), all[i].size());
  }
  bool GuardsAreWhole() const {
    for (const Block &block : blocks_)
      for (size_t i = 0; i < block.raw.size(); i++)
        if ((i < block.begin || i >= block.begin + block.bytes) && block.raw[i] != kGuard) return false;
    return true;
  }
  // Whether a tensor contains a NaN: which NaN an operation returns is not promised, so the bits are not compared.
  bool HasNan() const {
    for (const Block &block : blocks_) {
      const size_t item = block.dtype == TX_F32 ? 4 : 2;
      if (block.dtype != TX_F32 && block.dtype != TX_BF16 && block.dtype != TX_F16) continue;
      for (size_t i = block.begin; i < block.begin + block.bytes; i += item) {
        uint32_t bits = 0;
        std::memcpy(&bits, block.raw.data() + i, item);
        const uint32_t most = block.dtype == TX_F16 ? 0x7c00 : block.dtype == TX_BF16 ? 0x7f80 : 0x7f800000;
        if ((bits & (item == 4 ? 0x7fffffff : 0x7fff)) > most) return true;
      }
    }
    return false;
  }

  // -- arguments by name

  void May(const std::string &names, const std::string &what, std::function<void()> make) {
    changes.push_back({names, what, false, std::move(make)});
  }
  void Must(const std::string &names, const std::string &what, std::function<void()> make) {
    changes.push_back({names, what, true, std::move(make)});
  }
  // A struct size of a caller that was compiled with another header.
  void Size(const std::string &names, uint64_t *size) {
    for (const int64_t by : {int64_t{-8}, int64_t{8}, -static_cast<int64_t>(*size)})
      Must(names, "another size", [=] { *size += static_cast<uint64_t>(by); });
  }
  template <typename T>
  void Needed(const std::string &names, T **pointer) {
    Must(names, "NULL", [=] { *pointer = nullptr; });
  }
  template <typename T>
  void Absent(const std::string &names, T **pointer) {
    May(names, "NULL", [=] { *pointer = nullptr; });
  }
  template <typename T>
  void Never(const std::string &names, T *number, std::initializer_list<T> values) {
    for (const T value : values)
      Must(names, std::to_string(value), [=] { *number = value; });
  }
  template <typename T>
  void Other(const std::string &names, T *number, std::initializer_list<T> values) {
    for (const T value : values)
      May(names, std::to_string(value), [=] { *number = value; });
  }
  // All ways in which a tensor can be wrong. `names`: with its index, if it is an element of a list. An empty tensor
  // may be legal.
  void Of(const std::string &names, tx_tensor *t) {
    if (t->numel > 0) {
      Must(names, "no memory", [=] { t->data = nullptr; });
      Must(names, "no dtype", [=] { t->dtype = static_cast<tx_dtype>(77); });
      Must(names, "a dtype of no operator", [=] { t->dtype = TX_C64; });
    }
    Must(names, "negative numel", [=] { t->numel = -1 - t->numel; });
    Must(names, "2^57 elements", [=] { t->numel = int64_t{1} << 57; });
    May(names, "none", [=] { t->numel = 0; });
    if (t->numel > 1) May(names, "an element less", [=] { t->numel--; });
    for (const tx_dtype dtype : {TX_U8, TX_F16, TX_I16, TX_BF16, TX_F32}) {
      int64_t was = 1, is = 1;
      (void)tx_dtype_size(t->dtype, &was, nullptr);
      (void)tx_dtype_size(dtype, &is, nullptr);
      if (is <= was && dtype != t->dtype) May(names, tx_dtype_name(dtype), [=] { t->dtype = dtype; });
    }
  }
  void OfList(const std::string &names, tx_tensor *list, int64_t n) {
    for (int64_t i = 0; i < n; i++)
      Of(names + "[" + std::to_string(i) + "]", list + i);
  }
  // Places t at the memory of `other`, and one byte further. One of both is written, so the call has to fail.
  void Overlaps(const std::string &names, tx_tensor *t, const tx_tensor *other) {
    int64_t item = 1, other_item = 1;
    (void)tx_dtype_size(t->dtype, &item, nullptr);
    (void)tx_dtype_size(other->dtype, &other_item, nullptr);
    const int64_t left = other->numel * other_item - t->numel * item;
    if (t == other || t->numel < 1 || left < 0) return;
    Must(names, "memory of another", [=] { t->data = other->data; });
    if (left > 0) Must(names, "memory of another, a byte on", [=] { t->data = static_cast<char *>(other->data) + 1; });
  }

 private:
  static constexpr uint8_t kGuard = 0xA5;
  struct Block {
    std::vector<uint8_t> raw;
    size_t begin, bytes;
    tx_dtype dtype;
  };
  uint8_t *Take(int64_t bytes, int64_t misaligned, tx_dtype dtype) {
    const size_t begin = 64 + static_cast<size_t>(misaligned), n = static_cast<size_t>(bytes);
    blocks_.push_back({std::vector<uint8_t>(begin + n + 64, kGuard), begin, n, dtype});
    std::memset(blocks_.back().raw.data() + begin, 0, n);
    return blocks_.back().raw.data() + begin;
  }
  std::deque<Block> blocks_;
  std::vector<std::pair<char *, size_t>> scratch_;
};

// A number of elements, often one near the size of a block or tile.
inline int64_t Numel(Random &random) {
  static const int64_t kNumels[] = {1, 2, 127, 128, 129, 300, 1024, 1100, 4097};
  return random.OneIn(2) ? 1 + random.Below(400) : random.Of(kNumels);
}
inline int64_t Blocks(int64_t numel, int64_t block = TX_BLOCK) {
  return (numel + block - 1) / block;
}
inline constexpr tx_dtype kPlain[] = {TX_BF16, TX_F32, TX_F16};

// A public function, and how to make a legal random call of it.
struct Function {
  const char *name;
  void (*make)(Call *call);
};

}  // namespace api

#endif
