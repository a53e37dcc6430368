// Masters and weights: encode and decode, resync from weights, and checksums.
#include "tests/fuzz/operate.h"

namespace {

struct Masters {
  std::vector<tx_tensor> params, masters, checksums, decoded, remainders;
  int64_t n;
  int32_t mode;
  tx_tensor counts;

  Masters(fuzz::Input *input, fuzz::Memory *memory) {
    n = 1 + input->Below(3);
    for (int64_t i = 0; i < n; i++) {
      const int64_t numel = fuzz::Numel(input);
      const bool remainder = input->Odd(2), half = !remainder && input->Odd(4);
      params.push_back(memory->Take(numel, half ? TX_F16 : TX_BF16, input->Below(3)));
      masters.push_back(memory->Take(numel, remainder ? TX_I16 : TX_F32, input->Below(3)));
      decoded.push_back(memory->Take(numel, TX_F32));
      remainders.push_back(memory->Take(numel, TX_I16));
      checksums.push_back(input->Odd(4)
                              ? fuzz::None()
                              : memory->Take(fuzz::Blocks(numel, remainder ? TX_CHECKSUM : TX_SAMPLED), TX_I64));
    }
    counts = input->Odd(4) ? fuzz::None() : memory->I64s(n);
    mode = input->Odd(16) ? input->I32() : static_cast<int32_t>(input->Below(3));
    if (input->Odd(4)) fuzz::MakeOneOdd(input, fuzz::All({&params, &masters, &checksums, &decoded, &remainders}));
    if (input->Odd(32)) n = -1 - input->Byte();
  }
};

// Encoding a decoded master gives the same bits, except for NaNs and the ties in Note [remainders].
void CheckRoundTrip(const Masters &m, fuzz::Memory *memory) {
  for (size_t i = 0; i < m.decoded.size(); i++) {
    const auto before = memory->Copy();
    const tx_tensor param = m.params[i], master = m.decoded[i], rest = m.remainders[i];
    CHECK(tx_master_encode(1, &master, &param, &rest, nullptr, nullptr) == TX_OK);
    const auto once = memory->Copy();
    CHECK(tx_master_decode(1, &param, &rest, &master, nullptr, nullptr) == TX_OK);
    CHECK(tx_master_encode(1, &master, &param, &rest, nullptr, nullptr) == TX_OK);
    const auto decoded = memory->Copy();
    CHECK(tx_master_decode(1, &param, &rest, &master, nullptr, nullptr) == TX_OK);
    CHECK(memory->Copy() == decoded);
    memory->Restore(before);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  fuzz::Memory memory(&input);
  const Masters m(&input, &memory);
  const uint32_t which = input.Below(4);
  const tx_status status = fuzz::Operate(&input, &memory, [&](const tx_parallel *parallel, tx_error *error) {
    const tx_tensor *params = m.params.data();
    if (which == 0) return tx_master_encode(m.n, m.decoded.data(), params, m.remainders.data(), parallel, error);
    if (which == 1) return tx_master_decode(m.n, params, m.remainders.data(), m.decoded.data(), parallel, error);
    if (which == 2) return tx_master_resync(m.n, params, m.masters.data(), m.mode, m.counts, parallel, error);
    return tx_master_checksum(m.n, params, m.masters.data(), m.checksums.data(), m.mode, m.counts, parallel, error);
  });
  if (which == 0 && status == TX_OK && m.n > 0) CheckRoundTrip(m, &memory);
  return 0;
}
