// A gradient bucket in its wire dtype, or one rank's chunk of it, for the tests of tx_bucket_*.
#ifndef TX_TESTS_CORE_WIRES_H
#define TX_TESTS_CORE_WIRES_H

#include <vector>

extern "C" {
#include "csrc/math/block_scale.h"
}
#include "tests/core/arrays.h"

inline const std::vector<tx_dtype> kWires = {TX_F32, TX_BF16, TX_F16, TX_U8};

inline Counts NoStats() {
  return Counts(std::vector<int64_t>(TX_STATS_LEN, 0));
}

inline int64_t ScaleBytes(tx_dtype wire, int64_t n) {
  return wire == TX_U8 ? tx_blocks(n) : 0;
}

// The data of a bucket (or chunk), and its block scales if the wire dtype is 8-bit.
struct Wire {
  Array data, scales;
  Wire(tx_dtype dtype, int64_t n, int64_t misalign = 1)
      : data(dtype, n, misalign), scales(TX_U8, ScaleBytes(dtype, n), misalign) {}
  float Get(int64_t i) const {
    if (data.dtype() != TX_U8) return data.Get(i);
    return tx_block_value(tx_block_e4m3(), data.Word<uint8_t>(i),
                          tx_scale_decode(tx_block_e4m3(), scales.Word<uint8_t>(i / TX_BLOCK)));
  }
  tx_tensor scales_or_none() { return scales.size() ? scales.tensor() : None(); }
  bool operator==(const Wire &other) const {
    return data.raw() == other.data.raw() && scales.raw() == other.scales.raw();
  }
};

// Packs one gradient into a bucket of the gradient's size.
inline Wire Pack(Array &grad, tx_dtype wire, int32_t rounding = TX_NEAREST) {
  Wire bucket(wire, grad.size());
  const int64_t offset = 0;
  const tx_tensor tensor = grad.tensor();
  tx_bucket_pack_args args = TX_BUCKET_PACK_ARGS_INIT;
  args.n = 1;
  args.grads = &tensor;
  args.offsets = &offset;
  args.bucket = bucket.data.tensor();
  args.scales = bucket.scales_or_none();
  args.rounding = rounding;
  tx_error error = {};
  EXPECT_EQ(tx_bucket_pack(&args, nullptr, &error), TX_OK) << error.message;
  return bucket;
}

#endif
