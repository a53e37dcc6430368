// Runs one operator on the (emulated) GPU and on the CPU with copies of the same tensors: bytes, guards and messages
// must be equal.
#ifndef TX_TESTS_CUDA_BOTH_H
#define TX_TESTS_CUDA_BOTH_H

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "csrc/torch_ext_cuda.h"
#include "tests/core/arrays.h"

// The number of processors of a device, and of blocks on each: results must not depend on them.
struct Grid {
  int processors, blocks_per_processor;
};
inline const std::vector<Grid> kGrids = {{1, 1}, {3, 2}, {7, 4}};

// Elements by which tensors begin past an address that is aligned to vectors.
#ifdef TX_SLOW
inline const std::vector<int64_t> kMisaligned = {0, 1};
#else
inline const std::vector<int64_t> kMisaligned = {0, 1, 2};
#endif

inline void Arrange(const Grid &grid = {3, 2}) {
  emulated::world = emulated::World();
  emulated::Use(grid.processors, grid.blocks_per_processor);
}

// A call on the current device.
inline const tx_cuda_call *Call() {
  static tx_cuda_call call = TX_CUDA_CALL_INIT;
  call.device = emulated::world.current;
  return &call;
}

inline std::vector<tx_tensor> Tensors(std::vector<Array> &arrays) {
  std::vector<tx_tensor> tensors;
  for (Array &array : arrays)
    tensors.push_back(array.tensor());
  return tensors;
}

inline void ExpectSameBytes(const std::vector<Array> &ours, const std::vector<Array> &theirs) {
  ASSERT_EQ(ours.size(), theirs.size());
  for (size_t i = 0; i < ours.size(); i++)
    ASSERT_EQ(ours[i].raw(), theirs[i].raw()) << "tensor " << i << " of " << ours[i].size() << " elements";
}

// int64 values at an address that is aligned for atomics.
class AlignedCounts : public Array {
 public:
  explicit AlignedCounts(const std::vector<int64_t> &values) : Array(TX_I64, static_cast<int64_t>(values.size()), 0) {
    for (int64_t i = 0; i < size(); i++)
      SetWord(i, values[static_cast<size_t>(i)]);
  }
  int64_t operator[](int64_t i) const { return Word<int64_t>(i); }
};

inline AlignedCounts ZeroStats() {
  return AlignedCounts(std::vector<int64_t>(TX_STATS_LEN, 0));
}

// Both calls, each of which takes a tx_error *, must fail with the same message. Nothing is launched, and `written`
// keeps every byte.
template <typename Ours, typename Theirs>
void ExpectRefusedAlike(Ours ours, Theirs theirs, const std::vector<const Array *> &written) {
  std::vector<std::vector<uint8_t>> before;
  for (const Array *array : written)
    before.push_back(array->raw());
  tx_error our_error = {}, their_error = {};
  emulated::world.launches = 0;
  const tx_status status = theirs(&their_error);
  EXPECT_NE(status, TX_OK);
  EXPECT_EQ(ours(&our_error), status);
  EXPECT_STREQ(our_error.message, their_error.message);
  EXPECT_EQ(ours(nullptr), status) << "without a message buffer";
  EXPECT_EQ(emulated::world.launches, 0);
  for (size_t i = 0; i < written.size(); i++)
    EXPECT_EQ(written[i]->raw(), before[i]) << "array " << i << " changed";
}

#endif
