/* The part of DLPack 1 through which torch tells C where the data of a Python tensor is:
 * torch.Tensor.__dlpack_c_exchange_api__ is a capsule with the table. tests/core/torch_dlpack_test.cc compares every
 * field with torch's header. That header is not included here, because it belongs to torch, and 2.10's may lack the
 * table. */
#ifndef TX_TORCH_DLPACK_H
#define TX_TORCH_DLPACK_H

#include <stdint.h>

#define TX_DLPACK_MAJOR 1

enum { TX_DL_CPU = 1, TX_DL_CUDA = 2 };
enum { TX_DL_INT = 0, TX_DL_UINT = 1, TX_DL_FLOAT = 2, TX_DL_BFLOAT = 4, TX_DL_BOOL = 6 };

typedef struct tx_dl_tensor {
  void *data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
} tx_dl_tensor;

typedef struct tx_dl_exchange {
  uint32_t major;
  uint32_t minor;
  void *older;
  void *allocate;
  void *managed_from_object;
  void *managed_to_object;
  int (*tensor_from_object)(void *object, tx_dl_tensor *tensor); /* -1, and Python's error is set, if it fails */
  void *current_stream;
} tx_dl_exchange;

#endif
