// tx_cuda_muon_momentum and tx_cuda_muon_update must have the CPU's bits, for every combination of dtypes.
#include "tests/cuda/muon_update_pair.h"

namespace {

// -- momentum ---------------------------------------------------------------------------------------------------------

struct Momentum {
  std::vector<Array> grads, momentums, scales, updates, steps;
  Array grad_scale{TX_F32, {8.0f}}, clip_coef{TX_F32, {0.7f}};
  std::vector<tx_tensor> lists[5];
  std::vector<tx_meta> meta;
  tx_muon_momentum_args args = TX_MUON_MOMENTUM_ARGS_INIT;

  Momentum(tx_dtype grad, tx_dtype momentum, tx_dtype work, int64_t misalign) {
    const bool scaled = momentum == TX_U8 || momentum == TX_F16;
    for (const int64_t n : kSizes) {
      grads.emplace_back(grad, n, misalign).Fill(static_cast<uint32_t>(n) + 1, 1e-2f);
      momentums.emplace_back(momentum, n, misalign);
      scales.emplace_back(TX_U8, scaled ? tx_blocks(n) : 0, misalign);
      updates.emplace_back(work, n, misalign);
      steps.push_back(Array(TX_F32, {static_cast<float>(n % 7)}));
      meta.push_back({n + 17, 128 * (n % 5), 0});
    }
  }
  const tx_muon_momentum_args *Args() {
    std::vector<Array> *const arrays[] = {&grads, &momentums, &scales, &updates, &steps};
    for (size_t i = 0; i < std::size(arrays); i++)
      lists[i] = Tensors(*arrays[i]);
    args.n = static_cast<int64_t>(kSizes.size());
    args.grads = lists[0].data();
    args.momentums = lists[1].data();
    args.scales = lists[2].data();
    args.updates = lists[3].data();
    args.steps = lists[4].data();
    args.meta = meta.data();
    args.grad_scale = grad_scale.tensor();
    args.clip_coef = clip_coef.tensor();
    args.seed = 5;
    return &args;
  }
};

using MomentumDtypes = std::tuple<tx_dtype, tx_dtype, tx_dtype>;
class EveryMomentum : public testing::TestWithParam<MomentumDtypes> {};

TEST_P(EveryMomentum, EqualsTheCpuBitForBit) {
  const auto &[grad, momentum, work] = GetParam();
  for (const int64_t misalign : kMisaligned) {
    for (const int32_t rounding : {TX_NEAREST, TX_DITHERED, TX_STOCHASTIC}) {
      for (const double decay : {0.95, 0.3}) {
        Momentum ours(grad, momentum, work, misalign), theirs(grad, momentum, work, misalign);
        for (Momentum *m : {&ours, &theirs}) {
          m->args.moment_rounding = rounding;
          m->args.momentum = decay;
          m->args.nesterov = misalign != 1;
        }
        Arrange(kGrids[static_cast<size_t>(misalign)]);
        for (int step = 0; step < 3; step++) {  // the last step has gradients of any bits
          for (Momentum *m : {&ours, &theirs})
            for (size_t i = 0; step == 2 && i < m->grads.size(); i++)
              m->grads[i].FillBytes(static_cast<uint32_t>(i) + 9);
          if (step == 2 && grad == TX_F32) break;  // a GPU does not keep the payloads of fp32 NaNs
          EXPECT_OK([&](tx_error *e) { return tx_cuda_muon_momentum(ours.Args(), Call(), e); });
          EXPECT_OK([&](tx_error *e) { return tx_muon_momentum(theirs.Args(), nullptr, e); });
          ExpectSameBytes(ours.momentums, theirs.momentums);
          ExpectSameBytes(ours.scales, theirs.scales);
          ExpectSameBytes(ours.updates, theirs.updates);
          ExpectSameBytes(ours.steps, theirs.steps);
          if (HasFailure()) return;
        }
        EXPECT_EQ(emulated::world.synchronisations, 0);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, EveryMomentum,
                         testing::Combine(testing::ValuesIn(kPlain), testing::Values(TX_F32, TX_BF16, TX_F16, TX_U8),
                                          testing::Values(TX_F32, TX_BF16)),
                         [](const auto &c) {
                           return DtypeName(std::get<0>(c.param)) + "_" + DtypeName(std::get<1>(c.param)) + "_" +
                                  DtypeName(std::get<2>(c.param));
                         });

// -- update -----------------------------------------------------------------------------------------------------------

class EveryUpdate : public testing::TestWithParam<std::tuple<Weight, tx_dtype>> {};

TEST_P(EveryUpdate, EqualsTheCpuBitForBit) {
  const auto &[weight, update] = GetParam();
  for (const int64_t misalign : kMisaligned) {
    for (const int32_t rounding : {TX_NEAREST, TX_DITHERED, TX_STOCHASTIC}) {
      for (const int32_t external : {TX_EXTERNAL_IGNORE, TX_EXTERNAL_RESYNC}) {
        Arrange(kGrids[static_cast<size_t>(misalign)]);
        Update ours(weight, update, misalign), theirs(weight, update, misalign);
        for (int step = 0; step < 3; step++) {
          for (Update *u : {&ours, &theirs}) {
            u->args.weight_rounding = rounding;
            // The first step makes the checksums.
            u->args.on_external_write = step == 0 ? TX_EXTERNAL_IGNORE : external;
            for (size_t i = 0; i < u->updates.size(); i++)
              u->updates[i].Fill(static_cast<uint32_t>(step) + static_cast<uint32_t>(i));
            if (step == 2) u->Spoil();
          }
          EXPECT_OK([&](tx_error *e) { return tx_cuda_muon_update(ours.Args(), &ours.call, e); });
          EXPECT_OK([&](tx_error *e) { return tx_muon_update(theirs.Args(), nullptr, e); });
          ExpectSameUpdates(ours, theirs);
          if (HasFailure()) return;
        }
        const bool takes_over = weight.master != TX_NONE && external == TX_EXTERNAL_RESYNC;
        EXPECT_EQ(ours.resynced[0] > 0, takes_over);
        EXPECT_EQ(emulated::world.synchronisations, 0);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, EveryUpdate, testing::Combine(testing::ValuesIn(kWeights), testing::Values(TX_F32, TX_BF16)),
                         [](const auto &c) {
                           const Weight &w = std::get<0>(c.param);
                           return DtypeName(w.param) + "_" + DtypeName(w.master) + "_" +
                                  DtypeName(std::get<1>(c.param));
                         });

// -- rejected calls ---------------------------------------------------------------------------------------------------

TEST(Muon, RefusesWhatTheCpuRefuses) {
  Arrange();
  Momentum m(TX_F32, TX_BF16, TX_F32, 0);
  m.args.momentum = 2.0;
  ExpectRefusedAlike([&](tx_error *e) { return tx_cuda_muon_momentum(m.Args(), Call(), e); },
                     [&](tx_error *e) { return tx_muon_momentum(m.Args(), nullptr, e); }, {&m.updates[5]});
  Update u({TX_BF16, TX_F32}, TX_F32, 0);
  u.parts[0].begin = 1;
  ExpectRefusedAlike([&](tx_error *e) { return tx_cuda_muon_update(u.Args(), &u.call, e); },
                     [&](tx_error *e) { return tx_muon_update(u.Args(), nullptr, e); }, {&u.params[5]});
}

TEST(Muon, NamesTheWorkspaceItNeeds) {
  Arrange();
  Update u({TX_BF16, TX_F32}, TX_F32, 0);
  const auto call = [&](tx_error *e) { return tx_cuda_muon_update(u.Args(), &u.call, e); };
  u.args.on_external_write = TX_EXTERNAL_RESYNC;
  u.call.workspace_bytes = 0;
  ExpectRefused(call, TX_ERROR_INVALID_ARGUMENT, "call.workspace has 0 bytes", {&u.params[5]});
}

TEST(Muon, LooksWithoutSteppingWhereThatIsAsked) {
  Arrange();
  Update u({TX_BF16, TX_I16}, TX_BF16, 0);
  const auto call = [&](tx_error *e) { return tx_cuda_muon_update(u.Args(), &u.call, e); };
  EXPECT_OK(call);  // makes the checksums
  u.args.on_external_write = TX_EXTERNAL_CHECK;
  EXPECT_OK(call);
  u.Spoil();
  ExpectRefused(call, TX_ERROR_BAD_STATE, "params[3]", {&u.params[3], &u.masters[3]});
}

}  // namespace
