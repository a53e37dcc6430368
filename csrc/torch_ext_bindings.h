/* What bindings to torch and to other languages need: registration of the operators under torch.ops.torch_ext, and how
 * structs lie in memory. */
#ifndef TORCH_EXT_BINDINGS_H
#define TORCH_EXT_BINDINGS_H

#include "torch_ext_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* -- torch --------------------------------------------------------------------------------------------------------- */

/* Registers every operator with the torch that is loaded in this process (>= 2.10), once; later calls do nothing and
 * succeed. Found through dlopen(RTLD_NOLOAD), so `import torch` comes first. A missing symbol is named together with
 * torch's version. */
TX_API tx_status tx_torch_register(tx_error *error);

/* torch's threads, for calls past its operators: as many as torch has now. TX_ERROR_BAD_STATE before tx_torch_register.
 */
TX_API tx_status tx_torch_parallel(tx_parallel *parallel, tx_error *error);

/* For the Python package, which holds Python's lock in both: operators called past torch's dispatcher. objects: how
 * Python's objects are read, once; exchange is what the capsule torch.Tensor.__dlpack_c_exchange_api__ holds, types are
 * the classes of tensors that may be read so. TX_ERROR_UNAVAILABLE where they cannot be. call: operator i of the table
 * below with a tuple of all its arguments; other threads have Python's lock while it runs. order, order_bytes: as in
 * tx_adamw_args. *taken is 0, and nothing has happened, where torch's dispatcher has to be asked. */
TX_API tx_status tx_torch_objects(const void *exchange, void *const *types, int64_t n_types, tx_error *error);
TX_API tx_status tx_torch_call(int32_t i, void *arguments, void *order, int64_t order_bytes, int32_t *taken,
                               tx_error *error);

/* Where libtorch_ext_cuda.so is, which has the operators for tensors on GPUs: beside this library, or what the
 * environment variable TORCH_EXT_CUDA_LIBRARY names. It is loaded by this call or by the first operator that meets a
 * tensor on a GPU, and never otherwise. path: `size` bytes, gets a NUL-terminated name. TX_ERROR_UNAVAILABLE says where
 * it was looked for and how to get it, or which version was found. */
TX_API tx_status tx_torch_cuda_library(char *path, int64_t size, tx_error *error);

/* The operator table: name ("adamw_") and schema ("adamw_(Tensor(a!)[] params, ...) -> ()") of row i; NULL past the
 * end. Static storage. */
TX_API const char *tx_operator_name(int32_t i);
TX_API const char *tx_operator_schema(int32_t i);

/* What a list of tensors is, or where, as one number that adamw_flat_ compares with what it gets. signature: of each
 * tensor in turn its tx_dtype, the number of its dimensions (-1 where it has no elements) and its sizes (where it has
 * some). addresses: of each tensor its address (0 where it has no elements). Never 0. words: n of them, host. */
TX_API int64_t tx_signature(int64_t n, const int64_t *words);

/* -- structs, for languages that cannot read the headers ----------------------------------------------------------- */

/* A field, as the library's compiler lays it out.
 *
 * type: int32, int64, uint64, double; "char[]" (an array of `bytes`); the name of a struct that is held; "char *",
 * "void *", "int64 *", or a struct's name with " *": a pointer; "function": a pointer to one. */
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
  const tx_struct_field *fields; /* all of them, in their order */
} tx_struct;

/* Struct i of those that the functions of the public headers take; NULL past the end. Static storage. */
TX_API const tx_struct *tx_struct_at(int32_t i);

#ifdef __cplusplus
}
#endif

#endif
