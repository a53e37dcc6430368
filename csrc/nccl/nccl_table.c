#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* dladdr */
#endif
#include "csrc/nccl/nccl_table.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/core/status.h"

#define TX_LIBNCCL "libnccl.so.2"
#define TX_WHAT_TO_DO "install one (pip install nvidia-nccl-cu13), or leave the exchange to torch (transport=\"torch\")"

typedef struct {
  const char *name;
  size_t slot; /* offset of the pointer in tx_nccl_table */
  int major, minor;
  bool optional;
} symbol_row;

static const symbol_row kSymbols[] = {
#define TX_NCCL(result, symbol, parameters, major, minor) \
  {#symbol, offsetof(tx_nccl_table, symbol), major, minor, false},
#define TX_NCCL_OPTIONAL(result, symbol, parameters, major, minor) \
  {#symbol, offsetof(tx_nccl_table, symbol), major, minor, true},
#include "csrc/nccl/nccl_symbols.def"
#undef TX_NCCL
#undef TX_NCCL_OPTIONAL
};

/* Opens the library that the process has already loaded, which is torch's; else the caller's; else the system's. */
static void *open_library(const char *path, char *reason, size_t size) {
  void *handle = dlopen(TX_LIBNCCL, RTLD_NOW | RTLD_NOLOAD);
  if (handle) return handle;
  handle = dlopen(path ? path : TX_LIBNCCL, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char *says = dlerror();
    (void)snprintf(reason, size, "%s", says ? says : "no reason given");
  }
  return handle;
}

static void find_path(tx_nccl *library) {
  Dl_info info;
  void *symbol = dlsym(library->handle, "ncclGetVersion");
  const bool found = symbol && dladdr(symbol, &info) && info.dli_fname;
  (void)snprintf(library->path, sizeof library->path, "%s", found ? info.dli_fname : TX_LIBNCCL);
}

static tx_status resolve(tx_nccl *library, tx_error *error) {
  const symbol_row *missing = NULL;
  for (size_t i = 0; i < sizeof kSymbols / sizeof *kSymbols; i++) {
    void *symbol = dlsym(library->handle, kSymbols[i].name);
    if (!symbol && !kSymbols[i].optional && !missing) missing = &kSymbols[i];
    memcpy((char *)&library->call + kSymbols[i].slot, &symbol, sizeof symbol);
  }
  int version = 0;
  if (library->call.ncclGetVersion) (void)library->call.ncclGetVersion(&version);
  library->version = version;
  if (version < TX_NCCL_CODE(TX_NCCL_FLOOR_MAJOR, TX_NCCL_FLOOR_MINOR))
    return tx_fail(error, TX_ERROR_UNAVAILABLE, "NCCL %d.%d.%d, found as %s, is too old; %d.%d is needed: %s",
                   version / 10000, version / 100 % 100, version % 100, library->path, TX_NCCL_FLOOR_MAJOR,
                   TX_NCCL_FLOOR_MINOR, TX_WHAT_TO_DO);
  if (missing)
    return tx_fail(error, TX_ERROR_UNAVAILABLE,
                   "NCCL %d.%d.%d, found as %s, has no symbol %s (NCCL %d.%d brought it): %s", version / 10000,
                   version / 100 % 100, version % 100, library->path, missing->name, missing->major, missing->minor,
                   TX_WHAT_TO_DO);
  return TX_OK;
}

tx_status tx_nccl_open(const char *path, tx_nccl **library, tx_error *error) {
  if (!library) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_nccl_open: library is NULL");
  *library = NULL;
  char reason[512];
  void *handle = open_library(path, reason, sizeof reason);
  if (!handle)
    return tx_fail(error, TX_ERROR_UNAVAILABLE, "no NCCL was found (%s); %d.%d is needed: %s", reason,
                   TX_NCCL_FLOOR_MAJOR, TX_NCCL_FLOOR_MINOR, TX_WHAT_TO_DO);
  tx_nccl *made = calloc(1, sizeof *made);
  if (!made) {
    dlclose(handle);
    return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "tx_nccl_open: out of memory");
  }
  made->handle = handle;
  find_path(made);
  const tx_status status = resolve(made, error);
  if (status != TX_OK) {
    tx_nccl_close(made);
    return status;
  }
  *library = made;
  return TX_OK;
}

void tx_nccl_close(tx_nccl *library) {
  if (!library) return;
  dlclose(library->handle);
  free(library);
}

tx_status tx_nccl_about_this(const tx_nccl *library, tx_nccl_about *about, tx_error *error) {
  if (!library || !about || about->size != sizeof *about)
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_nccl_about_this: library or about is NULL, or about.size is not TX_NCCL_ABOUT_INIT's");
  about->version = library->version;
  about->windows = tx_nccl_has_windows(library);
  memcpy(about->path, library->path, sizeof about->path);
  return TX_OK;
}

tx_status tx_nccl_unique_id(const tx_nccl *library, char *id, tx_error *error) {
  if (!library || !id) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_nccl_unique_id: library or id is NULL");
  tx_nccl_id made;
  const int result = library->call.ncclGetUniqueId(&made);
  if (result != TX_NCCL_SUCCESS)
    return tx_fail(error, TX_ERROR_UNAVAILABLE, "ncclGetUniqueId: %s (%s)", library->call.ncclGetErrorString(result),
                   library->call.ncclGetLastError(NULL));
  memcpy(id, made.internal, sizeof made.internal);
  return TX_OK;
}
