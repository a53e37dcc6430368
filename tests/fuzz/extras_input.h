// Builds the optional outputs of a step from the fuzzer's bytes.
#ifndef TESTS_FUZZ_EXTRAS_INPUT_H
#define TESTS_FUZZ_EXTRAS_INPUT_H

#include "tests/fuzz/operate.h"

namespace fuzz {

// For each parameter any subset of them; none once the input is used up.
struct Extras {
  std::vector<tx_tensor> changed, moved, distances, emas, ema_lows, healths;

  // params and masters may be invalid already.
  Extras(Input *input, Memory *memory, const std::vector<tx_tensor> &params, const std::vector<tx_tensor> &masters) {
    for (size_t i = 0; input->Odd(2) && i < params.size(); i++)
      Add(input, memory, params[i], masters[i]);
    asked_ = changed.size() == params.size();
    every_ = input->Odd(16) ? input->I64() : 1 + input->Below(3);
    decay_ = input->Odd(16) ? input->F64() : 0.999;
    if (asked_ && input->Odd(8)) MakeOneOdd(input, All({&changed, &moved, &distances, &emas, &ema_lows, &healths}));
  }
  template <typename Args>
  void Lend(Args *args) {
    if (!asked_) return;
    args->changed = changed.data();
    args->moved = moved.data();
    args->distances = distances.data();
    args->emas = emas.data();
    args->ema_lows = ema_lows.data();
    args->healths = healths.data();
    args->ema_every = every_;
    args->ema_decay = decay_;
  }

 private:
  void Add(Input *input, Memory *memory, const tx_tensor &param, const tx_tensor &master) {
    const int64_t n = param.numel > 0 && param.numel < 1 << 20 ? param.numel : 0, misalign = input->Below(3);
    const uint8_t which = input->Byte();
    const auto take = [&](int bit, int64_t numel, tx_dtype dtype) {
      return which >> bit & 1 ? memory->Take(numel, dtype, misalign) : None();
    };
    changed.push_back(take(0, (n + 7) / 8, TX_U8));
    moved.push_back(take(1, Blocks(n), TX_BF16));
    distances.push_back(take(2, (n + 1) / 2, TX_U8));
    const bool averages = param.dtype == TX_F32 || master.numel > 0;
    emas.push_back(averages ? take(3, n, which >> 5 & 1 ? TX_F32 : TX_BF16) : None());
    ema_lows.push_back(emas.back().numel && emas.back().dtype == TX_BF16 ? take(6, n, TX_U8) : None());
    healths.push_back(which >> 4 & 1 ? memory->I64s(TX_HEALTH_LEN) : None());
  }

  bool asked_ = false;
  int64_t every_ = 1;
  double decay_ = 0.999;
};

}  // namespace fuzz

#endif
