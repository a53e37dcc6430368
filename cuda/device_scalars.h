/* Single values in device memory, at any address: tensors may be aligned to one byte only. */
#ifndef TX_CUDA_DEVICE_SCALARS_H
#define TX_CUDA_DEVICE_SCALARS_H

#include <cuda_runtime.h>

#include "csrc/math/numeric.h"
#include "csrc/torch_ext.h"
#include "cuda/last_block.h"

/* A value at an aligned address. In assembly if it has 8 bytes: nvcc would merge it with the bytewise read below, which
 * has the same result, into eight loads. */
template <class Value>
static __device__ __forceinline__ Value tx_read_aligned(const void *from) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Value) == 8) {
    unsigned long long bits;
    Value value;
    asm volatile("ld.b64 %0, [%1];" : "=l"(bits) : "l"(from) : "memory");
    memcpy(&value, &bits, sizeof value);
    return value;
  }
#endif
  return *(const Value *)from;
}

template <class Value>
static __device__ __forceinline__ Value tx_read_value(const void *from) {
  Value value;
  if ((uintptr_t)from % sizeof value == 0) return tx_read_aligned<Value>(from);
  memcpy(&value, from, sizeof value);
  return value;
}

template <class Value>
static __device__ __forceinline__ void tx_write_value(void *to, Value value) {
  if ((uintptr_t)to % sizeof value == 0) {
    *(Value *)to = value;
  } else {
    memcpy(to, &value, sizeof value);
  }
}

static __device__ __forceinline__ float tx_read_float_or(const void *from, float otherwise) {
  return from ? tx_read_value<float>(from) : otherwise;
}

/* An fp32 or double as double. */
static __device__ __forceinline__ double tx_read_double(const void *from, int64_t dtype) {
  return dtype == TX_F32 ? (double)tx_read_value<float>(from) : tx_read_value<double>(from);
}

/* *counter += by, atomically; nothing if counter is NULL. The counter's address is a multiple of 8. */
static __device__ __forceinline__ void tx_count(unsigned long long *counter, int64_t by) {
  if (counter && by) tx_add_i64(counter, by);
}

#endif
