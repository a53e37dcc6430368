/* Registers the operators under torch.ops.torch_ext: one table (operators.def) becomes definitions, kernels and
 * registrations. */
#include <pthread.h>
#include <stdio.h>

#include "csrc/core/status.h"
#include "csrc/torch/adapters.h"
#include "csrc/torch/objects.h"
#include "csrc/torch/torch_pool.h"
#include "csrc/torch/torch_products.h"

#define TX_NAMESPACE "torch_ext"

/* The dispatch keys under which our kernels are registered. The catch-all exists for the messages: without it a call
 * with tensors on another device, a sparse tensor or only empty lists would end in torch's "could not run". */
static const char *const kKeys[] = {"CPU", "CUDA", "CompositeExplicitAutograd"};
#define TX_N_KEYS ((int)(sizeof kKeys / sizeof *kKeys))

typedef struct {
  const char *name;
  const char *schema;         /* with the name and the empty return, as torch expects it */
  const char *argument_types; /* the part between the parentheses */
  void (*kernel)(StableIValue *slots, uint64_t n_arguments, uint64_t n_outputs);
  tx_status (*adapter)(const tx_value *values, const tx_target *target, tx_error *error);
} operator_row;

/* A boxed kernel gets no context argument, so there is one per row. */
#define X(entry, name, arguments) \
  static void boxed_##entry(StableIValue *slots, uint64_t n_arguments, uint64_t n_outputs);
#include "csrc/torch/operators.def"
#undef X

static const operator_row kOperators[] = {
#define X(entry, name, arguments) {name, name "(" arguments ") -> ()", arguments, boxed_##entry, tx_adapt_##entry},
#include "csrc/torch/operators.def"
#undef X
};
#define TX_N_OPERATORS ((int32_t)(sizeof kOperators / sizeof *kOperators))

enum {
#define X(entry, name, arguments) ROW_##entry,
#include "csrc/torch/operators.def"
#undef X
};

/* Written by registration, before torch knows any kernel; only read afterwards. */
static tx_torch_abi abi;
static struct {
  tx_argument arguments[TX_MAX_ARGUMENTS];
  int32_t n;
} parsed[TX_N_OPERATORS];

static tx_status run_on(tx_target target, int32_t row, const tx_stack *stack, tx_error *error) {
  target.notes = stack->notes;
  target.notes_bytes = stack->notes_bytes;
  return kOperators[row].adapter(stack->values, &target, error);
}

static tx_status run_on_cpu(int32_t row, const tx_stack *stack, tx_error *error) {
  const tx_parallel pool = tx_torch_pool(&abi);
  return run_on(tx_cpu_target(&pool), row, stack, error);
}

static tx_status run_on_cuda(int32_t row, const tx_stack *stack, tx_error *error) {
  tx_target target;
  TX_FORWARD(tx_cuda_target(&abi, stack->device, &target, error));
  return run_on(target, row, stack, error);
}

static tx_status run_on_its_device(int32_t row, const tx_stack *stack, tx_error *error) {
  return stack->on_cuda ? run_on_cuda(row, stack, error) : run_on_cpu(row, stack, error);
}

static tx_status run_operator(int32_t row, const StableIValue *slots, tx_error *error) {
  tx_stack stack;
  tx_status status = tx_stack_read(&stack, &abi, parsed[row].arguments, parsed[row].n, slots, error);
  if (status == TX_OK) status = run_on_its_device(row, &stack, error);
  tx_stack_release(&stack, slots);
  return status;
}

/* aoti_torch_check throws a C++ exception, which passes through these frames (-fexceptions). So it is called last, when
 * there is nothing left to free. */
static void run_boxed(int32_t row, const StableIValue *slots) {
  tx_error error;
  char message[sizeof error.message + 64];
  if (run_operator(row, slots, &error) == TX_OK) return;
  (void)snprintf(message, sizeof message, TX_NAMESPACE "::%s: %s", kOperators[row].name, error.message);
  abi.aoti_torch_check(false, kOperators[row].name, __FILE__, __LINE__, message);
}

#define X(entry, name, arguments)                                                            \
  static void boxed_##entry(StableIValue *slots, uint64_t n_arguments, uint64_t n_outputs) { \
    (void)n_arguments;                                                                       \
    (void)n_outputs;                                                                         \
    run_boxed(ROW_##entry, slots);                                                           \
  }
#include "csrc/torch/operators.def"
#undef X

/* -- registration
 * ------------------------------------------------------------------------------------------------------ */

/* A handle owns its registrations, so these are never deleted once registration succeeded. */
static TorchLibraryHandle definitions;
static TorchLibraryHandle implementations[TX_N_KEYS];

static tx_status refused(tx_error *error, const char *what, const char *which) {
  return tx_fail(error, TX_ERROR_UNAVAILABLE,
                 "torch refused to %s %s; is another copy of this library registered in this process?", what, which);
}

static AOTITorchError define(const char *schema) {
  if (!abi.torch_library_def_with_tags || !abi.torch_tag_pt2_compliant_tag)
    return abi.aoti_torch_library_def(definitions, schema);
  const int32_t tag = abi.torch_tag_pt2_compliant_tag();
  return abi.torch_library_def_with_tags(definitions, schema, &tag, 1);
}

