// Checks one call of a public function. A legal call succeeds. A call with an argument that is never legal fails with a
// message that names it. A call that fails changes no byte of its arguments. A call that succeeds leaves the same bytes
// on every instruction set and number of threads.
#ifndef TESTS_CORE_API_CHECK_H
#define TESTS_CORE_API_CHECK_H

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "tests/core/api_call.h"

namespace api {

struct Tally {
  int64_t taken = 0, refused = 0;
};

// A tx_parallel of n threads that runs all tasks on the calling thread, in reverse order.
inline tx_parallel Threads(int64_t n) {
  tx_parallel parallel = TX_PARALLEL_INIT;
  parallel.num_threads = n;
  parallel.run = [](void *, int64_t tasks, void (*task)(void *, int64_t), void *arg) {
    for (int64_t i = tasks; i-- > 0;)
      task(arg, i);
  };
  return parallel;
}

inline tx_status RunOnce(Call *call, bool alone, tx_error *error) {
  int32_t isas = 0;
  while (tx_isa_name(isas))
    isas++;
  EXPECT_EQ(tx_isa_select(tx_isa_name(alone ? 0 : isas - 1), nullptr), TX_OK);
  tx_parallel parallel = Threads(alone ? 1 : 4);
  call->parallel = &parallel;
  call->extra.clear();
  const tx_status status = call->run(error);
  call->ClearScratch();
  return status;
}

// Applies none, one or two of the call's changes; returns their description. *only: the change, if there is just one.
inline std::string Spoil(Call *call, const Change **only) {
  std::string text;
  const uint32_t many = call->changes.empty() ? 0 : static_cast<uint32_t>(call->random.Of({0, 1, 1, 1, 1, 2}));
  for (uint32_t i = 0; i < many; i++) {
    const Change &change = call->changes[call->random.Below(static_cast<uint32_t>(call->changes.size()))];
    change.make();
    text += change.names + ": " + change.what + "; ";
    *only = many == 1 ? &change : nullptr;
  }
  return text;
}

// Returns the violations of the call that this seed generates, or "".
inline std::string Check(const Function &function, uint32_t seed, Tally *tally) {
  Call call(seed);
  function.make(&call);
  const Change *only = nullptr;
  const std::string spoilt = Spoil(&call, &only);
  const bool must = only && only->must;
  const Call::Bytes before = call.Copy();
  tx_error error;
  std::memset(&error, 0x5a, sizeof error);
  const tx_status status = RunOnce(&call, call.random.OneIn(2), &error);
  const Call::Bytes after = call.Copy();
  const std::string extra = call.extra;
  const bool ends = std::memchr(error.message, 0, sizeof error.message) != nullptr;
  const std::string message = ends ? error.message : "";
  (status == TX_OK ? tally->taken : tally->refused)++;
  std::string wrong;
  const auto expect = [&](bool holds, const char *what) {
    if (!holds) wrong += std::string(what) + "; ";
  };
  expect(call.GuardsAreWhole(), "it writes outside of its arguments");
  expect(status == TX_OK || !spoilt.empty(), "a legal call is refused");
  expect(status != TX_OK || !must, "it is taken");
  expect(status != TX_OK || !ends, "it is taken, with a message");
  expect(status == TX_OK || !message.empty(), "it is refused without a message");
  expect(status == TX_OK || before == after, "it is refused, and something has changed");
  expect(status == TX_OK || !must || message.find(only->names) != std::string::npos,
         "the message names something else");
  call.Restore(before);
  expect(RunOnce(&call, call.random.OneIn(2), nullptr) == status, "another status without a buffer for a message");
  expect(call.HasNan() || (call.Copy() == after && call.extra == extra), "other bits the second time");
  if (wrong.empty()) return "";
  return std::string(function.name) + ", seed " + std::to_string(seed) + ", " + spoilt + "\n" + wrong + "\n" + message;
}

#ifdef TX_SLOW
inline constexpr uint32_t kShare = 4;
#else
inline constexpr uint32_t kShare = 1;
#endif

// Checks calls of `programs` seeds for each function. Environment: TX_API_PROGRAMS overrides the number of seeds,
// TX_API_FIRST the first seed (1).
inline void CheckAll(const std::vector<Function> &functions, uint32_t programs) {
  const char *asked = std::getenv("TX_API_PROGRAMS"), *from = std::getenv("TX_API_FIRST");
  const uint32_t first = from ? static_cast<uint32_t>(std::atol(from)) : 1;
  const uint32_t n = asked ? static_cast<uint32_t>(std::atol(asked)) : programs / kShare;
  for (const Function &function : functions) {
    Tally tally;
    std::string wrong;
    for (uint32_t seed = first; seed < first + n && wrong.empty(); seed++)
      wrong = Check(function, seed, &tally);
    EXPECT_EQ(wrong, "");
    EXPECT_GT(tally.taken, 0) << function.name;
  }
  EXPECT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

}  // namespace api

#endif
