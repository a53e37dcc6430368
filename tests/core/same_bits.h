// Checks "same inputs, same bits": a scenario has to write the same bytes on every instruction set of this processor,
// on 1, 2, 3 and 8 threads, and when the caller has set a flush-to-zero mode.
#ifndef TX_TESTS_CORE_SAME_BITS_H
#define TX_TESTS_CORE_SAME_BITS_H

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "csrc/torch_ext.h"
#include "tests/core/flush_mode.h"
#include "tests/core/threads.h"

#ifdef TX_SLOW
inline const std::vector<int64_t> kThreads = {3}; /* enough to find races; these builds are slow */
#else
inline const std::vector<int64_t> kThreads = {1, 2, 3, 8};
#endif

using Outputs = std::vector<std::vector<uint8_t>>;

// Makes a scenario's operator calls, either plainly or in flush mode. The scenario's inputs are made in the normal
// mode.
class Caller {
 public:
  explicit Caller(const tx_parallel *parallel, bool flush = false) : parallel_(parallel), flush_(flush) {}
  // call(parallel, error) calls the operator; it has to succeed.
  template <typename Call>
  void operator()(Call call) const {
    tx_error error = {};
    tx_status status = TX_OK;
    const auto run = [&] { status = call(parallel_, &error); };
    if (flush_) {
      CallInFlushMode(run);
    } else {
      run();
    }
    EXPECT_EQ(status, TX_OK) << error.message;
  }

 private:
  const tx_parallel *parallel_;
  bool flush_;
};

// run(caller) makes its own inputs, calls operators through the caller, and returns the bytes that they wrote.
template <typename Run>
void ExpectSameBits(Run run) {
  const std::string selected = tx_isa_selected();
  ASSERT_EQ(tx_isa_select(tx_isa_name(0), nullptr), TX_OK);
  const Outputs expected = run(Caller(nullptr));
  for (int32_t isa = 0; tx_isa_name(isa); isa++) {
    ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
    for (int64_t n_threads : kThreads) {
      Threads threads(n_threads);
      EXPECT_TRUE(run(Caller(threads.parallel())) == expected) << tx_isa_name(isa) << ", " << n_threads << " threads";
    }
    EXPECT_TRUE(run(Caller(nullptr, true)) == expected) << tx_isa_name(isa) << ", called in flush mode";
    Threads two(2); /* new threads inherit the mode */
    EXPECT_TRUE(run(Caller(two.parallel(), true)) == expected) << tx_isa_name(isa) << ", flush mode in two threads";
  }
  EXPECT_EQ(tx_isa_select(selected.c_str(), nullptr), TX_OK);
}

#endif
