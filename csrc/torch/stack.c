#include "csrc/torch/stack.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/core/status.h"

/* "grads[3]", "stats", "cuda:0": for messages only */
typedef struct {
  char text[64];
} label;

static label tensor_label(const tx_argument *argument, int64_t index) {
  label result;
  if (argument->kind == TX_ARG_TENSOR_LIST)
    (void)snprintf(result.text, sizeof result.text, "%s[%lld]", argument->name, (long long)index);
  else
    (void)snprintf(result.text, sizeof result.text, "%s", argument->name);
  return result;
}

static label device_label(const tx_torch_abi *abi, int32_t type, int32_t index) {
  label result;
  if (type == abi->aoti_torch_device_type_cpu())
    (void)snprintf(result.text, sizeof result.text, "cpu");
  else if (type == abi->aoti_torch_device_type_meta())
    (void)snprintf(result.text, sizeof result.text, "meta");
  else if (type == abi->aoti_torch_device_type_cuda())
    (void)snprintf(result.text, sizeof result.text, "cuda:%d", (int)index);
  else
    (void)snprintf(result.text, sizeof result.text, "torch's device type %d, index %d", (int)type, (int)index);
  return result;
}

static AtenTensorHandle slot_tensor(StableIValue slot) {
  return (AtenTensorHandle)(uintptr_t)slot;
}

static StableListHandle slot_list(StableIValue slot) {
  return (StableListHandle)(uintptr_t)slot;
}

