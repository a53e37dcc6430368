/* NCCL as a table of function pointers: nothing is linked to it, and its header is not needed. Enumerations are ints
 * here, as in its ABI; windows, whose type has been renamed, are void *. tests/core/nccl_abi_test.cc compares these
 * declarations with NVIDIA's. */
#ifndef TX_NCCL_TABLE_H
#define TX_NCCL_TABLE_H

#include <stddef.h>
#include <stdint.h>

#include "csrc/torch_ext_advanced.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ncclComm *ncclComm_t;
typedef struct CUstream_st *cudaStream_t;

typedef struct tx_nccl_id {
  char internal[TX_NCCL_ID_BYTES];
} tx_nccl_id;

/* ncclResult_t, ncclDataType_t */
enum { TX_NCCL_SUCCESS = 0, TX_NCCL_IN_PROGRESS = 7, TX_NCCL_UINT8 = 1 };

/* ncclConfig_t of 2.28. By `size`, an older NCCL reads only the fields it knows, and a newer one uses its defaults for
 * the rest. */
typedef struct tx_nccl_config {
  size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
  const char *net_name;
  int split_share, traffic_class;
  const char *comm_name;
  int collnet_enable, cta_policy, shrink_share, nvls_ctas, n_channels_per_net_peer, nvlink_centric_sched;
} tx_nccl_config;
#define TX_NCCL_UNDEFINED ((int)0x80000000)
#define TX_NCCL_CONFIG_INIT                                                                                        \
  {                                                                                                                \
    sizeof(tx_nccl_config), 0xcafebeef, 22809, TX_NCCL_UNDEFINED, TX_NCCL_UNDEFINED, TX_NCCL_UNDEFINED,            \
        TX_NCCL_UNDEFINED, NULL, TX_NCCL_UNDEFINED, TX_NCCL_UNDEFINED, NULL, TX_NCCL_UNDEFINED, TX_NCCL_UNDEFINED, \
        TX_NCCL_UNDEFINED, TX_NCCL_UNDEFINED, TX_NCCL_UNDEFINED, TX_NCCL_UNDEFINED                                 \
  }
enum { TX_NCCL_CTA_POLICY_ZERO = 2, TX_NCCL_WIN_COLL_SYMMETRIC = 1 };

/* One function pointer per row of nccl_symbols.def, named like its symbol. */
typedef struct tx_nccl_table {
#define TX_NCCL(result, symbol, parameters, major, minor) result(*symbol) parameters;
#define TX_NCCL_OPTIONAL(result, symbol, parameters, major, minor) TX_NCCL(result, symbol, parameters, major, minor)
#include "csrc/nccl/nccl_symbols.def"
#undef TX_NCCL
#undef TX_NCCL_OPTIONAL
} tx_nccl_table;

#define TX_NCCL_FLOOR_MAJOR 2
#define TX_NCCL_FLOOR_MINOR 19
/* The code that ncclGetVersion returns, since 2.9. */
#define TX_NCCL_CODE(major, minor) ((major)*10000 + (minor)*100)

struct tx_nccl {
  tx_nccl_table call;
  void *handle;
  int32_t version;
  char path[512];
};

/* Whether memory can be registered as a symmetric window. */
static inline int tx_nccl_has_windows(const tx_nccl *library) {
  return library->call.ncclCommWindowRegister && library->call.ncclCommWindowDeregister &&
         library->version >= TX_NCCL_CODE(2, 27);
}

#ifdef __cplusplus
}
#endif

#endif
