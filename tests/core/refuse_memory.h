// Replaces malloc in a test program, so that the n-th memory request of the library fails. Include it in only one
// source file of a program. Does not work under sanitizers, which have allocators of their own.
#ifndef TX_TESTS_CORE_REFUSE_MEMORY_H
#define TX_TESTS_CORE_REFUSE_MEMORY_H

#include <cstddef>
#include <cstdint>

#include "csrc/torch_ext.h"

namespace refuse_memory {

inline int64_t allowed = -1; /* requests that succeed before one fails; -1: none fails */

extern "C" const char __executable_start, etext;

// Whether a request for memory has to fail. Only requests from this program's own code count, which includes the
// library; requests from libc and other shared objects do not.
inline bool Refuses(const void *caller) {
  const auto *at = static_cast<const char *>(caller);
  return allowed >= 0 && at >= &__executable_start && at < &etext && allowed-- == 0;
}

// Makes one call of the library whose memory request number `failing` (from 0) fails. `failed` tells whether the call
// made that many requests.
struct Attempt {
  int64_t failing = -1;
  bool failed = false;
  tx_parallel parallel = TX_PARALLEL_INIT;

  explicit Attempt(int64_t failing, int64_t threads = 1) : failing(failing) {
    parallel.num_threads = threads;
    parallel.run = [](void *, int64_t n, void (*task)(void *, int64_t), void *arg) {
      for (int64_t i = 0; i < n; i++)
        task(arg, i);
    };
  }
  template <typename Function>
  tx_status operator()(Function function) {
    allowed = failing;
    const tx_status status = function(&parallel);
    failed = failing >= 0 && allowed < 0;
    allowed = -1;
    return status;
  }
};

}  // namespace refuse_memory

extern "C" {
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);
void *malloc(size_t bytes) {
  return refuse_memory::Refuses(__builtin_return_address(0)) ? nullptr : __libc_malloc(bytes);
}
void *calloc(size_t n, size_t bytes) {
  return refuse_memory::Refuses(__builtin_return_address(0)) ? nullptr : __libc_calloc(n, bytes);
}
void *realloc(void *memory, size_t bytes) {
  return refuse_memory::Refuses(__builtin_return_address(0)) ? nullptr : __libc_realloc(memory, bytes);
}
}

#endif
