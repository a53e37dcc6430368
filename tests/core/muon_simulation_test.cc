// Runs Muon's exchange of random matrices, with faults, on simulated ranks (tests/core/muon_world.h). A failure prints
// the program and the smallest one that still fails; `bazel run //tests/core:muon_hunt SEED SEED+1` repeats a seed.
#include <gtest/gtest.h>

#include <chrono>
#include <iostream>

#include "tests/core/muon_world.h"

using namespace muon_world;

namespace {

#ifdef TX_SLOW
constexpr uint64_t kPrograms = 3000;
#else
constexpr uint64_t kPrograms = 60000;
#endif

void RunOne(const Spec &spec, Coverage *coverage) {
  const std::string wrong = Run(spec, coverage);
  if (wrong.empty()) return;
  const Spec smaller = Shrink(spec);
  Coverage ignored;
  ADD_FAILURE() << wrong << "\n" << Text(spec) << "\nshrunk: " << Run(smaller, &ignored) << "\n" << Text(smaller);
}

TEST(MuonSimulation, ProgramsOfFixedSeedsAndOfFreshOnes) {
  Coverage coverage;
  const auto fresh = static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count()) >> 10;
  for (uint64_t k = 0; k < kPrograms && !HasFailure(); k++) {
    RunOne(Generate(k), &coverage);
    if (k % 4 == 0) RunOne(Generate(fresh + k), &coverage);
  }
  std::cout << coverage.programs << " programs: " << coverage.whole << " whole, " << coverage.refused
            << " of plans that differ, " << coverage.with_lost << " that lost a rank, " << coverage.with_failed
            << " with products that failed; " << coverage.multiplied << " matrices, " << coverage.stepped
            << " parts of parameters\n";
  for (size_t kind = 0; kind < coverage.actions.size(); kind++)
    EXPECT_GT(coverage.actions[kind], 0) << "action " << kind;
  for (int64_t of_kind : {coverage.whole, coverage.refused, coverage.with_lost, coverage.with_failed})
    EXPECT_GT(of_kind, coverage.programs / 100);
}

// The matrices of 24 layers with the shape ratios of three kinds of models, scaled down, over 16 to 128 ranks.
TEST(MuonSimulation, LargeWorlds) {
  const std::vector<std::pair<int64_t, int64_t>> kinds[] = {
      {{12, 4}, {4, 4}, {16, 4}, {4, 16}},
      {{8, 8}, {2, 8}, {2, 8}, {8, 8}, {24, 8}, {24, 8}, {8, 24}},
      {{6, 4}, {1, 4}, {8, 1}, {4, 4}, {3, 4}, {3, 4}, {4, 3}},
  };
#ifdef TX_SLOW
  const int64_t worlds[] = {16};
#else
  const int64_t worlds[] = {16, 64, 128};
#endif
  for (const auto &matrices : kinds) {
    for (int64_t world : worlds) {
      Spec spec;
      spec.seed = static_cast<uint64_t>(world);
      spec.world = world;
      for (int64_t layer = 0; layer < 24; layer++) {
        for (const auto &[rows, columns] : matrices) {
          Param p = {TX_BF16, {{rows, columns}}, {}};
          for (int64_t r = 1; r <= world; r++)
            p.ends.push_back(rows * columns * r / world);
          spec.params.push_back(p);
        }
      }
      Coverage coverage;
      int64_t elements = 0;
      for (const Param &p : spec.params)
        elements += p.ends.back();
      EXPECT_EQ(muon_world::Run(spec, &coverage), "") << world;
      EXPECT_EQ(coverage.multiplied, static_cast<int64_t>(spec.params.size()));
      EXPECT_LE(coverage.sent, 4 * elements) << "2 bytes to the owner and 2 back";
      EXPECT_GE(coverage.sent, 3 * elements) << "all but the owner's own part";
    }
  }
}

