#include "csrc/core/policy_fields.h"

const char *tx_source_name(tx_source source) {
  switch (source) {
    case TX_SOURCE_DEFAULT:
      return "default";
    case TX_SOURCE_CONFIG:
      return "config";
    case TX_SOURCE_DTYPE:
      return "dtype";
    case TX_SOURCE_PRESET:
      return "preset";
    case TX_SOURCE_FOLLOWS:
      return "follows";
    case TX_SOURCE_OVERRIDE:
      return "override";
    case TX_SOURCE_HOOK:
      return "hook";
  }
  return "unknown source";
}

int64_t tx_policy_describe(const tx_policy *policy, const tx_origin *origins, char *buffer, int64_t capacity) {
  if (!policy || policy->size != sizeof *policy || (capacity > 0 && !buffer)) return -1;
  tx_text text = tx_text_in(buffer, capacity > 0 ? (size_t)capacity : 0);
  for (int32_t f = 0; f < TX_POLICY_FIELDS; f++) {
    char value[TX_TEXT_CAPACITY + 32];
    tx_text value_text = tx_text_in(value, sizeof value);
    tx_policy_format(policy, f, &value_text);
    if (!origins) {
      tx_text_add(&text, "%-32s %s\n", tx_policy_field_at(f)->name, value);
      continue;
    }
    const tx_policy_field *cause = tx_policy_field_at(origins[f].cause);
    tx_text_add(&text, "%-32s %-19s %s%s%s\n", tx_policy_field_at(f)->name, value,
                tx_source_name((tx_source)origins[f].source), cause ? " " : "", cause ? cause->name : "");
  }
  return (int64_t)text.length;
}
