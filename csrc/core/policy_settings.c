/* Collects explicit values. */
#include "csrc/core/policy_draft.h"
#include "csrc/core/policy_fields.h"
#include "csrc/core/status.h"

tx_status tx_policy_read_all(const tx_setting *list, int64_t n, const char *where, int32_t side, tx_source source,
                             tx_policy_settings *to, tx_error *error) {
  if (n < 0 || (n > 0 && !list)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s: %lld settings at %p", where, (long long)n,
                   (const void *)list);
  }
  char seen[TX_POLICY_FIELDS] = {0};
  for (int64_t i = 0; i < n; i++) {
    int32_t field;
    int decided;
    TX_FORWARD(tx_policy_read(&list[i], where, side, &to->values, &field, &decided, error));
    if (seen[field]++) {
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s: %s is given twice", where, list[i].key);
    }
    if (!decided) continue;
    to->source[field] = (int32_t)source;
    to->where[field] = where;
  }
  return TX_OK;
}

tx_status tx_policy_read_flag(int32_t flag, const char *name, int32_t field, tx_policy_settings *to, tx_error *error) {
  if (flag == TX_UNSET) return TX_OK;
  if (flag != 0 && flag != 1) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s=%d is not legal; legal: 0, 1, -1 (not set)", name, (int)flag);
  }
  if (field == TX_POLICY_fp16) {
    to->values.fp16 = flag;
  } else {
    to->values.bf16 = flag;
  }
  to->source[field] = TX_SOURCE_OVERRIDE;
  to->where[field] = "the argument";
  return TX_OK;
}

void tx_policy_copy_setting(tx_policy_settings *to, const tx_policy_settings *from, int32_t f) {
  tx_policy_copy(&to->values, &from->values, f);
  to->source[f] = from->source[f];
  to->where[f] = from->where[f];
}

void tx_policy_merge(tx_policy_settings *to, const tx_policy_settings *from, int32_t *clash) {
  for (int32_t f = 0; f < TX_POLICY_FIELDS; f++) {
    if (!from->source[f] || from->source[f] < to->source[f]) continue;
    if (from->source[f] == to->source[f] && clash && !tx_policy_equal(&from->values, &to->values, f)) *clash = f;
    tx_policy_copy_setting(to, from, f);
  }
}

void tx_policy_merge_all(tx_policy_inputs *in) {
  in->clash = TX_POLICY_FIELDS;
  in->given = in->flags;
  tx_policy_settings sides = in->sides[0];
  tx_policy_merge(&sides, &in->sides[1], &in->clash);
  tx_policy_merge(&in->given, &sides, NULL);
}
