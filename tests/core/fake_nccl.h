// Loads the fake libnccl.so.2 (fake_nccl.cc) in one of its variants, and reads its counters.
#ifndef TX_FAKE_NCCL_H
#define TX_FAKE_NCCL_H

#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "gtest/gtest.h"

// Returns the path of a variant: "fake_nccl.so" (2.28.9), "fake_nccl_plain.so" (2.21.5: no windows), "fake_nccl_old.so"
// (2.18.3), "fake_nccl_lacking.so" (without ncclCommFinalize), "libnccl.so.2" (2.28.9, under NCCL's own name).
inline std::string fake_nccl_path(const std::string &file) {
  const char *folder = std::getenv("TX_FAKE_NCCL");  // set when the test is not run by Bazel
  return std::string(folder ? folder : "./tests/core") + "/" + file;
}

struct FakeNccl {
  explicit FakeNccl(const std::string &file = "fake_nccl.so")
      : path(fake_nccl_path(file)), handle(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (!handle) {
      ADD_FAILURE() << dlerror();
      std::abort();
    }
    call<void>("fake_nccl_reset");
  }
  ~FakeNccl() { dlclose(handle); }
  FakeNccl(const FakeNccl &) = delete;

  template <class R, class... A>
  R call(const char *name, A... arguments) const {
    return reinterpret_cast<R (*)(A...)>(dlsym(handle, name))(arguments...);
  }
  struct Counts {
    int aborts, destroys, finalizes, windows, memories, groups;
  };
  Counts counts() const {
    Counts found;
    call<void>("fake_nccl_counts", reinterpret_cast<int *>(&found));
    return found;
  }

  std::string path;
  void *handle;
};

#endif
