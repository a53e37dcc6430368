/* Bindings to torch and to other languages: registration of the operators under torch.ops.torch_ext, and the memory
 * layout of the structs. */
#ifndef TORCH_EXT_BINDINGS_H
#define TORCH_EXT_BINDINGS_H

#include "torch_ext_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* -- torch --------------------------------------------------------------------------------------------------------- */

/* Registers every operator with the torch that is loaded in this process (>= 2.10). Only the first call registers;
 * later calls do nothing and succeed. torch is found through dlopen(RTLD_NOLOAD), so `import torch` must come first. If
 * a symbol is missing, the message names it and torch's version. */
TX_API tx_status tx_torch_register(tx_error *error);

/* A tx_parallel that uses torch's threads, as many as torch is set to use now; for calls of C functions instead of
 * operators. TX_ERROR_BAD_STATE before tx_torch_register. */
TX_API tx_status tx_torch_parallel(tx_parallel *parallel, tx_error *error);

/* Memory in which calls for the same tensors note what they have checked: notes and notes_bytes of tx_adamw_args. */
typedef struct tx_torch_notes {
  void *memory; /* NULL: nothing is noted */
  int64_t bytes;
} tx_torch_notes;

/* Operator calls that bypass torch's dispatcher; for the Python package. The caller of these functions holds the GIL.
 *
 * tx_torch_objects says, once, how Python objects are read. exchange: the content of the capsule
 * torch.Tensor.__dlpack_c_exchange_api__. types: the tensor classes that may be read this way. TX_ERROR_UNAVAILABLE if
 * they cannot be.
 *
 * tx_torch_call calls operator i of the table below with a tuple of all its arguments; it releases the GIL while the
 * operator runs. *taken is 0, and nothing has happened, if the call must go through torch's dispatcher.
 *
 * tx_torch_repeat calls operator i, whose first two arguments are lists of parameters and gradients, for parameters
 * that are as they were at an earlier call, with each one's `grad`. arguments: as tx_torch_call's; the entry of the
 * gradients is ignored. params: a list. Returns whether the operator has run and succeeded; if not, it has written
 * nothing. It runs where tx_torch_call would run it, provided that params has the same objects as the first argument,
 * each of them has a gradient, and, if versions is not NULL, its version counter is versions[k] + own.
 *
 * tx_torch_versions reads the version counters of a list of n tensors, each reduced by `own`: versions [n]. If an
 * object of the list has none, it returns with a Python error set.
 *
 * tx_torch_grads puts the `grad` of each of a list of n tensors into `grads`, a list of n. none: Python's None. Returns
 * how many of them are None; -1, with a Python error set, if an object of the list has no such attribute. */
TX_API tx_status tx_torch_objects(const void *exchange, void *const *types, int64_t n_types, tx_error *error);
TX_API tx_status tx_torch_call(int32_t i, void *arguments, const tx_torch_notes *notes, int32_t *taken,
                               tx_error *error);
TX_API int32_t tx_torch_repeat(int32_t i, void *arguments, void *params, const int64_t *versions, int64_t own,
                               const tx_torch_notes *notes);
TX_API void tx_torch_versions(void *tensors, int64_t n, int64_t own, int64_t *versions);
TX_API int64_t tx_torch_grads(void *tensors, int64_t n, const void *none, void *grads);

/* Loads libtorch_ext_cuda.so, which has the operators for tensors on GPUs, and returns its path. It is the file next to
 * this library, or the one that the environment variable TORCH_EXT_CUDA_LIBRARY names. It is loaded by this call or by
 * the first operator that gets a tensor on a GPU, and never otherwise. path: `size` bytes, receives a NUL-terminated
 * name. TX_ERROR_UNAVAILABLE says where the library was looked for and how to get it, or which version was found. */
TX_API tx_status tx_torch_cuda_library(char *path, int64_t size, tx_error *error);

/* The operator table: name ("adamw_") and schema ("adamw_(Tensor(a!)[] params, ...) -> ()") of row i; NULL past the
 * end. Static storage. */
TX_API const char *tx_operator_name(int32_t i);
TX_API const char *tx_operator_schema(int32_t i);

/* A hash of a list of tensors, by properties or by addresses, which adamw_flat_ compares with the tensors it receives.
 * Properties: `words` has for each tensor its tx_dtype, the number of its dimensions (-1 if it has no elements) and its
 * sizes (if it has elements). Addresses: `words` has the address of each tensor (0 if it has no elements). Never
 * returns 0. words: n of them, host memory. */
TX_API int64_t tx_signature(int64_t n, const int64_t *words);

/* -- structs, for languages that cannot read the headers ----------------------------------------------------------- */

/* A field of a struct, as the library's compiler lays it out.
 *
 * type: int32, int64, uint64, double; "char[]" (an array of `bytes`); the name of a struct that is embedded; "char *",
 * "void *", "int64 *", or a struct's name with " *": a pointer; "function": a function pointer. */
typedef struct tx_struct_field {
  const char *name;
  const char *type;
  int64_t offset;
  int64_t bytes;
} tx_struct_field;

typedef struct tx_struct {
  const char *name; /* "tx_adamw_args" */
  int64_t bytes;
  int64_t n_fields;
  const tx_struct_field *fields; /* all of them, in order */
} tx_struct;

/* Struct i of those that functions of the public headers take; NULL past the end. Static storage. */
TX_API const tx_struct *tx_struct_at(int32_t i);

#ifdef __cplusplus
}
#endif

#endif
