// What tx_muon_momentum, tx_muon_update and tx_muon_check_group refuse.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "csrc/torch_ext.h"
#include "tests/core/expect_refused.h"
#include "tests/core/muon_calls.h"

namespace {

TEST(Refused, OutputsThatAreNotLegal) {
  tx_error error = {};
  Update alone(TX_BF16, TX_NONE, TX_F32);
  alone.Ask(TX_F32);
  ExpectRefused(tx_muon_update(alone.ArgsWithOutputs(), nullptr, &error), TX_ERROR_DTYPE, error, "emas[0]");
  Update decay(TX_F32, TX_NONE, TX_F32);
  decay.Ask(TX_F32);
  decay.args.ema_decay = 1.0;
  ExpectRefused(tx_muon_update(decay.ArgsWithOutputs(), nullptr, &error), TX_ERROR_ILLEGAL_VALUE, error, "ema_decay");
  Update few(TX_F32, TX_NONE, TX_F32);
  few.Ask(TX_F32);
  few.changed.tensors[2].numel--;
  ExpectRefused(tx_muon_update(few.ArgsWithOutputs(), nullptr, &error), TX_ERROR_SHAPE, error, "changed[2]");
}

TEST(Refused, PartsThatAreNoMatrices) {
  const std::vector<std::vector<tx_muon_part>> wrong = {
      {}, {{0, 0}, {1, 1}}, {{0, 0}, {1, 0}, {1, 0}}, {{0, 0}, {1, 0}, {2, 5000}}, {{1, 0}, {0, 0}}, {{7, 0}}};
  for (const std::vector<tx_muon_part> &parts : wrong) {
    Update u(TX_F32, TX_NONE, TX_F32);
    u.parts = parts;
    const Update before = u;
    tx_error error = {};
    ExpectRefused(tx_muon_update(u.Args(), nullptr, &error), TX_ERROR_SHAPE, error, "parts");
    EXPECT_TRUE(u.Written() == before.Written());
  }
}

const tx_meta kNegative[] = {{}, {.start = -1}, {}, {}, {}};

TEST(Refused, NumbersAndDtypes) {
  tx_error error = {};
  for (double momentum : {-0.1, 1.1, std::nan("")}) {
    Momentum m(TX_F32, TX_F32, TX_F32);
    m.args.momentum = momentum;
    ExpectRefused(tx_muon_momentum(m.Args(), nullptr, &error), TX_ERROR_ILLEGAL_VALUE, error, "momentum");
  }
  const struct {
    tx_status status;
    const char *word;
    std::function<void(Momentum *)> change; /* changes legal arguments, after the pointers were set */
  } momenta[] = {
      {TX_ERROR_INVALID_ARGUMENT, "args.size", [](Momentum *m) { m->args.size = 8; }},
      {TX_ERROR_ILLEGAL_VALUE, "nesterov is 2", [](Momentum *m) { m->args.nesterov = 2; }},
      {TX_ERROR_SHAPE, "steps[1]", [](Momentum *m) { m->steps.tensors[1].numel = 2; }},
      {TX_ERROR_SHAPE, "steps[1]", [](Momentum *m) { m->steps.tensors[1].dtype = TX_I64; }},
      {TX_ERROR_DTYPE, "momentums[1]", [](Momentum *m) { m->momentums.tensors[1].dtype = TX_I16; }},
      {TX_ERROR_SHAPE, "scales[1]", [](Momentum *m) { m->scales.tensors[1].numel = 1; }},
      {TX_ERROR_SHAPE, "scales[1]", [](Momentum *m) { m->scales.tensors[1].dtype = TX_I16; }},
      {TX_ERROR_ILLEGAL_VALUE, "meta[1]", [](Momentum *m) { m->args.meta = kNegative; }},
  };
  for (const auto &c : momenta) {
    Momentum m(TX_F32, TX_U8, TX_F32);
    m.Args();
    c.change(&m);
    ExpectRefused(tx_muon_momentum(&m.args, nullptr, &error), c.status, error, c.word);
  }
  ExpectRefused(tx_muon_momentum(nullptr, nullptr, &error), TX_ERROR_INVALID_ARGUMENT, error, "args.size");
  ExpectRefused(tx_muon_update(nullptr, nullptr, &error), TX_ERROR_INVALID_ARGUMENT, error, "args.size");
  Momentum half(TX_F32, TX_F32, TX_F16);
  ExpectRefused(tx_muon_momentum(half.Args(), nullptr, &error), TX_ERROR_DTYPE, error, "updates[0]");
  Update mixed(TX_BF16, TX_F32, TX_F32);
  mixed.params.tensors[1].dtype = TX_F32;
  mixed.params.memory[1].resize(4 * 130 + 8);
  ExpectRefused(tx_muon_update(mixed.Args(), nullptr, &error), TX_ERROR_DTYPE, error, "params[1]");
  const struct {
    tx_status status;
    const char *word;
    std::function<void(Update *)> change;
  } updates[] = {
      {TX_ERROR_INVALID_ARGUMENT, "args.size", [](Update *u) { u->args.size = 8; }},
      {TX_ERROR_SHAPE, "masters[1]", [](Update *u) { u->masters.tensors[1].numel = 3; }},
      {TX_ERROR_DTYPE, "params[1]", [](Update *u) { u->params.tensors[1].dtype = TX_F32; }},
      {TX_ERROR_SHAPE, "parts", [](Update *u) { u->args.parts = nullptr; }},
      {TX_ERROR_SHAPE, "parts", [](Update *u) { u->args.n_parts = -1; }},
      {TX_ERROR_INVALID_ARGUMENT, "rates is NULL", [](Update *u) { u->args.rates = nullptr; }},
      {TX_ERROR_ILLEGAL_VALUE, "rates[2]", [](Update *u) { u->rates[2].decay = -1; }},
      {TX_ERROR_SHAPE, "is of tensor 9", [](Update *u) { u->parts.back().tensor = 9; }},
  };
  for (const auto &c : updates) {
    Update u(TX_BF16, TX_I16, TX_F32);
    u.Args();
    c.change(&u);
    ExpectRefused(tx_muon_update(&u.args, nullptr, &error), c.status, error, c.word);
  }
  Update rate(TX_F32, TX_NONE, TX_F32);
  rate.rates[2].lr = std::nan("");
  ExpectRefused(tx_muon_update(rate.Args(), nullptr, &error), TX_ERROR_ILLEGAL_VALUE, error, "rates[2]");
}

TEST(Refused, HyperParameters) {
  const tx_muon_group legal = {0.02, 0.1, 0.95, 3.4445, -4.7750, 2.0315, 1e-7, 5};
  tx_error error = {};
  EXPECT_EQ(tx_muon_check_group(&legal, "group 0: ", &error), TX_OK) << error.message;
  const struct {
    const char *word;
    tx_muon_group group;
  } wrong[] = {
      {"lr", {-1, 0.1, 0.95, 3.4445, -4.7750, 2.0315, 1e-7, 5}},
      {"weight_decay", {1, INFINITY, 0.95, 3.4445, -4.7750, 2.0315, 1e-7, 5}},
      {"momentum", {1, 0.1, 1.5, 3.4445, -4.7750, 2.0315, 1e-7, 5}},
      {"eps", {1, 0.1, 0.95, 3.4445, -4.7750, 2.0315, NAN, 5}},
      {"ns_steps", {1, 0.1, 0.95, 3.4445, -4.7750, 2.0315, 1e-7, 100}},
      {"ns_steps", {1, 0.1, 0.95, 3.4445, -4.7750, 2.0315, 1e-7, 0}},
      {"ns_coefficients", {1, 0.1, 0.95, 30.0, 4.7750, 2.0315, 1e-7, 5}},
      {"ns_coefficients", {1, 0.1, 0.95, NAN, 4.7750, 2.0315, 1e-7, 5}},
  };
  for (const auto &w : wrong)
    ExpectRefused(tx_muon_check_group(&w.group, "group 3: ", &error), TX_ERROR_ILLEGAL_VALUE, error,
                  (std::string("group 3: ") + w.word).c_str());
}

}  // namespace
