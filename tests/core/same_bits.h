// "Same inputs, same bits": a scenario repeated on every instruction set that this processor has, on 1, 2, 3 and 8
// threads, and under a caller's flush-to-zero mode, must give the bytes of the first run.
#ifndef TX_TESTS_CORE_SAME_BITS_H
#define TX_TESTS_CORE_SAME_BITS_H

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "csrc/torch_ext.h"
#include "tests/core/flush_mode.h"
#include "tests/core/threads.h"

#ifdef TX_SLOW
inline const std::vector<int64_t> kThreads = {3}; /* races need no more, and everything is slow */
#else
inline const std::vector<int64_t> kThreads = {1, 2, 3, 8};
#endif

using Outputs = std::vector<std::vector<uint8_t>>;

// How a scenario makes its calls: as they are, or in a flush mode. Inputs are made outside of it.
class Caller {
 public:
  explicit Caller(const tx_parallel *parallel, bool flush = false) : parallel_(parallel), flush_(flush) {}
  // call(parallel, error) is the operator.
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

// run(caller) makes its own inputs, calls through the caller, and returns what was written.
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
