/* Single fields of the policy: the table of fields, and reading, checking and printing a value. */
#ifndef TX_CORE_POLICY_FIELDS_H
#define TX_CORE_POLICY_FIELDS_H

#include "csrc/core/text.h"
#include "csrc/torch_ext.h"

/* The library's defaults. */
tx_policy tx_policy_defaults(void);

/* The field with this name; TX_POLICY_FIELDS if there is none. */
int32_t tx_policy_find(const char *name);

/* Returns 1 if tx_dtype_check_key enforces the field's legal set (OPTIMIZER_COERCED). */
int tx_policy_is_coerced(int32_t field);

/* The name of the configuration of a tx_side bit: "override_optimizer_config" or "override_ddp_config". */
const char *tx_policy_side_name(int32_t side);

/* Returns 1 if a dtype is among the names of a legal set ("fp32, fp16"). */
int tx_policy_dtype_is_legal(const char *legal, tx_dtype dtype);

/* Reads a setting into `values`. `where` is the configuration's name for messages, and `side` the tx_side whose keys
 * are legal in it. *field: the field. *decided: 0 if the value leaves the decision to the library (None, for a key for
 * which None is not a value); nothing is written then, nor on failure. */
tx_status tx_policy_read(const tx_setting *setting, const char *where, int32_t side, tx_policy *values, int32_t *field,
                         int *decided, tx_error *error);

/* Returns 1 if both policies have the same value in a field. */
int tx_policy_equal(const tx_policy *a, const tx_policy *b, int32_t field);

/* to->field = from->field. */
void tx_policy_copy(tx_policy *to, const tx_policy *from, int32_t field);

/* Appends the field's value as users write it: "bf16", "True", "no_shard", "0.01", "None". */
void tx_policy_format(const tx_policy *policy, int32_t field, tx_text *text);

#endif
