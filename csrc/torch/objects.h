/* From Python's objects to plain C: what stack.h reads from a boxed stack, without torch's dispatcher, which makes a
 * handle of every tensor of every list and takes half of a step of many small tensors for it.
 *
 * Nothing is kept from one call to the next, and nothing is explained here: what is not as plain as can be is left to
 * the operator, whose messages say what is wrong with it. */
#ifndef TX_TORCH_OBJECTS_H
#define TX_TORCH_OBJECTS_H

#include "csrc/torch/dlpack.h"
#include "csrc/torch/stack.h"

enum { TX_PLAIN_TYPES = 4 };

/* What objects are read with. */
typedef struct tx_objects {
#define X(result, symbol, parameters) result(*symbol) parameters;
#include "csrc/torch/python.def"
#undef X
  int (*tensor_from_object)(void *object, tx_dl_tensor *tensor);
  void *types[TX_PLAIN_TYPES]; /* of tensors that nobody but torch has a say in */
  int64_t n_types;
} tx_objects;

/* exchange: DLPack's table of torch. types: Python's classes, which must stay. TX_ERROR_UNAVAILABLE where the table is
 * of another major version, or this process shows no Python. */
tx_status tx_objects_resolve(tx_objects *objects, const void *exchange, void *const *types, int64_t n_types,
                             tx_error *error);

/* Reads a tuple of as many arguments as the schema has into stack->values; the caller holds Python's lock. False, and
 * no error of Python's is left, where the operator has to be asked: an argument is left out, a tensor is of a class
 * that was not named, not dense, not contiguous, of a dtype that our operators do not know, on another device than the
 * first or one that is neither the CPU nor a GPU, or has no memory. The values are valid while the objects are
 * unchanged. tx_stack_free follows in every case. */
bool tx_objects_read(const tx_objects *objects, tx_stack *stack, const tx_argument *arguments, int32_t n, void *tuple);

#endif
