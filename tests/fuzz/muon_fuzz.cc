// Muon's two passes: any dtypes, sizes, tables of matrices and rates, optional outputs, and parameters that share
// memory.
#include "tests/fuzz/extras_input.h"

namespace {

struct Muon {
  std::vector<tx_tensor> params, updates, masters, checksums, grads, momentums, scales, works, steps;
  std::vector<tx_meta> meta;
  std::vector<tx_muon_part> parts;
  std::vector<tx_muon_rate> rates;
  tx_muon_momentum_args momentum = TX_MUON_MOMENTUM_ARGS_INIT;
  tx_muon_update_args update = TX_MUON_UPDATE_ARGS_INIT;

  Muon(fuzz::Input *input, fuzz::Memory *memory) {
    const int64_t n = 1 + input->Below(3);
    for (int64_t i = 0; i < n; i++)
      Add(input, memory, i);
    momentum.seed = update.seed = static_cast<uint64_t>(input->I64());
    momentum.nesterov = static_cast<int32_t>(input->Below(2));
    momentum.moment_rounding = static_cast<int32_t>(input->Below(3));
    update.weight_rounding = static_cast<int32_t>(input->Below(3));
    update.on_external_write = static_cast<int32_t>(input->Below(3));
    update.resynced = memory->I64s(1);
    if (input->Odd(4)) momentum.grad_scale = memory->F32(static_cast<float>(input->F64()));
    if (input->Odd(4)) momentum.clip_coef = memory->F32(static_cast<float>(input->F64()));
    Lend(n);
  }

  std::vector<tx_tensor *> Tensors() {
    return fuzz::All({&params, &updates, &masters, &checksums, &grads, &momentums, &scales, &works, &steps});
  }

  void MakeNumbersOdd(fuzz::Input *input) {
    tx_muon_part *const part = parts.empty() ? nullptr : &parts[input->Below(static_cast<uint32_t>(parts.size()))];
    tx_muon_rate *const rate = parts.empty() ? nullptr : &rates[static_cast<size_t>(part - parts.data())];
    int32_t *const kCodes[] = {&momentum.moment_rounding, &momentum.nesterov, &update.weight_rounding,
                               &update.on_external_write};
    switch (input->Below(7)) {
      case 0:
        if (part) *(input->Odd(2) ? &part->tensor : &part->begin) = input->I64();
        break;
      case 1:
        if (rate) *(input->Odd(2) ? &rate->lr : &rate->decay) = input->F64();
        break;
      case 2:
        *input->Of(kCodes) = input->I32();
        break;
      case 3:
        momentum.momentum = input->F64();
        break;
      case 4:
        meta[0].start = input->I64();
        break;
      case 5:
        update.n_parts -= input->Odd(2) ? 1 + update.n_parts : 1;
        break;
      default:
        momentum.n = update.n = -1 - input->Byte();
    }
  }

 private:
  void Lend(int64_t n) {
    momentum.n = update.n = n;
    momentum.grads = grads.data();
    momentum.momentums = momentums.data();
    momentum.scales = scales.data();
    momentum.updates = works.data();
    momentum.steps = update.steps = steps.data();
    momentum.meta = update.meta = meta.data();
    update.params = params.data();
    update.updates = updates.data();
    update.masters = masters.data();
    update.checksums = checksums.data();
    update.n_parts = static_cast<int64_t>(parts.size());
    update.parts = parts.data();
    update.rates = rates.data();
  }

  void Add(fuzz::Input *input, fuzz::Memory *memory, int64_t i) {
    static const tx_dtype kMoments[] = {TX_BF16, TX_F32, TX_U8, TX_F16};
    static const tx_dtype kWide[] = {TX_BF16, TX_F32};
    static const tx_dtype kWeights[][2] = {{TX_BF16, TX_F32},  {TX_BF16, TX_I16}, {TX_F32, TX_NONE},
                                           {TX_BF16, TX_NONE}, {TX_F16, TX_F32},  {TX_F16, TX_NONE}};
    const int64_t numel = fuzz::Numel(input), misalign = input->Below(4);
    const auto &weight = kWeights[input->Below(6)];
    const tx_dtype moment = input->Of(kMoments), master = weight[1];
    params.push_back(memory->Take(numel, weight[0], misalign));
    updates.push_back(memory->Take(numel, input->Of(kWide), misalign));
    masters.push_back(master == TX_NONE ? fuzz::None() : memory->Take(numel, master, misalign));
    const bool checked = master != TX_NONE && input->Odd(2);
    const int64_t per = master == TX_I16 ? TX_CHECKSUM : TX_SAMPLED;
    checksums.push_back(checked ? memory->Take(fuzz::Blocks(numel, per), TX_I64) : fuzz::None());
    grads.push_back(memory->Take(numel, input->Of(fuzz::kPlain), misalign));
    momentums.push_back(memory->Take(numel, moment, misalign));
    const bool scaled = moment == TX_U8 || moment == TX_F16;
    scales.push_back(scaled ? memory->Take(fuzz::Blocks(numel), TX_U8) : fuzz::None());
    works.push_back(memory->Take(numel, input->Of(kWide), misalign));
    steps.push_back(memory->F32(input->Odd(16) ? static_cast<float>(input->F64()) : input->Byte()));
    meta.push_back({input->I64(), input->Odd(8) ? TX_BLOCK * static_cast<int64_t>(input->Byte()) : 0, 0});
    for (int64_t begin = 0; begin < numel && parts.size() < 12;) {
      parts.push_back({i, begin});
      rates.push_back({1e-2, 1e-3});
      begin += 1 + input->Below(2000);
    }
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  fuzz::Memory memory(&input);
  Muon call(&input, &memory);
  if (input.Odd(4)) fuzz::MakeOneOdd(&input, call.Tensors());
  if (input.Odd(4)) call.MakeNumbersOdd(&input);
  if (input.Odd(32) && call.params.size() > 1) {  // memory that would be written twice
    auto tensors = call.Tensors();
    *tensors[input.Below(static_cast<uint32_t>(tensors.size()))] = call.params[0];
  }
  const bool updates = input.Below(2) > 0;
  fuzz::Extras extras(&input, &memory, call.params, call.masters);
  extras.Lend(&call.update);
  fuzz::Operate(&input, &memory, [&](const tx_parallel *parallel, tx_error *error) {
    return updates ? tx_muon_update(&call.update, parallel, error) : tx_muon_momentum(&call.momentum, parallel, error);
  });
  return 0;
}
