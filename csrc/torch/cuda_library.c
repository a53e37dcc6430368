#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* dladdr, PATH_MAX */
#endif
#include "csrc/torch/cuda_library.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "csrc/core/status.h"

#define TX_CUDA_LIBRARY "libtorch_ext_cuda.so"
#define TX_CUDA_LIBRARY_VARIABLE "TORCH_EXT_CUDA_LIBRARY"

/* Folders to search, relative to this library: in a wheel, and with Bazel, where each package has its own folder. */
static const char *const kFolders[] = {"", "cuda/"};
#define TX_N_FOLDERS ((int)(sizeof kFolders / sizeof *kFolders))

static const struct {
  const char *name;
  size_t slot; /* offset of the pointer in tx_cuda_library */
} kFunctions[] = {
#define TX_ENTRY_HOST(entry, parameters, arguments)
#define TX_ENTRY(entry, parameters, arguments) {"tx_cuda_" #entry, offsetof(tx_cuda_library, entry)},
#include "csrc/torch/entries.def"
    {"tx_cuda_workspace", offsetof(tx_cuda_library, workspace)},
};
#define TX_N_FUNCTIONS (sizeof kFunctions / sizeof *kFunctions)

/* Written once, under the mutex; only read afterwards. */
static struct {
  bool ready;
  char path[PATH_MAX];
  tx_cuda_library library;
} loaded;

/* The folder from which this library was loaded, symbolic links not followed, with a slash at the end. */
static void own_folder(char *folder, size_t size) {
  Dl_info info;
  folder[0] = '\0';
  if (!dladdr(&loaded, &info) || !info.dli_fname) return;
  const char *slash = strrchr(info.dli_fname, '/');
  const size_t length = slash ? (size_t)(slash - info.dli_fname) + 1 : 0;
  if (length >= size) return;
  memcpy(folder, info.dli_fname, length);
  folder[length] = '\0';
}

/* Finds the file to load: the one that the environment variable names, or the first that exists. */
static tx_status find(char *path, size_t size, tx_error *error) {
  const char *named = getenv(TX_CUDA_LIBRARY_VARIABLE);
  char folder[PATH_MAX];
  if (named && *named) {
    if (snprintf(path, size, "%s", named) < (int)size && access(path, R_OK) == 0) return TX_OK;
    return tx_fail(error, TX_ERROR_UNAVAILABLE, "%s names %s, which cannot be read", TX_CUDA_LIBRARY_VARIABLE, named);
  }
  own_folder(folder, sizeof folder);
  for (int i = 0; i < TX_N_FOLDERS; i++) {
    if (snprintf(path, size, "%s%s%s", folder, kFolders[i], TX_CUDA_LIBRARY) < (int)size && access(path, R_OK) == 0)
      return TX_OK;
  }
  return tx_fail(error, TX_ERROR_UNAVAILABLE,
                 "this build has no CUDA library: no %s in %s nor in its folder cuda. Build it where nvcc is (bazel "
                 "build //cuda:%s), install a wheel that was built there, or name it in %s",
                 TX_CUDA_LIBRARY, *folder ? folder : "this library's folder", TX_CUDA_LIBRARY,
                 TX_CUDA_LIBRARY_VARIABLE);
}

static tx_status no_function(const char *path, const char *name, tx_error *error) {
  return tx_fail(error, TX_ERROR_UNAVAILABLE, "%s has no function %s: is it this library's? Build both from one source",
                 path, name);
}

/* Checked before functions are looked up: those of another version may be missing, or mean something else. */
static tx_status check_version(void *handle, const char *path, tx_error *error) {
  __typeof__(tx_cuda_version) *version_of = NULL;
  void *symbol = dlsym(handle, "tx_cuda_version");
  if (!symbol) return no_function(path, "tx_cuda_version", error);
  memcpy(&version_of, &symbol, sizeof symbol); /* ISO C has no cast from object to function pointer */
  const uint32_t theirs = version_of(), ours = tx_version();
  if (theirs == ours) return TX_OK;
  return tx_fail(error, TX_ERROR_UNAVAILABLE,
                 "%s is of version %u.%u.%u and libtorch_ext.so of %u.%u.%u; build both from one source (bazel build "
                 "//:libtorch_ext.so //cuda:%s)",
                 path, theirs >> 16, theirs >> 8 & 0xff, theirs & 0xff, ours >> 16, ours >> 8 & 0xff, ours & 0xff,
                 TX_CUDA_LIBRARY);
}

static tx_status resolve(void *handle, const char *path, tx_error *error) {
  TX_FORWARD(check_version(handle, path, error));
  for (size_t i = 0; i < TX_N_FUNCTIONS; i++) {
    void *symbol = dlsym(handle, kFunctions[i].name);
    if (!symbol) return no_function(path, kFunctions[i].name, error);
    memcpy((char *)&loaded.library + kFunctions[i].slot, &symbol, sizeof symbol);
  }
  return TX_OK;
}

static tx_status load(tx_error *error) {
  TX_FORWARD(find(loaded.path, sizeof loaded.path, error));
  void *handle = dlopen(loaded.path, RTLD_NOW | RTLD_LOCAL);
  if (!handle) return tx_fail(error, TX_ERROR_UNAVAILABLE, "the CUDA library could not be loaded: %s", dlerror());
  const tx_status status = resolve(handle, loaded.path, error);
  if (status != TX_OK) dlclose(handle);
  return status;
}

tx_status tx_cuda_library_load(const tx_cuda_library **library, tx_error *error) {
  static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  tx_status status = TX_OK;
  (void)pthread_mutex_lock(&mutex);
  if (!loaded.ready) {
    status = load(error);
    loaded.ready = status == TX_OK;
  }
  (void)pthread_mutex_unlock(&mutex);
  *library = status == TX_OK ? &loaded.library : NULL;
  return status;
}

tx_status tx_torch_cuda_library(char *path, int64_t size, tx_error *error) {
  const tx_cuda_library *library;
  if (!path) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_torch_cuda_library: path is NULL");
  TX_FORWARD(tx_cuda_library_load(&library, error));
  if (size < 1 || strlen(loaded.path) >= (size_t)size)
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "no room for a path of %lld characters in %lld bytes",
                   (long long)strlen(loaded.path), (long long)size);
  memcpy(path, loaded.path, strlen(loaded.path) + 1);
  return TX_OK;
}
