/* How a policy is resolved: explicit values (settings) are collected (inputs), rules derive a policy from them (draft),
 * and contradictions among them are rejected. */
#ifndef TX_CORE_POLICY_DRAFT_H
#define TX_CORE_POLICY_DRAFT_H

#include "csrc/torch_ext.h"

/* Explicit values: the fields of `values` that have a source. */
typedef struct tx_policy_settings {
  tx_policy values;
  int32_t source[TX_POLICY_FIELDS];    /* tx_source, 0 (TX_SOURCE_DEFAULT): not given */
  const char *where[TX_POLICY_FIELDS]; /* name of the configuration that set it, for messages */
} tx_policy_settings;

/* Everything that a resolution reads. */
typedef struct tx_policy_inputs {
  tx_dtype model_dtype;
  tx_dtype shard_dtype;
  int32_t preset;
  int32_t full_shard;
  tx_policy_settings config;   /* weaker than the dtype branch */
  tx_policy_settings flags;    /* the arguments bf16 and fp16: explicit, but a key of the same name wins over them */
  tx_policy_settings sides[2]; /* optimizer, ddp */
  tx_policy_settings given;    /* flags and sides merged */
  int32_t clash;               /* a field on which the two sides differ, or TX_POLICY_FIELDS */
} tx_policy_inputs;

/* Whether the field has an explicit value. */
#define TX_POLICY_GIVEN(in, field) ((in)->given.source[TX_POLICY_##field] != 0)

/* A policy while it is resolved: values and their origins. */
typedef struct tx_policy_draft {
  tx_policy p;
  tx_origin origins[TX_POLICY_FIELDS];
} tx_policy_draft;

/* -- policy_settings.c: collecting explicit values -------------------------------------------------------------- */

/* Reads a list of settings into *to. where: the configuration's name for messages. side: the tx_side whose keys are
 * legal. */
tx_status tx_policy_read_all(const tx_setting *list, int64_t n, const char *where, int32_t side, tx_source source,
                             tx_policy_settings *to, tx_error *error);
/* Reads an argument that is 0, 1 or TX_UNSET. */
tx_status tx_policy_read_flag(int32_t flag, const char *name, int32_t field, tx_policy_settings *to, tx_error *error);
void tx_policy_copy_setting(tx_policy_settings *to, const tx_policy_settings *from, int32_t f);
/* Merges `from` into `to`; a stronger or equal source wins. If two values of equal source differ, *clash becomes the
 * field. */
void tx_policy_merge(tx_policy_settings *to, const tx_policy_settings *from, int32_t *clash);
/* Computes in->given and in->clash from flags and sides. */
void tx_policy_merge_all(tx_policy_inputs *in);

/* -- policy_rules.c: how one value decides others ----------------------------------------------------------------- */

void tx_policy_apply_rules(const tx_policy_inputs *in, tx_policy_draft *d);
/* Sets the fields that full_shard presets. */
void tx_policy_set_full_shard(tx_policy_draft *d);

/* -- policy_conflicts.c ----------------------------------------------------------------------------------------- */

tx_status tx_policy_fail_conflict(const char *where_a, const tx_policy *values_a, int32_t a, const char *where_b,
                                  const tx_policy *values_b, int32_t b, const char *reason, tx_error *error);
/* Rejects contradictions between explicit values, including the model's dtype. */
tx_status tx_policy_check_conflicts(const tx_policy_inputs *in, const tx_policy_draft *d, tx_error *error);
/* Rejects a value of the optimizer's configuration that the model's dtype, a preset or `states`, which are stronger,
 * would silently replace. */
tx_status tx_policy_check_config(const tx_policy_inputs *in, const tx_policy_draft *d, tx_error *error);

#endif
