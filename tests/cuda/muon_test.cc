// tx_cuda_muon_momentum and tx_cuda_muon_update against the CPU's: every combination of dtypes, bit for bit.
#include "tests/cuda/both.h"

namespace {

// -- momentum --------------------------------------------------------------------------------------------------------

struct Momentum {
  std::vector<Array> grads, momentums, scales, works, steps;
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
      works.emplace_back(work, n, misalign);
      steps.push_back(Array(TX_F32, {static_cast<float>(n % 7)}));
      meta.push_back({n + 17, 128 * (n % 5), 0});
    }
  }
  const tx_muon_momentum_args *Args() {
    std::vector<Array> *const arrays[] = {&grads, &momentums, &scales, &works, &steps};
    for (size_t i = 0; i < std::size(arrays); i++)
      lists[i] = Tensors(*arrays[i]);
    args.n = static_cast<int64_t>(kSizes.size());
    args.grads = lists[0].data();
    args.momentums = lists[1].data();
    args.scales = lists[2].data();
    args.works = lists[3].data();
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
  for (const int64_t misalign : {0, 1, 2}) {
    for (const int32_t rounding : {TX_NEAREST, TX_DITHERED, TX_STOCHASTIC}) {
      for (const double decay : {0.95, 0.3}) {
        Momentum ours(grad, momentum, work, misalign), theirs(grad, momentum, work, misalign);
        for (Momentum *m : {&ours, &theirs}) {
          m->args.moment_rounding = rounding;
          m->args.momentum = decay;
          m->args.nesterov = misalign != 1;
        }
        Arrange(kGrids[static_cast<size_t>(misalign)]);
        for (int step = 0; step < 3; step++) {  // the last on gradients of any bits
          for (Momentum *m : {&ours, &theirs})
            for (size_t i = 0; step == 2 && i < m->grads.size(); i++)
              m->grads[i].FillBytes(static_cast<uint32_t>(i) + 9);
          if (step == 2 && grad == TX_F32) break;  // whose NaNs' payloads a GPU does not keep
          EXPECT_OK([&](tx_error *e) { return tx_cuda_muon_momentum(ours.Args(), Call(), e); });
          EXPECT_OK([&](tx_error *e) { return tx_muon_momentum(theirs.Args(), nullptr, e); });
          ExpectSameBytes(ours.momentums, theirs.momentums);
          ExpectSameBytes(ours.scales, theirs.scales);
          ExpectSameBytes(ours.works, theirs.works);
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

// -- update ----------------------------------------------------------------------------------------------------------

struct Weight {
  tx_dtype param, master;
};
const std::vector<Weight> kWeights = {{TX_F32, TX_NONE}, {TX_BF16, TX_NONE}, {TX_F16, TX_NONE},
                                      {TX_BF16, TX_F32}, {TX_F16, TX_F32},   {TX_BF16, TX_I16}};

struct Update {
  std::vector<Array> params, updates, masters, checksums, steps;
  AlignedCounts resynced{std::vector<int64_t>{0}};
  std::vector<tx_tensor> lists[5];
  std::vector<tx_meta> meta;
  std::vector<tx_muon_part> parts;
  std::vector<tx_muon_rate> rates;
  std::vector<int64_t> workspace;
  tx_cuda_call call = *Call();
  tx_muon_update_args args = TX_MUON_UPDATE_ARGS_INIT;

  Update(const Weight &w, tx_dtype update, int64_t misalign) {
    for (size_t t = 0; t < kSizes.size(); t++) {
      const int64_t n = kSizes[t], unit = w.master == TX_I16 ? TX_CHECKSUM : TX_SAMPLED;
      params.emplace_back(w.param, n, misalign).Fill(static_cast<uint32_t>(n) + 2, 0.1f);
      updates.emplace_back(update, n, misalign);
      masters.emplace_back(w.master == TX_NONE ? TX_F32 : w.master, w.master == TX_NONE ? 0 : n, misalign);
      checksums.emplace_back(TX_I64, w.master == TX_NONE ? 0 : (n + unit - 1) / unit, misalign);
      steps.push_back(Array(TX_F32, {static_cast<float>(n % 7)}));
      meta.push_back({n + 17, 128 * (n % 5), 0});
      for (int64_t i = 0; w.master == TX_F32 && i < n; i++)
        masters[t].Set(i, params[t].Get(i));
      int64_t last = -1;
      for (const int64_t begin : {int64_t{0}, n / 7, n / 2, n - 1}) {  // anywhere, in vectors and blocks, too
        if (begin <= last || begin >= n) continue;
        parts.push_back({static_cast<int64_t>(t), last = begin});
        rates.push_back({0.02 + 0.001 * static_cast<double>(parts.size()), 1e-3});
      }
    }
    workspace.resize(static_cast<size_t>(tx_cuda_workspace(static_cast<int64_t>(kSizes.size())) / 8));
    call.workspace = workspace.data();
    call.workspace_bytes = static_cast<int64_t>(workspace.size()) * 8;
  }
  const tx_muon_update_args *Args() {
    std::vector<Array> *const arrays[] = {&params, &updates, &masters, &checksums, &steps};
    for (size_t i = 0; i < std::size(arrays); i++)
      lists[i] = Tensors(*arrays[i]);
    args.n = static_cast<int64_t>(kSizes.size());
    args.params = lists[0].data();
    args.updates = lists[1].data();
    args.masters = lists[2].data();
    args.checksums = lists[3].data();
    args.steps = lists[4].data();
    args.meta = meta.data();
    args.n_parts = static_cast<int64_t>(parts.size());
    args.parts = parts.data();
    args.rates = rates.data();
    args.resynced = resynced.tensor();
    args.seed = 5;
    return &args;
  }
  // Somebody else writes to weights: to those of some tensors all of them, so that every sample shows it.
  void Spoil() {
    for (size_t t = 0; t < params.size(); t += 3)
      for (int64_t i = 0; i < params[t].size(); i++)
        params[t].Set(i, params[t].Get(i) + 0.25f);
  }
};

class EveryUpdate : public testing::TestWithParam<std::tuple<Weight, tx_dtype>> {};

TEST_P(EveryUpdate, EqualsTheCpuBitForBit) {
  const auto &[weight, update] = GetParam();
  for (const int64_t misalign : {0, 1, 2}) {
    for (const int32_t rounding : {TX_NEAREST, TX_DITHERED, TX_STOCHASTIC}) {
      for (const int32_t external : {TX_EXTERNAL_IGNORE, TX_EXTERNAL_RESYNC}) {
        Arrange(kGrids[static_cast<size_t>(misalign)]);
        Update ours(weight, update, misalign), theirs(weight, update, misalign);
        for (int step = 0; step < 3; step++) {
          for (Update *u : {&ours, &theirs}) {
            u->args.weight_rounding = rounding;
            u->args.on_external_write = step == 0 ? TX_EXTERNAL_IGNORE : external;  // the first makes checksums
            for (size_t i = 0; i < u->updates.size(); i++)
              u->updates[i].Fill(static_cast<uint32_t>(step) + static_cast<uint32_t>(i));
            if (step == 2) u->Spoil();
          }
          EXPECT_OK([&](tx_error *e) { return tx_cuda_muon_update(ours.Args(), &ours.call, e); });
          EXPECT_OK([&](tx_error *e) { return tx_muon_update(theirs.Args(), nullptr, e); });
          ExpectSameBytes(ours.params, theirs.params);
          ExpectSameBytes(ours.masters, theirs.masters);
          ExpectSameBytes(ours.checksums, theirs.checksums);
          ExpectSameBytes(ours.steps, theirs.steps);
          EXPECT_EQ(ours.resynced[0], theirs.resynced[0]);
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

// -- what is refused -------------------------------------------------------------------------------------------------

TEST(Muon, RefusesWhatTheCpuRefuses) {
  Arrange();
  Momentum m(TX_F32, TX_BF16, TX_F32, 0);
  m.args.momentum = 2.0;
  ExpectRefusedAlike([&](tx_error *e) { return tx_cuda_muon_momentum(m.Args(), Call(), e); },
                     [&](tx_error *e) { return tx_muon_momentum(m.Args(), nullptr, e); }, {&m.works[5]});
  Update u({TX_BF16, TX_F32}, TX_F32, 0);
  u.parts[0].begin = 1;
  ExpectRefusedAlike([&](tx_error *e) { return tx_cuda_muon_update(u.Args(), &u.call, e); },
                     [&](tx_error *e) { return tx_muon_update(u.Args(), nullptr, e); }, {&u.params[5]});
}

TEST(Muon, NamesWhatADeviceCannot) {
  Arrange();
  Update u({TX_BF16, TX_F32}, TX_F32, 0);
  std::vector<Array> emas;
  for (const int64_t n : kSizes)
    emas.emplace_back(TX_F32, n, 0);
  std::vector<tx_tensor> list = Tensors(emas);
  u.args.emas = list.data();
  const auto call = [&](tx_error *e) { return tx_cuda_muon_update(u.Args(), &u.call, e); };
  ExpectRefused(call, TX_ERROR_UNAVAILABLE, "no kernel for GPUs yet", {&u.params[5], &emas[5]});
  u.args.emas = nullptr;
  u.args.on_external_write = TX_EXTERNAL_RESYNC;
  u.call.workspace_bytes = 0;
  ExpectRefused(call, TX_ERROR_INVALID_ARGUMENT, "call.workspace has 0 bytes", {&u.params[5]});
}

TEST(Muon, LooksWithoutSteppingWhereThatIsAsked) {
  Arrange();
  Update u({TX_BF16, TX_I16}, TX_BF16, 0);
  const auto call = [&](tx_error *e) { return tx_cuda_muon_update(u.Args(), &u.call, e); };
  EXPECT_OK(call);  // makes checksums
  u.args.on_external_write = TX_EXTERNAL_CHECK;
  EXPECT_OK(call);
  u.Spoil();
  ExpectRefused(call, TX_ERROR_BAD_STATE, "params[3]", {&u.params[3], &u.masters[3]});
}

}  // namespace
