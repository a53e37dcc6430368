#include "csrc/torch/objects.h"

#include <dlfcn.h>
#include <string.h>

#include "csrc/core/status.h"

static const struct {
  const char *name;
  size_t slot; /* offset of the pointer in tx_objects */
} kSymbols[] = {
#define X(result, symbol, parameters) {#symbol, offsetof(tx_objects, symbol)},
#include "csrc/torch/python.def"
#undef X
};

tx_status tx_objects_resolve(tx_objects *objects, const void *exchange, void *const *types, int64_t n_types,
                             tx_error *error) {
  const tx_dl_exchange *table = exchange;
  if (!table || table->major != TX_DLPACK_MAJOR || !table->tensor_from_object)
    return tx_fail(error, TX_ERROR_UNAVAILABLE, "torch offers no exchange API of DLPack %d", TX_DLPACK_MAJOR);
  if (n_types < 1 || n_types > TX_PLAIN_TYPES)
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%lld types; 1 to %d are legal", (long long)n_types,
                   TX_PLAIN_TYPES);
  for (size_t i = 0; i < sizeof kSymbols / sizeof *kSymbols; i++) {
    void *symbol = dlsym(RTLD_DEFAULT, kSymbols[i].name);
    if (!symbol) return tx_fail(error, TX_ERROR_UNAVAILABLE, "this process has no symbol %s", kSymbols[i].name);
    memcpy((char *)objects + kSymbols[i].slot, &symbol, sizeof symbol);
  }
  objects->tensor_from_object = table->tensor_from_object;
  objects->n_types = n_types;
  memcpy(objects->types, types, (size_t)n_types * sizeof *types);
  return TX_OK;
}

/* An attribute of a tensor, a new reference; NULL, with a Python error set, if there is none. */
static void *attribute_of(const tx_objects *objects, void *tensor, void **name, const char *text) {
  if (!*name) *name = objects->PyUnicode_InternFromString(text);
  return *name && tensor ? objects->PyObject_GetAttr(tensor, *name) : NULL;
}
static void *grad_of(tx_objects *objects, void *tensor) {
  return attribute_of(objects, tensor, &objects->grad_name, "grad");
}
/* Reads a tensor's version counter; returns false, with a Python error set, if there is none. */
static bool read_version(tx_objects *objects, void *tensor, int64_t *version) {
  void *const found = attribute_of(objects, tensor, &objects->version_name, "_version");
  if (!found) return false;
  *version = objects->PyLong_AsLongLong(found);
  objects->Py_DecRef(found);
  return true;
}

int64_t tx_objects_grads(tx_objects *objects, void *list, int64_t n, const void *none, void *grads) {
  int64_t missing = 0;
  for (int64_t i = 0; i < n; i++) {
    void *const grad = grad_of(objects, objects->PyList_GetItem(list, (intptr_t)i));
    if (!grad || objects->PyList_SetItem(grads, (intptr_t)i, grad)) return -1;
    missing += grad == none;
  }
  return missing;
}

bool tx_objects_versions(tx_objects *objects, void *list, int64_t n, int64_t own, int64_t *versions) {
  for (int64_t i = 0; i < n; i++) {
    if (!read_version(objects, objects->PyList_GetItem(list, (intptr_t)i), &versions[i])) return false;
    versions[i] -= own;
  }
  return !objects->PyErr_Occurred();
}

/* Puts the gradient of entry i of `list` into `grads`; returns false if there is none, or the entry is not as `like`
 * says. */
static bool repeat_one(tx_objects *objects, void *list, intptr_t i, const tx_repeated *like, void *grads) {
  void *const param = objects->PyList_GetItem(list, i);
  if (!param || param != objects->PyList_GetItem(like->params, i)) return false;
  int64_t version = 0;
  if (like->versions && !(read_version(objects, param, &version) && version - like->own == like->versions[i]))
    return false;
  void *const grad = grad_of(objects, param);
  return grad && objects->PyList_SetItem(grads, i, grad) == 0;
}

void *tx_objects_repeat(tx_objects *objects, void *list, const tx_repeated *like) {
  const intptr_t n = objects->PyList_Size(list);
  void *const grads = n >= 0 && objects->PyList_Size(like->params) == n ? objects->PyList_New(n) : NULL;
  intptr_t i = 0;
  while (grads && i < n && repeat_one(objects, list, i, like, grads))
    i++;
  if (grads && i == n) return grads;
  if (grads) objects->Py_DecRef(grads);
  objects->PyErr_Clear();
  return NULL;
}

/* What reads a call's arguments. Remembers the device of the first tensor with elements, which all must share. */
typedef struct {
  const tx_objects *objects;
  void *tuple, *grads; /* as tx_objects_read's */
  bool known;
  int32_t type, index;
} reader;

static bool is_plain(const tx_objects *objects, void *object) {
  void *type = objects->PyObject_Type(object);
  bool found = false;
  for (int64_t i = 0; i < objects->n_types; i++)
    found = found || type == objects->types[i];
  objects->Py_DecRef(type);
  return found;
}

