// Statistics of gradients, and the norm computed from statistics that other ranks could have sent.
#include <cmath>

#include "tests/fuzz/operate.h"

namespace {

bool IsFinite(const tx_tensor &t, int64_t i) {
  const auto size = static_cast<size_t>(fuzz::SizeOf(t.dtype));
  uint32_t bits = 0;
  std::memcpy(&bits, static_cast<const uint8_t *>(t.data) + static_cast<size_t>(i) * size, size);
  const uint32_t exponent = t.dtype == TX_F32 ? 0x7F800000 : t.dtype == TX_BF16 ? 0x7F80 : 0x7C00;
  return (bits & exponent) != exponent;
}

int64_t Word(const tx_tensor &t, int64_t i) {
  int64_t word;
  std::memcpy(&word, static_cast<const uint8_t *>(t.data) + 8 * i, sizeof word);
  return word;
}

// The number of non-finite elements, and the first tensor that has one.
void CheckNonFinite(const std::vector<tx_tensor> &grads, const tx_tensor &stats, const tx_tensor &first_bad,
                    int64_t first_before) {
  int64_t count = 0, first = INT64_MAX;
  for (size_t g = grads.size(); g-- > 0;) {
    for (int64_t i = 0; i < grads[g].numel; i++) {
      if (IsFinite(grads[g], i)) continue;
      count++;
      first = static_cast<int64_t>(g);
    }
  }
  CHECK(Word(stats, TX_NORM_LIMBS) == count);
  if (first_bad.numel) CHECK(Word(first_bad, 0) == (first < first_before ? first : first_before));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  fuzz::Memory memory(&input);
  std::vector<tx_tensor> grads;
  for (uint32_t n = input.Below(4); n > 0; n--)
    grads.push_back(memory.Take(fuzz::Numel(&input), input.Of(fuzz::kPlain), input.Below(3)));
  std::vector<tx_tensor> more = {input.Odd(4) ? memory.I64s(TX_STATS_LEN) : memory.Take(TX_STATS_LEN, TX_I64),
                                 input.Odd(2) ? fuzz::None() : memory.I64s(1),
                                 input.Odd(2) ? fuzz::None() : memory.F32(static_cast<float>(input.F64()))};
  if (!input.Odd(4)) std::memset(more[0].data, 0, 8 * TX_STATS_LEN);
  std::vector<tx_tensor> results;
  for (int i = 0; i < 3; i++)
    results.push_back(input.Odd(4) ? fuzz::None() : memory.F32(7.0f));
  if (input.Odd(4)) fuzz::MakeOneOdd(&input, fuzz::All({&grads, &more, &results}));
  const int64_t n = input.Odd(32) ? -1 - input.Byte() : static_cast<int64_t>(grads.size());
  const double max_norm = input.Odd(4) ? input.F64() : 1.0;
  const bool is_zeroed = more[0].data && more[0].numel == TX_STATS_LEN && Word(more[0], TX_NORM_LIMBS) == 0;
  const int64_t first_before = more[1].data && more[1].numel == 1 ? Word(more[1], 0) : INT64_MAX;
  const tx_status taken = fuzz::Operate(&input, &memory, [&](const tx_parallel *parallel, tx_error *error) {
    return tx_grad_stats(n, grads.data(), more[0], more[1], parallel, error);
  });
  if (taken == TX_OK && is_zeroed) CheckNonFinite(grads, more[0], more[1], first_before);
  const tx_status status = fuzz::Operate(&input, &memory, [&](const tx_parallel *, tx_error *error) {
    return tx_grad_norm(more[0], more[2], max_norm, results[0], results[1], results[2], error);
  });
  if (status != TX_OK || !results[1].numel || !results[2].numel) return 0;
  float coef, found_inf;
  std::memcpy(&coef, results[1].data, 4);
  std::memcpy(&found_inf, results[2].data, 4);
  CHECK(coef >= 0 && coef <= 1 && (found_inf == 0 || (found_inf == 1 && coef == 0)));
  return 0;
}
