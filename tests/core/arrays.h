// Tensors for the tests of operators: bytes at an address that may be odd, between guard bytes, read and written as
// numbers.
#ifndef TX_TESTS_CORE_ARRAYS_H
#define TX_TESTS_CORE_ARRAYS_H

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

extern "C" {
#include "csrc/core/dtype.h"
#include "csrc/cpu/element.h"
#include "csrc/ops/check.h"
}

// Sizes around the numbers of SIMD lanes and the block size, and one that is divided between threads.
#ifdef TX_SLOW
inline constexpr int64_t kLarge = 16384 + 333;
#else
inline constexpr int64_t kLarge = 2 * 16384 + 333;
#endif
inline const std::vector<int64_t> kSizes = {0, 1, 3, 4, 5, 15, 16, 17, 127, 128, 129, 1023, 1025, kLarge};

inline const std::vector<tx_dtype> kPlain = {TX_F32, TX_BF16, TX_F16};

class Array {
 public:
  Array(tx_dtype dtype, int64_t n, int64_t misalign = 1)
      : dtype_(dtype), n_(n), begin_(kGuard + misalign), raw_(begin_ + n * tx_element_size(dtype) + kGuard, 0xa5) {
    if (n > 0) std::memset(data(), 0, byte_count());
  }
  Array(tx_dtype dtype, const std::vector<float> &values) : Array(dtype, static_cast<int64_t>(values.size())) {
    for (int64_t i = 0; i < n_; i++)
      Set(i, values[i]);
  }

  Array(tx_dtype dtype, std::initializer_list<float> values) : Array(dtype, std::vector<float>(values)) {}

  tx_dtype dtype() const { return dtype_; }
  int64_t size() const { return n_; }
  uint8_t *data() { return raw_.data() + begin_; }
  const uint8_t *data() const { return raw_.data() + begin_; }
  size_t byte_count() const { return static_cast<size_t>(n_ * tx_element_size(dtype_)); }
  tx_tensor tensor() { return {data(), n_, dtype_, 0}; }
  // The tensor of the elements [begin, end).
  tx_tensor slice(int64_t begin, int64_t end) {
    return {data() + begin * tx_element_size(dtype_), end - begin, dtype_, 0};
  }

  // All bytes including the guards: if a copy of them is equal later, nothing was written.
  const std::vector<uint8_t> &raw() const { return raw_; }
  std::vector<uint8_t> bytes() const { return {data(), data() + byte_count()}; }
  bool GuardsIntact() const {
    for (size_t i = 0; i < raw_.size(); i++) {
      const bool inside = i >= static_cast<size_t>(begin_) && i < begin_ + byte_count();
      if (!inside && raw_[i] != 0xa5) return false;
    }
    return true;
  }

  // Elements as numbers; for the plain dtypes.
  float Get(int64_t i) const { return tx_load(data(), i, dtype_); }
  void Set(int64_t i, float x) { tx_store(data(), i, dtype_, x); }
  // Elements as they are stored.
  template <typename T>
  T Word(int64_t i) const {
    T word;
    std::memcpy(&word, data() + i * static_cast<int64_t>(sizeof word), sizeof word);
    return word;
  }
  template <typename T>
  void SetWord(int64_t i, T word) {
    std::memcpy(data() + i * static_cast<int64_t>(sizeof word), &word, sizeof word);
  }

  // Realistic gradients: normally distributed, with magnitudes that differ by orders of magnitude between stretches of
  // 50 elements.
  Array &Fill(uint32_t seed, float size = 1.0f) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    float stretch = size;
    for (int64_t i = 0; i < n_; i++) {
      if (i % 50 == 0) stretch = size * std::exp2(std::round(3.0f * normal(generator)));
      Set(i, normal(generator) * stretch);
    }
    return *this;
  }
  // Random bytes, which include NaNs and subnormal numbers.
  Array &FillBytes(uint32_t seed) {
    std::mt19937 generator(seed);
    for (size_t i = 0; i < byte_count(); i++)
      data()[i] = static_cast<uint8_t>(generator());
    return *this;
  }

 private:
  static constexpr int64_t kGuard = 64;
  tx_dtype dtype_;
  int64_t n_, begin_;
  std::vector<uint8_t> raw_;
};

inline tx_tensor None() {
  return {nullptr, 0, TX_NONE, 0};
}

// A tensor of int64 values.
class Counts : public Array {
 public:
  explicit Counts(std::vector<int64_t> values) : Array(TX_I64, static_cast<int64_t>(values.size())) {
    for (int64_t i = 0; i < size(); i++)
      SetWord(i, values[i]);
  }
  int64_t operator[](int64_t i) const { return Word<int64_t>(i); }
};

inline std::string DtypeName(tx_dtype dtype) {
  return tx_dtype_name(dtype);
}

// Checks that a call fails with `status` and a message that contains `says`, with or without an error buffer, and that
// no byte of the arrays in `written` changes. `call` takes a tx_error *.
template <typename Call>
void ExpectRefused(Call call, tx_status status, const std::string &says, const std::vector<const Array *> &written) {
  std::vector<std::vector<uint8_t>> before;
  for (const Array *array : written)
    before.push_back(array->raw());
  tx_error error = {};
  EXPECT_EQ(call(&error), status) << error.message;
  EXPECT_NE(std::string(error.message).find(says), std::string::npos) << error.message << "\n  should say: " << says;
  EXPECT_EQ(call(nullptr), status) << "without a message buffer";
  for (size_t i = 0; i < written.size(); i++)
    EXPECT_EQ(written[i]->raw(), before[i]) << "array " << i << " changed";
}

#define EXPECT_OK(call)                                \
  do {                                                 \
    tx_error error = {};                               \
    EXPECT_EQ((call)(&error), TX_OK) << error.message; \
  } while (0)

#endif
