// A test's own malloc, which refuses the library's n-th request for memory. For one source of a program; not under
// sanitizers, which have allocators of their own.
#ifndef TX_TESTS_CORE_REFUSE_MEMORY_H
#define TX_TESTS_CORE_REFUSE_MEMORY_H

#include <cstddef>
#include <cstdint>

#include "csrc/torch_ext.h"

namespace refuse_memory {

inline int64_t allowed = -1; /* requests before the one that is refused; -1: none is */

extern "C" const char __executable_start, etext;

// Whether the one who asks is in this program, as the library is, and not in libc or another shared object.
inline bool Refuses(const void *caller) {
  const auto *at = static_cast<const char *>(caller);
  return allowed >= 0 && at >= &__executable_start && at < &etext && allowed-- == 0;
}

// How the library is called: its request number `failing` is refused, if it makes so many.
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
