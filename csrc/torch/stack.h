/* From a boxed stack to plain C: every tensor checked and turned into a tx_tensor, every handle given back. */
#ifndef TX_TORCH_STACK_H
#define TX_TORCH_STACK_H

#include <stddef.h>

#include "csrc/torch/schema.h"
#include "csrc/torch/torch_abi.h"

/* Borrowed from the tensor's handle: valid until the stack is released. */
typedef struct tx_shape {
  int64_t dim;
  const int64_t *sizes;
} tx_shape;

/* One argument as an operator's adapter sees it. */
typedef struct tx_value {
  const tx_argument *argument;
  int64_t n; /* tensors: 1 for a Tensor, the length for a Tensor[] */
  tx_tensor *tensors;
  tx_shape *shapes;
  int64_t integer; /* int, and bool as 0 or 1 */
  double real;     /* float */
} tx_value;

/* Where a stack is read to. Calls with few tensors stay in `small`; others take one allocation. About a hundred and
 * fifty tensors fit: a step of a small model, and every call with flat state. */
typedef struct tx_stack {
  const tx_torch_abi *abi;
  const tx_argument *arguments;
  int32_t n;
  void *heap;  /* NULL while `small` is enough */
  void *order; /* as in tx_adamw_args, of a call past the dispatcher */
  int64_t order_bytes;
  bool on_cuda; /* where the tensors are: on the CPU, or on the GPU `device` */
  int32_t device;
  tx_value values[TX_MAX_ARGUMENTS];
  _Alignas(16) unsigned char small[6144];
} tx_stack;

/* Reads slots[0 .. n) into stack->values. Checked for every tensor that has elements: strided, of a known dtype,
 * contiguous, with memory of its own, and all on one device, the CPU or a GPU, but for tables, which are on the CPU.
 * Written tensors are asked for their memory as
 * such (a copy-on-write tensor is copied then). Nothing is consumed: tx_stack_release follows in every case. */
tx_status tx_stack_read(tx_stack *stack, const tx_torch_abi *abi, const tx_argument *arguments, int32_t n,
                        const StableIValue *slots, tx_error *error);

/* One piece of memory for all tensors of a call, whose values have their argument and their length. */
tx_status tx_stack_make_room(tx_stack *stack, tx_error *error);

/* Gives that memory back. */
void tx_stack_free(tx_stack *stack);

/* Frees what the kernel was handed (every tensor, every list) and the stack's own memory. */
void tx_stack_release(tx_stack *stack, const StableIValue *slots);

#endif
