/* Reads an operator's arguments from Python objects, without torch's dispatcher. The dispatcher creates a handle for
 * every tensor of every list, which is half of the time of a step of many small tensors. (stack.h reads the same
 * arguments from a boxed stack.)
 *
 * Nothing is kept from one call to the next, and nothing is reported here: whatever is not a plain case is left to the
 * operator, whose messages say what is wrong. */
#ifndef TX_TORCH_OBJECTS_H
#define TX_TORCH_OBJECTS_H

#include "csrc/torch/dlpack.h"
#include "csrc/torch/stack.h"

enum { TX_PLAIN_TYPES = 4 };

/* The functions with which objects are read. */
typedef struct tx_objects {
#define X(result, symbol, parameters) result(*symbol) parameters;
#include "csrc/torch/python.def"
#undef X
  int (*tensor_from_object)(void *object, tx_dl_tensor *tensor);
  void *types[TX_PLAIN_TYPES]; /* tensor classes whose operators nothing but torch implements */
  int64_t n_types;
  void *version_name, *grad_name; /* "_version" and "grad" as a str; NULL before the first use */
} tx_objects;

/* Finds the functions. exchange: torch's DLPack table. types: Python classes, which must stay alive until the process
 * ends. TX_ERROR_UNAVAILABLE if the table has another major version, or if there is no Python in this process. */
tx_status tx_objects_resolve(tx_objects *objects, const void *exchange, void *const *types, int64_t n_types,
                             tx_error *error);

/* Reads the version counters of a list of n tensors into `versions`, each reduced by `own`. The caller holds the GIL.
 * Returns false, with a Python error set, if an object has no such counter. */
bool tx_objects_versions(tx_objects *objects, void *list, int64_t n, int64_t own, int64_t *versions);

/* Puts the gradient of each of a list of n tensors into `grads`, a list of n. The caller holds the GIL. Returns how
 * many are `none`, Python's None; -1, with a Python error set, if an object has no such attribute. */
int64_t tx_objects_grads(tx_objects *objects, void *list, int64_t n, const void *none, void *grads);

/* The parameters as they were at the call that is repeated. */
typedef struct tx_repeated {
  void *params;            /* a list */
  const int64_t *versions; /* of each of them, reduced by `own`; NULL: not compared */
  int64_t own;
} tx_repeated;

/* Returns a new list with the gradients of `list`, a list of parameters; NULL, with no Python error set, if they are
 * not as `like` says, or one has no gradient. The caller holds the GIL. */
void *tx_objects_repeat(tx_objects *objects, void *list, const tx_repeated *like);

/* Reads a tuple with one entry per argument of the schema into stack->values; the caller holds the GIL. Returns false,
 * with no Python error set, if the operator must be called instead: an argument is left out; or a tensor is of a class
 * that is not in `types`, not dense, not contiguous, of a dtype that our operators do not know, on another device than
 * the first one or on one that is neither the CPU nor a GPU, or has no memory. The values are valid while the objects
 * are unchanged. Call tx_stack_free afterwards in every case. grads: a list that takes the place of the second entry;
 * NULL: none does. */
bool tx_objects_read(const tx_objects *objects, tx_stack *stack, const tx_argument *arguments, int32_t n, void *tuple,
                     void *grads);

#endif