// Illegal arguments are rejected before anything is done.
TEST(MuonExchange, IllegalArguments) {
  const tx_muon_matrix matrices[] = {{0, 0, 2, 3, 0, TX_BF16, TX_BF16, 0}, {0, 6, 1, 3, 1, TX_BF16, TX_BF16, 0}};
  const tx_muon_run runs[] = {{0, 4}, {4, 9}};
  tx_muon_exchange_args legal = TX_MUON_EXCHANGE_ARGS_INIT;
  legal.n = 2;
  legal.matrices = matrices;
  legal.n_params = 1;
  legal.runs = runs;
  legal.world = 2;
  std::vector<int64_t> memory(static_cast<size_t>(tx_muon_exchange_bytes(&legal) / 8));
  tx_muon_exchange *machine = nullptr;
  tx_error error;
  ASSERT_EQ(tx_muon_exchange_init(memory.data(), &legal, &machine, &error), TX_OK) << error.message;
  EXPECT_EQ(tx_muon_exchange_matrix(machine, 0, 1), 1);
  EXPECT_EQ(tx_muon_exchange_matrix(machine, 1, 1), -1);

  const auto refused = [&](const tx_muon_exchange_args &args) {
    EXPECT_EQ(tx_muon_exchange_bytes(&args), 0);
    EXPECT_EQ(tx_muon_exchange_peak(&args, memory.data()), -1);
    return tx_muon_exchange_init(memory.data(), &args, &machine, &error) == TX_ERROR_INVALID_ARGUMENT;
  };
  const auto with = [&](auto change) {
    tx_muon_exchange_args args = legal;
    change(&args);
    return refused(args);
  };
  EXPECT_TRUE(with([](auto *a) { a->rank = 2; }));
  EXPECT_TRUE(with([](auto *a) { a->world = 0; }));
  EXPECT_TRUE(with([](auto *a) { a->n = -1; }));
  EXPECT_TRUE(with([](auto *a) { a->runs = nullptr; }));
  EXPECT_TRUE(with([](auto *a) { a->size = 0; }));
  EXPECT_TRUE(with([](auto *a) { a->n = 1; })) << "the ranks have more than the matrices";
  const auto with_matrix = [&](auto change) {
    std::vector<tx_muon_matrix> changed(matrices, matrices + 2);
    change(changed.data());
    return with([&](auto *a) { a->matrices = changed.data(); });
  };
  EXPECT_TRUE(with_matrix([](auto *m) { m[1].owner = 2; }));
  EXPECT_TRUE(with_matrix([](auto *m) { m[1].begin = 5; }));
  EXPECT_TRUE(with_matrix([](auto *m) { m[1].param = 1; }));
  EXPECT_TRUE(with_matrix([](auto *m) { m[1].wire_dtype = TX_F32; }));
  EXPECT_TRUE(with_matrix([](auto *m) { m[0].wire_dtype = TX_U8; }));
  EXPECT_TRUE(with_matrix([](auto *m) { m[0].rows = 0; }));
  EXPECT_TRUE(with_matrix([](auto *m) { m[0].rows = INT64_MAX / 2; }));
  EXPECT_NE(std::string(error.message).find("matrices[0]"), std::string::npos) << error.message;
  const tx_muon_run gap[] = {{0, 4}, {5, 9}};
  EXPECT_TRUE(with([&](auto *a) { a->runs = gap; }));
  EXPECT_EQ(tx_muon_exchange_init(nullptr, &legal, &machine, &error), TX_ERROR_INVALID_ARGUMENT);
}

// Plans with equal costs but different matrices or parameters have different fingerprints.
TEST(MuonExchange, FingerprintTellsPlansApart) {
  tx_muon_matrix m[] = {{0, 0, 2, 3, 0, TX_BF16, TX_BF16, 0}, {1, 0, 2, 3, 1, TX_BF16, TX_BF16, 0}};
  const int64_t ids[] = {5, 6}, others[] = {5, 7};
  const int64_t one = tx_muon_fingerprint(9, 2, m, ids);
  EXPECT_EQ(one, tx_muon_fingerprint(9, 2, m, ids));
  EXPECT_NE(one, tx_muon_fingerprint(9, 2, m, others));
  EXPECT_NE(one, tx_muon_fingerprint(8, 2, m, ids));
  std::swap(m[1].rows, m[1].columns);
  EXPECT_NE(one, tx_muon_fingerprint(9, 2, m, ids));
}

}  // namespace
