// A tx_parallel made of std::thread, for tests.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "csrc/torch_ext.h"

class Threads {
 public:
  explicit Threads(int64_t n) : parallel_{sizeof(tx_parallel), n, this, &Threads::Run} {}
  const tx_parallel *parallel() const { return &parallel_; }

 private:
  static void Run(void *ctx, int64_t n, void (*task)(void *arg, int64_t i), void *arg) {
    const int64_t count = static_cast<Threads *>(ctx)->parallel_.num_threads;
    std::atomic<int64_t> next{0};
    std::vector<std::thread> threads;
    for (int64_t t = 0; t < count; t++) {
      threads.emplace_back([&] {
        for (int64_t i = next++; i < n; i = next++)
          task(arg, i);
      });
    }
    for (std::thread &thread : threads)
      thread.join();
  }
  tx_parallel parallel_;
};