static tx_dtype dtype_of(const tx_torch_abi *abi, int32_t torch_dtype) {
#define TX_SHIM(result, symbol, parameters, major, minor)
#define TX_SHIM_OPTIONAL(result, symbol, parameters, major, minor)
#define TX_SHIM_DTYPE(dtype, name) \
  if (torch_dtype == abi->aoti_torch_dtype_##name()) return dtype;
#include "csrc/torch/shims.def"
#undef TX_SHIM
#undef TX_SHIM_OPTIONAL
#undef TX_SHIM_DTYPE
  return TX_NONE;
}

/* The device of the first tensor with elements, which all others must share. */
typedef struct {
  bool known;
  int32_t type, index;
  label tensor;
} seen_device;

/* Checks that a table is on the CPU, on whichever device the other tensors are. */
static tx_status check_table(const tx_torch_abi *abi, const tx_argument *argument, AtenTensorHandle handle,
                             tx_error *error) {
  int32_t type = 0;
  int32_t index = 0;
  (void)abi->aoti_torch_get_device_type(handle, &type);
  if (type == abi->aoti_torch_device_type_cpu()) return TX_OK;
  (void)abi->aoti_torch_get_device_index(handle, &index);
  return tx_fail(error, TX_ERROR_DEVICE,
                 "%s is on %s; it is a table, which is on the cpu wherever the other tensors are", argument->name,
                 device_label(abi, type, index).text);
}

static tx_status check_device(const tx_torch_abi *abi, const tx_argument *argument, int64_t i, AtenTensorHandle handle,
                              seen_device *seen, tx_error *error) {
  int32_t type = 0;
  int32_t index = 0;
  if (argument->on_host) return check_table(abi, argument, handle, error);
  (void)abi->aoti_torch_get_device_type(handle, &type);
  if (seen->known && seen->type == type && type == abi->aoti_torch_device_type_cpu()) return TX_OK;
  (void)abi->aoti_torch_get_device_index(handle, &index);
  if (!seen->known) {
    *seen = (seen_device){true, type, index, tensor_label(argument, i)};
    return TX_OK;
  }
  if (seen->type == type && seen->index == index) return TX_OK;
  return tx_fail(error, TX_ERROR_DEVICE, "%s is on %s and %s on %s; all tensors of a call must be on one device",
                 tensor_label(argument, i).text, device_label(abi, type, index).text, seen->tensor.text,
                 device_label(abi, seen->type, seen->index).text);
}

/* Selects the back end for the device. */
static tx_status set_device(tx_stack *stack, const seen_device *seen, tx_error *error) {
  const tx_torch_abi *abi = stack->abi;
  stack->on_cuda = seen->known && seen->type == abi->aoti_torch_device_type_cuda();
  stack->device = seen->index;
  if (!seen->known || stack->on_cuda || seen->type == abi->aoti_torch_device_type_cpu()) return TX_OK;
  if (seen->type == abi->aoti_torch_device_type_meta())
    return tx_fail(error, TX_ERROR_DEVICE, "%s is a meta tensor, which holds no data; materialise it first (to_empty)",
                   seen->tensor.text);
  return tx_fail(error, TX_ERROR_DEVICE, "%s is on %s; this library has kernels for cpu and cuda", seen->tensor.text,
                 device_label(abi, seen->type, seen->index).text);
}

static tx_status read_tensor(const tx_torch_abi *abi, const tx_argument *argument, int64_t i, AtenTensorHandle handle,
                             seen_device *seen, tx_tensor *tensor, tx_shape *shape, tx_error *error) {
  int32_t torch_dtype = -1;
  int32_t layout = -1;
  int64_t *sizes = NULL;
  *tensor = (tx_tensor){0};
  *shape = (tx_shape){0};
  if (abi->aoti_torch_get_numel(handle, &tensor->numel) || abi->aoti_torch_get_dtype(handle, &torch_dtype) ||
      abi->aoti_torch_get_layout(handle, &layout))
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s is not a tensor that can be read (undefined?)",
                   tensor_label(argument, i).text);
  tensor->dtype = dtype_of(abi, torch_dtype);
  if (tensor->numel == 0) return TX_OK; /* none; device and layout do not matter */
  if (tensor->dtype == TX_NONE)
    return tx_fail(error, TX_ERROR_UNKNOWN_DTYPE, "%s has a dtype that this library does not know (number %d of torch)",
                   tensor_label(argument, i).text, (int)torch_dtype);
  TX_FORWARD(check_device(abi, argument, i, handle, seen, error));
  if (layout != abi->aoti_torch_layout_strided())
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s is not strided (sparse?); pass a dense tensor",
                   tensor_label(argument, i).text);
  bool contiguous = false;
  if (abi->aoti_torch_is_contiguous(handle, &contiguous) || !contiguous)
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s is not contiguous; pass a contiguous tensor",
                   tensor_label(argument, i).text);
  AOTITorchError failed = abi->aoti_torch_get_dim(handle, &shape->dim) || abi->aoti_torch_get_sizes(handle, &sizes);
  if (argument->written) {
    failed = failed || abi->torch_get_mutable_data_ptr(handle, &tensor->data);
  } else {
    const void *data = NULL;
    failed = failed || abi->torch_get_const_data_ptr(handle, &data);
    memcpy(&tensor->data, &data, sizeof data); /* tx_tensor has no const variant; the schema says what is written */
  }
  const bool meta = !argument->on_host && seen->type == abi->aoti_torch_device_type_meta(); /* rejected by set_device */
  if (failed || (!tensor->data && !meta))
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s has no memory of its own (a fake, functional or freed tensor)",
                   tensor_label(argument, i).text);
  shape->sizes = sizes;
  return TX_OK;
}

static tx_status read_lengths(tx_stack *stack, const StableIValue *slots, tx_error *error) {
  for (int32_t a = 0; a < stack->n; a++) {
    tx_value *value = &stack->values[a];
    *value = (tx_value){.argument = &stack->arguments[a]};
    if (value->argument->kind == TX_ARG_TENSOR) value->n = 1;
    if (value->argument->kind == TX_ARG_TENSOR_LIST) {
      size_t length = 0;
      if (stack->abi->torch_list_size(slot_list(slots[a]), &length))
        return tx_fail(error, TX_ERROR_UNAVAILABLE, "torch could not tell the length of %s", value->argument->name);
      value->n = (int64_t)length;
    }
  }
  return TX_OK;
}