static tx_status register_all(tx_error *error) {
  TX_FORWARD(tx_torch_abi_resolve(&abi, error));
  for (int32_t i = 0; i < TX_N_OPERATORS; i++)
    TX_FORWARD(tx_schema_parse(kOperators[i].argument_types, parsed[i].arguments, &parsed[i].n, error));
  if (abi.aoti_torch_library_init_fragment(TX_NAMESPACE, __FILE__, __LINE__, &definitions))
    return refused(error, "open the namespace", TX_NAMESPACE);
  for (int32_t i = 0; i < TX_N_OPERATORS; i++)
    if (define(kOperators[i].schema)) return refused(error, "define", kOperators[i].schema);
  for (int k = 0; k < TX_N_KEYS; k++) {
    if (abi.aoti_torch_library_init_impl(TX_NAMESPACE, kKeys[k], __FILE__, __LINE__, &implementations[k]))
      return refused(error, "open the dispatch key", kKeys[k]);
    for (int32_t i = 0; i < TX_N_OPERATORS; i++)
      if (abi.torch_library_impl(implementations[k], kOperators[i].name, kOperators[i].kernel, TX_TORCH_BUILD_VERSION))
        return refused(error, "take the kernel of", kOperators[i].name);
  }
  return TX_OK;
}

/* Undoes registrations, so that a later attempt can succeed. */
static void delete_library(TorchLibraryHandle *library) {
  if (*library) (void)abi.aoti_torch_delete_library_object(*library);
  *library = NULL;
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static bool registered; /* under the mutex */

tx_status tx_torch_register(tx_error *error) {
  tx_status status = TX_OK;
  (void)pthread_mutex_lock(&mutex);
  if (!registered) {
    status = register_all(error);
    registered = status == TX_OK;
    for (int k = 0; !registered && k < TX_N_KEYS; k++)
      delete_library(&implementations[k]);
    if (!registered) delete_library(&definitions);
  }
  (void)pthread_mutex_unlock(&mutex);
  return status;
}

/* -- past torch's dispatcher
 * ------------------------------------------------------------------------------------------------------ */

static tx_objects objects; /* written once, by tx_torch_objects; but for names of attributes, under the GIL */

tx_status tx_torch_objects(const void *exchange, void *const *types, int64_t n_types, tx_error *error) {
  return tx_objects_resolve(&objects, exchange, types, n_types, error);
}

void tx_torch_versions(void *tensors, int64_t n, int64_t own, int64_t *versions) {
  (void)tx_objects_versions(&objects, tensors, n, own, versions); /* the caller sees Python's error */
}

int64_t tx_torch_grads(void *tensors, int64_t n, const void *none, void *grads) {
  return tx_objects_grads(&objects, tensors, n, none, grads);
}

/* grads: see tx_objects_read. */
static tx_status call_with(int32_t i, void *arguments, void *grads, const tx_torch_notes *notes, int32_t *taken,
                           tx_error *error) {
  tx_stack stack;
  stack.notes = notes->memory;
  stack.notes_bytes = notes->bytes;
  tx_status status = TX_OK;
  *taken = tx_objects_read(&objects, &stack, parsed[i].arguments, parsed[i].n, arguments, grads);
  if (*taken) { /* releases the GIL, as torch's dispatcher does */
    void *thread = objects.PyEval_SaveThread();
    status = run_on_its_device(i, &stack, error);
    objects.PyEval_RestoreThread(thread);
  }
  tx_stack_free(&stack);
  return status;
}

tx_status tx_torch_call(int32_t i, void *arguments, const tx_torch_notes *notes, int32_t *taken, tx_error *error) {
  return call_with(i, arguments, NULL, notes, taken, error);
}

int32_t tx_torch_repeat(int32_t i, void *arguments, void *params, const int64_t *versions, int64_t own,
                        const tx_torch_notes *notes) {
  const tx_repeated like = {params, versions, own};
  void *const grads = tx_objects_repeat(&objects, objects.PyTuple_GetItem(arguments, 0), &like);
  if (!grads) return 0;
  int32_t taken;
  const tx_status status = call_with(i, arguments, grads, notes, &taken, NULL);
  objects.Py_DecRef(grads);
  return taken && status == TX_OK;
}

tx_status tx_torch_parallel(tx_parallel *parallel, tx_error *error) {
  if (!parallel) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_torch_parallel: parallel is NULL");
  (void)pthread_mutex_lock(&mutex);
  const bool ready = registered;
  (void)pthread_mutex_unlock(&mutex);
  if (!ready)
    return tx_fail(error, TX_ERROR_BAD_STATE, "torch's threads are not known yet; call tx_torch_register first");
  *parallel = tx_torch_pool(&abi);
  return TX_OK;
}

tx_status tx_torch_orthogonalise(tx_muon_job *jobs, int64_t n, const tx_muon_workspace *workspaces,
                                 int64_t n_workspaces, tx_error *error) {
  tx_parallel pool;
  TX_FORWARD(tx_torch_parallel(&pool, error));
  return tx_torch_orthogonalise_with(&abi, &pool, jobs, n, workspaces, n_workspaces, error);
}

/* torch.ops.load_library(path) only loads the file; this constructor registers the operators. If that fails, the next
 * caller of tx_torch_register is told why; a program without torch is not affected. */
__attribute__((constructor)) static void register_where_torch_is_loaded(void) {
  if (tx_torch_is_loaded()) (void)tx_torch_register(NULL);
}

const char *tx_operator_name(int32_t i) {
  return i >= 0 && i < TX_N_OPERATORS ? kOperators[i].name : NULL;
}

const char *tx_operator_schema(int32_t i) {
  return i >= 0 && i < TX_N_OPERATORS ? kOperators[i].schema : NULL;
}
