/* The layout of the public structs, as the compiler lays them out, for bindings (tx_struct_at). */
#include <stddef.h>

#include "csrc/torch_ext_advanced.h"
#include "csrc/torch_ext_cycle.h"
#include "csrc/torch_ext_delta.h"

/* The type of a field, as tx_struct_field names it. Function pointers have too many types to tell them apart. */
/* clang-format off */
#define POINTS_TO(name) const name *: #name " *"
#define TYPE_OF(value) _Generic((value),                                                        \
    int32_t: "int32", tx_dtype: "int32", int64_t: "int64", uint64_t: "uint64", double: "double", \
    char *: "char[]", const char *: "char *", const int64_t *: "int64 *",                        \
    void *: "void *", const void *: "void *", const tx_nccl *: "void *",                         \
    uint64_t *: "uint64[]",                                                                      \
    const char *const *: "void *",                                                               \
    tx_tensor: "tx_tensor", tx_policy_overrides: "tx_policy_overrides",                          \
    POINTS_TO(tx_tensor), POINTS_TO(tx_adamw_group), POINTS_TO(tx_meta),                         \
    POINTS_TO(tx_copy_ops), POINTS_TO(tx_setting),                                               \
    POINTS_TO(tx_layout_param), POINTS_TO(tx_layout_args),                                       \
    POINTS_TO(tx_layout_place), POINTS_TO(tx_layout_bucket),                                     \
    POINTS_TO(tx_memory_state), POINTS_TO(tx_memory_unit),                                       \
    POINTS_TO(tx_muon_matrix), POINTS_TO(tx_muon_run),                                           \
    POINTS_TO(tx_delta_param), POINTS_TO(tx_delta_run),                                          \
    default: "function")
/* clang-format on */

#define F(field) \
  { #field, TYPE_OF(((described *)0)->field), offsetof(described, field), sizeof(((described *)0)->field) }

#define FOUND(name, fields) \
  { #name, sizeof(name), sizeof(fields) / sizeof *(fields), fields }

const tx_struct *tx_struct_at(int32_t i) {
  int32_t at = 0;
#define TX_STRUCT(name, ...)                               \
  if (i == at++) {                                         \
    typedef name described;                                \
    static const tx_struct_field fields[] = {__VA_ARGS__}; \
    static const tx_struct found = FOUND(name, fields);    \
    return &found;                                         \
  }
#include "csrc/core/structs.def"
#undef TX_STRUCT
  if (i == at) {
    typedef tx_policy described;
    static const tx_struct_field fields[] = {
        F(size),
#define TX_ROW(type, name, sides, initial, legal) F(name),
#include "csrc/policy.def"
#undef TX_ROW
    };
    static const tx_struct found = FOUND(tx_policy, fields);
    return &found;
  }
  return NULL;
}