tx_status tx_stack_make_room(tx_stack *stack, tx_error *error) {
  int64_t total = 0;
  for (int32_t a = 0; a < stack->n; a++)
    total += stack->values[a].n;
  const size_t bytes = (size_t)total * (sizeof(tx_tensor) + sizeof(tx_shape));
  unsigned char *memory = stack->small;
  if (bytes > sizeof stack->small) {
    memory = stack->heap = malloc(bytes);
    if (!memory) return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory to read %lld tensors", (long long)total);
  }
  tx_tensor *tensors = (void *)memory;
  tx_shape *shapes = (void *)(memory + (size_t)total * sizeof(tx_tensor));
  for (int32_t a = 0; a < stack->n; a++) {
    stack->values[a].tensors = tensors;
    stack->values[a].shapes = shapes;
    tensors += stack->values[a].n;
    shapes += stack->values[a].n;
  }
  return TX_OK;
}

void tx_stack_free(tx_stack *stack) {
  free(stack->heap);
  stack->heap = NULL;
}

tx_status tx_stack_read(tx_stack *stack, const tx_torch_abi *abi, const tx_argument *arguments, int32_t n,
                        const StableIValue *slots, tx_error *error) {
  stack->abi = abi;
  stack->notes = NULL;
  stack->arguments = arguments;
  stack->n = n;
  stack->heap = NULL;
  TX_FORWARD(read_lengths(stack, slots, error));
  TX_FORWARD(tx_stack_make_room(stack, error));
  seen_device seen = {0};
  for (int32_t a = 0; a < n; a++) {
    tx_value *value = &stack->values[a];
    switch (value->argument->kind) {
      case TX_ARG_TENSOR:
        TX_FORWARD(
            read_tensor(abi, value->argument, 0, slot_tensor(slots[a]), &seen, value->tensors, value->shapes, error));
        break;
      case TX_ARG_TENSOR_LIST:
        for (int64_t i = 0; i < value->n; i++) {
          StableIValue item = 0;
          if (abi->torch_list_get_item(slot_list(slots[a]), (size_t)i, &item))
            return tx_fail(error, TX_ERROR_UNAVAILABLE, "torch could not hand over %s",
                           tensor_label(value->argument, i).text);
          TX_FORWARD(read_tensor(abi, value->argument, i, slot_tensor(item), &seen, &value->tensors[i],
                                 &value->shapes[i], error));
        }
        break;
      case TX_ARG_INT:
        memcpy(&value->integer, &slots[a], sizeof value->integer);
        break;
      case TX_ARG_FLOAT:
        memcpy(&value->real, &slots[a], sizeof value->real);
        break;
      case TX_ARG_BOOL: {
        bool flag = false; /* one byte in the low bytes of the slot (little-endian) */
        memcpy(&flag, &slots[a], sizeof flag);
        value->integer = flag;
        break;
      }
    }
  }
  return set_device(stack, &seen, error);
}

void tx_stack_release(tx_stack *stack, const StableIValue *slots) {
  const tx_torch_abi *abi = stack->abi;
  for (int32_t a = 0; a < stack->n; a++) {
    if (stack->arguments[a].kind == TX_ARG_TENSOR) (void)abi->aoti_torch_delete_tensor_object(slot_tensor(slots[a]));
    if (stack->arguments[a].kind != TX_ARG_TENSOR_LIST) continue;
    size_t length = 0;
    (void)abi->torch_list_size(slot_list(slots[a]), &length);
    for (size_t i = 0; i < length; i++) {
      StableIValue item = 0;
      if (!abi->torch_list_get_item(slot_list(slots[a]), i, &item))
        (void)abi->aoti_torch_delete_tensor_object(slot_tensor(item));
    }
    (void)abi->torch_delete_list(slot_list(slots[a]));
  }
  tx_stack_free(stack);
}
