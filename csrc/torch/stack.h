/* Reads a boxed stack into plain C: checks every tensor, converts it to a tx_tensor, and frees every handle. */
#ifndef TX_TORCH_STACK_H
#define TX_TORCH_STACK_H

#include <stddef.h>

#include "csrc/torch/schema.h"
#include "csrc/torch/torch_abi.h"

/* A shape; borrowed from the tensor's handle, valid until the stack is released. */
typedef struct tx_shape {
  int64_t dim;
  const int64_t *sizes;
} tx_shape;

/* One argument, as an operator's adapter receives it. */
typedef struct tx_value {
  const tx_argument *argument;
  int64_t n; /* number of tensors: 1 for a Tensor, the length for a Tensor[] */
  tx_tensor *tensors;
  tx_shape *shapes;
  int64_t integer; /* int, and bool as 0 or 1 */
  double real;     /* float */
} tx_value;

/* The arguments of a call. A call with few tensors uses `small`; others take one allocation. About 150 tensors fit: a
 * step of a small model, and every call with flat state. */
typedef struct tx_stack {
  const tx_torch_abi *abi;
  const tx_argument *arguments;
  int32_t n;
  void *heap;  /* NULL while `small` is enough */
  void *notes; /* as in tx_adamw_args, for a call that bypasses the dispatcher */
  int64_t notes_bytes;
  bool on_cuda; /* whether the tensors are on the GPU `device`, else on the CPU */
  int32_t device;
  tx_value values[TX_MAX_ARGUMENTS];
  _Alignas(16) unsigned char small[6144];
} tx_stack;

/* Reads slots[0 .. n) into stack->values. Every tensor that has elements must be strided, of a known dtype, contiguous,
 * and have memory of its own. All must be on one device, the CPU or a GPU, except tables, which are on the CPU. Written
 * tensors are asked for mutable memory (which copies a copy-on-write tensor). Consumes nothing: call tx_stack_release
 * afterwards in every case. */
tx_status tx_stack_read(tx_stack *stack, const tx_torch_abi *abi, const tx_argument *arguments, int32_t n,
                        const StableIValue *slots, tx_error *error);

/* Allocates memory for all tensors of a call in one piece; the values' arguments and lengths must be set. */
tx_status tx_stack_make_room(tx_stack *stack, tx_error *error);

/* Frees that memory. */
void tx_stack_free(tx_stack *stack);

/* Frees what the kernel received (every tensor, every list) and the stack's own memory. */
void tx_stack_release(tx_stack *stack, const StableIValue *slots);

#endif
