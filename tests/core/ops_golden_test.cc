// Compares checksums of the operators' results with a table: the bits have to be the same on every processor and
// instruction set that the library is built for. Inputs are generated from integers, because the C++ library's normal
// distribution uses a logarithm, which differs between platforms.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

extern "C" {
#include "csrc/core/hash.h"
}
#include "csrc/torch_ext_advanced.h"
#include "tests/core/adamw_call.h"
#include "tests/core/arrays.h"
#include "tests/core/same_bits.h"
#include "tests/core/sweep.h"
#include "tests/core/wires.h"

namespace {

using adamw_call::Call;
using adamw_call::Combo;
using adamw_call::Param;

constexpr int64_t kElements = 5 * TX_BLOCK + 3;

// A number of either sign, spread over eight powers of two, below `size` (a power of two) in magnitude.
float Number(uint32_t seed, int64_t i, float size) {
  const uint32_t bits = Scramble(seed * 0x9e3779b9u + static_cast<uint32_t>(i));
  const auto fraction = static_cast<float>(static_cast<int32_t>(bits) >> 8) * 0x1p-23f;
  return std::ldexp(fraction * size, -static_cast<int>(bits & 7u));
}

Array Numbers(tx_dtype dtype, int64_t n, uint32_t seed, float size = 1.0f) {
  Array array(dtype, n);
  for (int64_t i = 0; i < n; i++)
    array.Set(i, Number(seed, i, size));
  return array;
}

Outputs Step(const Caller &caller, const Combo &combo, int32_t rounding = TX_DITHERED) {
  Param param(combo, kElements, 1);
  for (int64_t i = 0; i < param.n; i++) {
    tx_store(param.param.data(), i, combo.param, Number(1, i, 1.0f));
    if (combo.master == TX_F32) tx_store(param.master.data(), i, TX_F32, tx_load(param.param.data(), i, combo.param));
  }
  for (uint32_t step = 0; step < 3; step++) {
    for (int64_t i = 0; i < param.n; i++)
      tx_store(param.grad.data(), i, combo.grad, Number(2 + step, i, 0x1p-6f));
    Call call;
    call.args.seed = 5;
    call.args.moment_rounding = call.args.weight_rounding = rounding;
    call.Add(param);
    caller([&](const tx_parallel *parallel, tx_error *error) { return tx_adamw(call.Args(), parallel, error); });
  }
  return param.State();
}

Outputs StepF32(const Caller &caller) {
  return Step(caller, adamw_call::kF32);
}
Outputs StepBf16(const Caller &caller) {
  return Step(caller, adamw_call::kBf16);
}
Outputs StepRemainder(const Caller &caller) {
  return Step(caller, adamw_call::kRemainder);
}
Outputs Step8bit(const Caller &caller) {
  return Step(caller, adamw_call::kBlocks);
}
Outputs Step8bitStochastic(const Caller &caller) {
  return Step(caller, adamw_call::kBlocks, TX_STOCHASTIC);
}
Outputs StepF16NoMaster(const Caller &caller) {
  return Step(caller, {TX_F16, TX_NONE, TX_F16, TX_F16, TX_F16});
}

Outputs Norm(const Caller &caller) {
  Array grad = Numbers(TX_BF16, kElements, 7), norm(TX_F64, 1), coefficient(TX_F32, 1), found_inf(TX_F32, 1);
  Counts stats = NoStats();
  const tx_tensor tensor = grad.tensor();
  caller([&](const tx_parallel *parallel, tx_error *error) {
    const tx_status status = tx_grad_stats(1, &tensor, stats.tensor(), None(), parallel, error);
    if (status != TX_OK) return status;
    return tx_grad_norm(stats.tensor(), None(), 0.75, norm.tensor(), coefficient.tensor(), found_inf.tensor(), error);
  });
  return {stats.bytes(), norm.bytes(), coefficient.bytes(), found_inf.bytes()};
}

// The gradients of three ranks in a wire dtype, and their mean.
Outputs Reduce(const Caller &caller, tx_dtype wire) {
  std::vector<Wire> chunks;
  std::vector<tx_tensor> data, scales;
  for (uint32_t rank = 0; rank < 3; rank++) {
    Array grad = Numbers(TX_F32, 4 * TX_BLOCK, 11 + rank);
    chunks.push_back(Pack(grad, wire, wire == TX_U8 ? TX_DITHERED : TX_NEAREST));
  }
  Outputs outputs;
  for (Wire &chunk : chunks) {
    data.push_back(chunk.data.tensor());
    scales.push_back(chunk.scales_or_none());
    outputs.insert(outputs.end(), {chunk.data.bytes(), chunk.scales.bytes()});
  }
  Array shard(TX_F32, 4 * TX_BLOCK);
  tx_bucket_reduce_args args = TX_BUCKET_REDUCE_ARGS_INIT;
  args.n = 3;
  args.chunks = data.data();
  args.scales = scales.data();
  args.shard = shard.tensor();
  args.stats = None();
  args.scale = 1.0 / 3.0;
  caller([&](const tx_parallel *parallel, tx_error *error) { return tx_bucket_reduce(&args, parallel, error); });
  outputs.push_back(shard.bytes());
  return outputs;
}
Outputs ReduceF32(const Caller &caller) {
  return Reduce(caller, TX_F32);
}
Outputs ReduceBf16(const Caller &caller) {
  return Reduce(caller, TX_BF16);
}
Outputs Reduce8bit(const Caller &caller) {
  return Reduce(caller, TX_U8);
}

Outputs Cast(const Caller &caller, tx_dtype to, tx_format format) {
  Array from = Numbers(TX_F32, kElements, 17, 0x1p-10f), data(to, kElements);
  Array scales(TX_U8, to == TX_U8 ? tx_blocks(kElements) : 0);
  for (int64_t i = 0; i < kElements && format == TX_FORMAT_SQRT; i++)
    from.Set(i, std::fabs(from.Get(i)));
  const tx_tensor src = from.tensor(), dst = data.tensor(), dst_scales = scales.size() ? scales.tensor() : None();
  tx_cast_args args = TX_CAST_ARGS_INIT;
  args.n = 1;
  args.srcs = &src;
  args.dsts = &dst;
  args.dst_scales = &dst_scales;
  args.seed = 3;
  args.step = 4;
  args.format = format;
  args.rounding = TX_DITHERED;
  caller([&](const tx_parallel *parallel, tx_error *error) { return tx_cast(&args, parallel, error); });
  return {data.bytes(), scales.bytes()};
}
Outputs CastBf16Dithered(const Caller &caller) {
  return Cast(caller, TX_BF16, TX_FORMAT_SIGNED);
}
Outputs Cast8bitRoots(const Caller &caller) {
  return Cast(caller, TX_U8, TX_FORMAT_SQRT);
}

Outputs Remainders(const Caller &caller) {
  Array master = Numbers(TX_F32, kElements, 19), param(TX_BF16, kElements), remainder(TX_I16, kElements);
  const tx_tensor masters = master.tensor(), params = param.tensor(), remainders = remainder.tensor();
  caller([&](const tx_parallel *parallel, tx_error *error) {
    return tx_master_encode(1, &masters, &params, &remainders, parallel, error);
  });
  return {param.bytes(), remainder.bytes()};
}

Outputs Compressed(const Caller &caller) {
  Array values = Numbers(TX_BF16, 4 * TX_BLOCK, 23), message(TX_U8, tx_compressed_bytes(4 * TX_BLOCK));
  int64_t rest = -1;
  caller([&](const tx_parallel *, tx_error *error) {
    return tx_compress(values.tensor(), message.tensor(), &rest, error);
  });
  return {message.bytes()};
}

uint64_t Checksum(const Outputs &outputs) {
  uint64_t hash = tx_hash_begin();
  for (const auto &bytes : outputs) {
    hash = tx_hash_int(hash, static_cast<int64_t>(bytes.size()));
    hash = tx_hash_bytes(hash, reinterpret_cast<const char *>(bytes.data()), bytes.size());
  }
  return tx_hash_end(hash);
}

#define X(scenario, checksum)                                                                                       \
  TEST(Golden, scenario) {                                                                                          \
    ExpectSameBits(scenario);                                                                                       \
    const uint64_t now = Checksum(scenario(Caller(nullptr)));                                                       \
    EXPECT_EQ(now, UINT64_C(checksum)) << "X(" #scenario ", 0x" << std::hex << now << ") would be the table's row"; \
  }
#include "tests/core/golden_bits.inc"
#undef X

}  // namespace
