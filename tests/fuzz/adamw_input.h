// Builds calls of the step from the fuzzer's bytes.
#ifndef TESTS_FUZZ_ADAMW_INPUT_H
#define TESTS_FUZZ_ADAMW_INPUT_H

#include "tests/core/adamw_lists.h"
#include "tests/fuzz/operate.h"

namespace fuzz {

struct Adamw : AdamwLists {
  std::vector<tx_tensor> lrs;
  std::vector<tx_adamw_group> groups;
  tx_adamw_args args = TX_ADAMW_ARGS_INIT;

  Adamw(Input *input, Memory *memory) {
    const uint32_t n = 1 + input->Below(3), n_groups = 1 + input->Below(2);
    for (uint32_t g = 0; g < n_groups; g++) {
      groups.push_back({1e-2, 0.9, 0.999, 1e-8, 0.1, 0, 1});
      if (input->Odd(4)) groups.back().decoupled = 0;
      if (input->Odd(4)) groups.back().maximize = 1;
      lrs.push_back(memory->F32(1e-3f));
    }
    for (uint32_t i = 0; i < n; i++)
      Add(input, memory, n_groups);
    if (input->Odd(4)) args.grad_scale = memory->F32(static_cast<float>(input->F64()));
    if (input->Odd(4)) args.clip_coef = memory->F32(static_cast<float>(input->F64()));
    args.skipped = memory->I64s(1);
    args.resynced = memory->I64s(1);
    args.found_inf = memory->F32(input->Odd(8) ? static_cast<float>(input->F64()) : 0.0f);
    args.seed = static_cast<uint64_t>(input->I64());
    args.on_external_write = static_cast<int32_t>(input->Below(3));
    args.moment_rounding = static_cast<int32_t>(input->Below(3));
    args.weight_rounding = static_cast<int32_t>(input->Below(3));
  }
  void MakeNumbersOdd(Input *input) {
    tx_adamw_group *group = &groups[input->Below(static_cast<uint32_t>(groups.size()))];
    double *const kNumbers[] = {&group->lr,           &group->beta1,    &group->beta2,    &group->eps,
                                &group->weight_decay, &group->maximize, &group->decoupled};
    int32_t *const kCodes[] = {&args.moment_rounding, &args.weight_rounding, &args.on_external_write};
    switch (input->Below(5)) {
      case 0:
        *input->Of(kNumbers) = input->F64();
        break;
      case 1:
        *input->Of(kCodes) = input->I32();
        break;
      case 2:
        meta[0].start = input->I64();
        break;
      case 3:
        meta[0].group = input->I64();
        break;
      default:
        MakeOneOdd(input, {&args.skipped, &args.resynced, &args.found_inf, &args.grad_scale, &args.clip_coef, &lrs[0]});
    }
  }
  const tx_adamw_args *Args(Input *input) {
    Lend(&args);
    if (input->Odd(64)) args.n = -1 - input->Byte();
    args.n_groups = input->Odd(64) ? -1 - input->Byte() : static_cast<int64_t>(groups.size());
    args.checksums = input->Odd(2) ? checksums.data() : nullptr;
    args.groups = groups.data();
    args.lrs = input->Odd(4) ? lrs.data() : nullptr;
    if (input->Odd(8)) args.meta = nullptr;
    if (input->Odd(128)) args.size = static_cast<uint64_t>(input->I64());
    return &args;
  }

 private:
  void Add(Input *input, Memory *memory, uint32_t n_groups) {
    static const tx_dtype kMoments[] = {TX_BF16, TX_F32, TX_U8, TX_F16};
    static const tx_dtype kWeights[][2] = {{TX_BF16, TX_F32},  {TX_BF16, TX_I16}, {TX_F32, TX_NONE},
                                           {TX_BF16, TX_NONE}, {TX_F16, TX_F32},  {TX_F16, TX_NONE}};
    const int64_t n = Numel(input), misalign = input->Below(4);
    const auto &weight = kWeights[input->Below(6)];
    const tx_dtype moments[] = {input->Of(kMoments), input->Of(kMoments)};
    const tx_dtype master = weight[1];
    params.push_back(memory->Take(n, weight[0], misalign));
    grads.push_back(memory->Take(n, input->Of(kPlain), misalign));
    exp_avgs.push_back(memory->Take(n, moments[0], misalign));
    exp_avg_sqs.push_back(memory->Take(n, moments[1], misalign));
    masters.push_back(master == TX_NONE ? None() : memory->Take(n, master, misalign));
    const int64_t scaled =
        (moments[0] == TX_U8 || moments[0] == TX_F16) + (moments[1] == TX_U8 || moments[1] == TX_F16);
    scales.push_back(scaled ? memory->Take(scaled * Blocks(n), TX_U8) : None());
    const int64_t per = master == TX_I16 ? TX_CHECKSUM : TX_SAMPLED;
    const bool checked = master != TX_NONE && input->Odd(2);
    checksums.push_back(checked ? memory->Take(Blocks(n, per), TX_I64) : None());
    if (checked && !input->Odd(4)) {
      (void)tx_master_checksum(1, &params.back(), &masters.back(), &checksums.back(), TX_CHECKSUM_RENEW, None(),
                               nullptr, nullptr);
    }
    steps.push_back(memory->F32(input->Odd(16) ? static_cast<float>(input->F64()) : input->Byte()));
    meta.push_back({input->I64(), input->Odd(8) ? TX_BLOCK * static_cast<int64_t>(input->Byte()) : 0,
                    static_cast<int64_t>(input->Below(n_groups))});
  }
};

}  // namespace fuzz

#endif