static tx_dtype dtype_of(const tx_dl_tensor *tensor) {
  static const struct {
    uint8_t code, bits;
    tx_dtype dtype;
  } known[] = {
      {TX_DL_FLOAT, 32, TX_F32}, {TX_DL_BFLOAT, 16, TX_BF16}, {TX_DL_FLOAT, 16, TX_F16}, {TX_DL_UINT, 8, TX_U8},
      {TX_DL_INT, 16, TX_I16},   {TX_DL_INT, 64, TX_I64},     {TX_DL_FLOAT, 64, TX_F64}, {TX_DL_INT, 32, TX_I32},
      {TX_DL_INT, 8, TX_I8},     {TX_DL_BOOL, 8, TX_BOOL},
  };
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (tensor->code == known[i].code && tensor->bits == known[i].bits && tensor->lanes == 1) return known[i].dtype;
  return TX_NONE;
}

/* The number of elements; -1 if they are not contiguous. */
static int64_t contiguous_numel(const tx_dl_tensor *tensor) {
  int64_t numel = 1;
  bool contiguous = true;
  for (int32_t d = tensor->ndim; d-- > 0;) {
    contiguous = contiguous && (tensor->shape[d] == 1 || (tensor->strides && tensor->strides[d] == numel));
    numel *= tensor->shape[d];
  }
  return numel == 0 || contiguous ? numel : -1;
}

static bool on_its_device(reader *r, const tx_argument *argument, const tx_dl_tensor *tensor) {
  if (argument->on_host) return tensor->device_type == TX_DL_CPU;
  if (r->known) return tensor->device_type == r->type && tensor->device_id == r->index;
  r->known = true;
  r->type = tensor->device_type;
  r->index = tensor->device_id;
  return r->type == TX_DL_CPU || r->type == TX_DL_CUDA;
}

/* Whether the values are those in memory, not negated. torch marks the imaginary part of a conjugate as negated instead
 * of negating it, which DLPack does not tell. Such views of complex memory are contiguous if they have one element, and
 * autograd may leave one of those as a gradient. */
static bool has_its_sign(const tx_objects *objects, void *object, int64_t numel) {
  if (numel != 1) return true;
  void *negated = objects->PyObject_CallMethod(object, "is_neg", NULL);
  if (!negated) return false;
  const int truth = objects->PyObject_IsTrue(negated);
  objects->Py_DecRef(negated);
  return truth == 0;
}

static bool read_tensor(reader *r, const tx_argument *argument, void *object, tx_tensor *tensor, tx_shape *shape) {
  tx_dl_tensor found;
  *shape = (tx_shape){0};
  if (!is_plain(r->objects, object) || r->objects->tensor_from_object(object, &found)) return false;
  *tensor = (tx_tensor){.numel = contiguous_numel(&found), .dtype = dtype_of(&found)};
  if (tensor->numel == 0) return true; /* none; device, dtype and layout do not matter */
  if (tensor->numel < 0 || tensor->dtype == TX_NONE || !found.data || !on_its_device(r, argument, &found) ||
      !has_its_sign(r->objects, object, tensor->numel))
    return false;
  tensor->data = (char *)found.data + found.byte_offset;
  *shape = (tx_shape){found.ndim, found.shape};
  return true;
}

static bool read_value(reader *r, tx_value *value, void *object) {
  const tx_objects *objects = r->objects;
  switch (value->argument->kind) {
    case TX_ARG_TENSOR:
      return read_tensor(r, value->argument, object, value->tensors, value->shapes);
    case TX_ARG_TENSOR_LIST:
      for (int64_t i = 0; i < value->n; i++)
        if (!read_tensor(r, value->argument, objects->PyList_GetItem(object, (intptr_t)i), &value->tensors[i],
                         &value->shapes[i]))
          return false;
      return true;
    case TX_ARG_FLOAT:
      value->real = objects->PyFloat_AsDouble(object);
      return !objects->PyErr_Occurred();
    case TX_ARG_INT:
    case TX_ARG_BOOL:
      value->integer = objects->PyLong_AsLongLong(object);
      return !objects->PyErr_Occurred();
  }
  return false;
}

/* Entry a of the arguments. */
static void *entry_of(const reader *r, int32_t a) {
  return a == 1 && r->grads ? r->grads : r->objects->PyTuple_GetItem(r->tuple, a);
}

static bool read_all(reader *r, tx_stack *stack) {
  for (int32_t a = 0; a < stack->n; a++) {
    tx_value *value = &stack->values[a];
    *value = (tx_value){.argument = &stack->arguments[a]};
    if (value->argument->kind == TX_ARG_TENSOR) value->n = 1;
    if (value->argument->kind == TX_ARG_TENSOR_LIST) value->n = r->objects->PyList_Size(entry_of(r, a));
    if (value->n < 0) return false; /* not a list */
  }
  if (tx_stack_make_room(stack, NULL) != TX_OK) return false;
  for (int32_t a = 0; a < stack->n; a++)
    if (!read_value(r, &stack->values[a], entry_of(r, a))) return false;
  stack->on_cuda = r->known && r->type == TX_DL_CUDA;
  stack->device = r->index;
  return true;
}

bool tx_objects_read(const tx_objects *objects, tx_stack *stack, const tx_argument *arguments, int32_t n, void *tuple,
                     void *grads) {
  reader r = {.objects = objects, .tuple = tuple, .grads = grads};
  stack->arguments = arguments;
  stack->n = n;
  stack->heap = NULL;
  if (objects->PyTuple_Size(tuple) == n && read_all(&r, stack)) return true;
  objects->PyErr_Clear();
  return false;
}
