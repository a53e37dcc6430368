#include "csrc/core/policy_fields.h"

#include <math.h>
#include <string.h>

#include "csrc/core/dtype.h"
#include "csrc/core/fp_mode.h"
#include "csrc/core/status.h"
#include "csrc/core/suggest.h"

enum { NEITHER = 0, OPTIMIZER = TX_SIDE_OPTIMIZER, DDP = TX_SIDE_DDP, BOTH = OPTIMIZER | DDP, COERCED = 4 };
enum { OPTIMIZER_COERCED = OPTIMIZER | COERCED };

static const tx_policy_field kFields[TX_POLICY_FIELDS] = {
#define TX_ROW(type, name, sides, initial, legal) \
  {#name, legal, offsetof(tx_policy, name), sizeof(((tx_policy *)0)->name), TX_FIELD_##type, (sides)&BOTH},
#include "csrc/policy.def"
#undef TX_ROW
};

static const unsigned char kCoerced[TX_POLICY_FIELDS] = {
#define TX_ROW(type, name, sides, initial, legal) ((sides)&COERCED) != 0,
#include "csrc/policy.def"
#undef TX_ROW
};

/* No padding, so that comparing, hashing or mirroring the struct covers the fields and nothing else. */
_Static_assert(sizeof(tx_policy) == sizeof(uint64_t) + sizeof(((tx_policy *)0)->reserved)
#define TX_ROW(type, name, sides, initial, legal) +sizeof(((tx_policy *)0)->name)
#include "csrc/policy.def"
#undef TX_ROW
                   ,
               "policy.def: widest fields first; reserved: an even number of 4-byte fields");

tx_policy tx_policy_defaults(void) {
#define NO_F64 ((double)NAN)
  return (tx_policy){
      .size = sizeof(tx_policy),
#define TX_ROW(type, name, sides, initial, legal) .name = initial,
#include "csrc/policy.def"
#undef TX_ROW
  };
#undef NO_F64
}

const tx_policy_field *tx_policy_field_at(int32_t i) {
  return i >= 0 && i < TX_POLICY_FIELDS ? &kFields[i] : NULL;
}

int32_t tx_policy_find(const char *name) {
  for (int32_t i = 0; i < TX_POLICY_FIELDS; i++) {
    if (strcmp(kFields[i].name, name) == 0) return i;
  }
  return TX_POLICY_FIELDS;
}

int tx_policy_is_coerced(int32_t field) {
  return kCoerced[field];
}

const char *tx_policy_side_name(int32_t side) {
  return side & OPTIMIZER ? "override_optimizer_config" : "override_ddp_config";
}

/* -- access by type --------------------------------------------------------------------------------------------- */

static const void *at(const tx_policy *policy, int32_t field) {
  return (const char *)policy + kFields[field].offset;
}

static void *at_mutable(tx_policy *policy, int32_t field) {
  return (char *)policy + kFields[field].offset;
}

int tx_policy_equal(const tx_policy *a, const tx_policy *b, int32_t field) {
  switch ((tx_field_type)kFields[field].type) {
    case TX_FIELD_F64: {
      const double x = *(const double *)at(a, field);
      const double y = *(const double *)at(b, field);
      return x == y || (isnan(x) && isnan(y)); /* NaN is None */
    }
    case TX_FIELD_TEXT:
      return strcmp(at(a, field), at(b, field)) == 0;
    case TX_FIELD_I64:
    case TX_FIELD_I32:
    case TX_FIELD_DTYPE:
    case TX_FIELD_BOOL:
    case TX_FIELD_ENUM:
      break;
  }
  return memcmp(at(a, field), at(b, field), (size_t)kFields[field].bytes) == 0;
}

void tx_policy_copy(tx_policy *to, const tx_policy *from, int32_t field) {
  memcpy(at_mutable(to, field), at(from, field), (size_t)kFields[field].bytes);
}

/* -- legal sets ------------------------------------------------------------------------------------------------- */

static const char kNone[] = "none, ";

/* The set without its leading "none, ". */
static const char *values_of(const char *legal) {
  const size_t n = sizeof kNone - 1;
  return strncmp(legal, kNone, n) == 0 ? legal + n : legal;
}

static int none_is_legal(int32_t field) {
  return values_of(kFields[field].legal) != kFields[field].legal;
}

/* Whether x is in an interval such as "[0, 1)"; false for NaN. */
static int is_in_interval(const char *interval, double x) {
  char *end;
  const double low = tx_text_number(interval + 1, &end);
  const double high = tx_text_number(end + 1, &end);
  return (*interval == '[' ? x >= low : x > low) && (*end == ']' ? x <= high : x < high);
}

/* The position of a word in a list of names; -1 if it is not in the list. */
static int32_t position_in(const char *names, const char *word) {
  const char *item;
  int64_t length;
  for (int32_t i = 0; (length = tx_text_item(&names, ",", &item)) >= 0; i++) {
    if (tx_text_is(item, length, word)) return i;
  }
  return -1;
}

/* The name at a position, *length bytes long; NULL past the end of the list. */
static const char *name_at(const char *names, int64_t position, int64_t *length) {
  const char *item = NULL;
  for (int64_t i = 0; i <= position; i++) {
    if ((*length = tx_text_item(&names, ",", &item)) < 0) return NULL;
  }
  return item;
}

int tx_policy_dtype_is_legal(const char *legal, tx_dtype dtype) {
  const char *names = values_of(legal);
  const char *item;
  int64_t length;
  while ((length = tx_text_item(&names, ",", &item)) >= 0) {
    tx_dtype named;
    if (tx_dtype_find(item, (size_t)length, &named) && named == dtype) return 1;
  }
  return 0;
}

/* -- reading a setting ------------------------------------------------------------------------------------------ */

/* The former name of grad_comm_compression. Its value is a link speed, below which gradients are compressed. */
static const char kFormerCompression[] = "compress_below_gbps";
static const char kFormerLegal[] = "[0, inf]";

static int is_former_compression(const tx_setting *setting) {
  return strcmp(setting->key, kFormerCompression) == 0;
}

static int32_t find_key(const char *key) {
  return strcmp(key, kFormerCompression) == 0 ? TX_POLICY_grad_comm_compression : tx_policy_find(key);
}

static void format_setting(const tx_setting *setting, tx_text *text) {
  switch ((tx_value_kind)setting->kind) {
    case TX_VALUE_NONE:
      tx_text_add(text, "None");
      return;
    case TX_VALUE_BOOL:
      tx_text_add(text, setting->integer ? "True" : "False");
      return;
    case TX_VALUE_INT:
      tx_text_add(text, "%lld", (long long)setting->integer);
      return;
    case TX_VALUE_FLOAT:
      tx_text_add(text, "%g", setting->number);
      return;
    case TX_VALUE_TEXT:
      tx_text_add(text, "'%.64s'", setting->text);
      return;
    case TX_VALUE_DTYPE:
      tx_text_add(text, "%s", tx_dtype_name((tx_dtype)setting->integer));
      return;
  }
}

/* Appends ": ZeRO-2 is optim_grads here", or ": the nearest is 8bit", or nothing if no name is near. */
static void suggest_name(const char *key, const char *word, const char *names, tx_text *text) {
  const char *what = NULL;
  const char *ours = tx_other_name(key, word, &what);
  if (ours) {
    tx_text_add(text, ": %.64s is %s here", what, ours);
    return;
  }
  enum { FAR = 3 };
  int64_t nearest = FAR, nearest_length = 0, length;
  const char *found = NULL, *item;
  while ((length = tx_text_item(&names, ",", &item)) >= 0) {
    char name[TX_TEXT_CAPACITY] = {0};
    memcpy(name, item, (size_t)length < sizeof name ? (size_t)length : sizeof name - 1);
    const int64_t distance = tx_edit_distance(word, name);
    if (distance >= nearest || distance * 2 >= length) continue;
    nearest = distance;
    nearest_length = length;
    found = item;
  }
  if (found) tx_text_add(text, ": the nearest is %.*s", (int)nearest_length, found);
}

static tx_status fail_value(const tx_setting *setting, const char *where, int32_t field, tx_error *error) {
  char value[128];
  tx_text text = tx_text_in(value, sizeof value);
  format_setting(setting, &text);
  if (kFields[field].type == TX_FIELD_DTYPE && setting->kind == TX_VALUE_TEXT) {
    tx_dtype dtype;
    if (!tx_dtype_find(setting->text, strlen(setting->text), &dtype)) {
      return tx_fail(error, TX_ERROR_UNKNOWN_DTYPE, "%s: %s=%s is not a dtype; legal: %s (of the names %s)", where,
                     setting->key, value, kFields[field].legal, tx_dtype_choices());
    }
  }
  char hint[160] = "";
  tx_text hint_text = tx_text_in(hint, sizeof hint);
  if (kFields[field].type == TX_FIELD_ENUM && setting->kind == TX_VALUE_TEXT) {
    suggest_name(setting->key, setting->text, kFields[field].legal, &hint_text);
  }
  return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "%s: %s=%s is not legal%s; legal: %s", where, setting->key, value, hint,
                 is_former_compression(setting) ? kFormerLegal : kFields[field].legal);
}

tx_status tx_strategy_find(const char *where, const char *name, int32_t *strategy, tx_error *error) {
  const int32_t field = TX_POLICY_data_parallel_sharding_strategy;
  if (!where || !name || !strategy) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_strategy_find: where, name and strategy must not be NULL");
  }
  const int32_t found = position_in(kFields[field].legal, name);
  if (found >= 0) {
    *strategy = found;
    return TX_OK;
  }
  char hint[160];
  tx_text text = tx_text_in(hint, sizeof hint);
  suggest_name(kFields[field].name, name, kFields[field].legal, &text);
  return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "%s'%.64s' is not legal%s; legal: %s", where, name, hint,
                 kFields[field].legal);
}

static tx_status fail_key(const char *key, const char *where, int32_t side, tx_error *error) {
  const int32_t field = find_key(key);
  if (field < TX_POLICY_FIELDS && kFields[field].side != NEITHER) {
    return tx_fail(error, TX_ERROR_UNKNOWN_KEY, "%s: %s is a key of %s", where, key,
                   tx_policy_side_name(kFields[field].side));
  }
  const char *candidates[TX_POLICY_FIELDS];
  int64_t n = 0;
  for (int32_t i = 0; i < TX_POLICY_FIELDS; i++) {
    if (kFields[i].side != NEITHER) candidates[n++] = kFields[i].name;
  }
  const char *nearest = tx_nearest(key, candidates, n);
  const int32_t nearest_side = kFields[tx_policy_find(nearest)].side;
  if (nearest_side & side) {
    return tx_fail(error, TX_ERROR_UNKNOWN_KEY, "%s: unknown key '%.64s'; the nearest is %s", where, key, nearest);
  }
  return tx_fail(error, TX_ERROR_UNKNOWN_KEY, "%s: unknown key '%.64s'; the nearest is %s, of %s", where, key, nearest,
                 tx_policy_side_name(nearest_side));
}

static int read_f64(const tx_setting *setting, const char *legal, double *value) {
  if (setting->kind != TX_VALUE_FLOAT && setting->kind != TX_VALUE_INT) return 0;
  *value = setting->kind == TX_VALUE_INT ? (double)setting->integer : setting->number;
  return is_in_interval(legal, *value);
}

/* Reads an integer; a float that is a whole number counts as one, since configuration files write 4e7. */
static int read_i64(const tx_setting *setting, const char *legal, int64_t *value) {
  if (setting->kind == TX_VALUE_FLOAT) {
    if (!(fabs(setting->number) <= 0x1p53) || setting->number != trunc(setting->number)) return 0;
    *value = (int64_t)setting->number;
  } else if (setting->kind == TX_VALUE_INT) {
    *value = setting->integer;
  } else {
    return 0;
  }
  return is_in_interval(legal, (double)*value);
}

static int read_dtype(const tx_setting *setting, tx_dtype *dtype) {
  if (setting->kind == TX_VALUE_TEXT) return tx_dtype_find(setting->text, strlen(setting->text), dtype);
  if (setting->kind != TX_VALUE_DTYPE || !tx_dtype_is_known(setting->integer)) return 0;
  *dtype = (tx_dtype)setting->integer;
  return 1;
}

static int read_former_compression(const tx_setting *setting, int32_t *value) {
  double gbps;
  if (!read_f64(setting, kFormerLegal, &gbps)) return 0;
  *value = isinf(gbps) ? TX_COMPRESSION_ON : gbps > 0 ? TX_COMPRESSION_AUTO : TX_COMPRESSION_OFF;
  return 1;
}

static int read_enum(const tx_setting *setting, const char *legal, int32_t *value) {
  if (is_former_compression(setting)) return read_former_compression(setting, value);
  if (setting->kind == TX_VALUE_TEXT) {
    *value = position_in(legal, setting->text);
    return *value >= 0;
  }
  int64_t length;
  if (setting->kind != TX_VALUE_INT || !name_at(legal, setting->integer, &length)) return 0;
  *value = (int32_t)setting->integer;
  return 1;
}

/* Writes the value into its field; returns 0 if it is not legal there. dtype: the setting's value, for fields of
 * dtypes. */
static int read_value(const tx_setting *setting, int32_t f, int is_none, tx_dtype dtype, tx_policy *values) {
  const tx_policy_field *row = &kFields[f];
  const char *legal = values_of(row->legal);
  int ok = 0;
  switch ((tx_field_type)row->type) {
    case TX_FIELD_F64: {
      double value = (double)NAN;
      ok = is_none || read_f64(setting, legal, &value);
      if (ok) *(double *)at_mutable(values, f) = value;
      break;
    }
    case TX_FIELD_I64: {
      int64_t value = TX_NO_INT;
      ok = is_none || read_i64(setting, legal, &value);
      if (ok) *(int64_t *)at_mutable(values, f) = value;
      break;
    }
    case TX_FIELD_I32: {
      int64_t value = 0;
      ok = read_i64(setting, legal, &value);
      if (ok) *(int32_t *)at_mutable(values, f) = (int32_t)value;
      break;
    }
    case TX_FIELD_DTYPE:
      ok = is_none || (read_dtype(setting, &dtype) && tx_policy_dtype_is_legal(legal, dtype));
      if (ok) *(int32_t *)at_mutable(values, f) = (int32_t)dtype;
      break;
    case TX_FIELD_BOOL:
      ok = setting->kind == TX_VALUE_BOOL && (setting->integer == 0 || setting->integer == 1);
      if (ok) *(int32_t *)at_mutable(values, f) = (int32_t)setting->integer;
      break;
    case TX_FIELD_ENUM: {
      int32_t value = 0;
      ok = is_none || read_enum(setting, row->legal, &value);
      if (ok) *(int32_t *)at_mutable(values, f) = value;
      break;
    }
    case TX_FIELD_TEXT: {
      const size_t length = setting->kind == TX_VALUE_TEXT ? strlen(setting->text) : 0;
      ok = length > 0 && length < TX_TEXT_CAPACITY;
      if (ok) {
        memset(at_mutable(values, f), 0, TX_TEXT_CAPACITY);
        memcpy(at_mutable(values, f), setting->text, length);
      }
      break;
    }
  }
  return ok;
}

tx_status tx_policy_read(const tx_setting *setting, const char *where, int32_t side, tx_policy *values, int32_t *field,
                         int *decided, tx_error *error) {
  if (!setting->key) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s: a key is NULL", where);
  if (setting->kind < TX_VALUE_NONE || setting->kind > TX_VALUE_DTYPE ||
      (setting->kind == TX_VALUE_TEXT && !setting->text)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s: %.64s has a value of no tx_value_kind (%d)", where,
                   setting->key, (int)setting->kind);
  }
  const int32_t f = find_key(setting->key);
  if (f == TX_POLICY_FIELDS || !(kFields[f].side & side)) return fail_key(setting->key, where, side, error);

  const tx_policy_field *row = &kFields[f];
  tx_dtype dtype = TX_NONE;
  const int is_none = setting->kind == TX_VALUE_NONE ||
                      (row->type == TX_FIELD_DTYPE && read_dtype(setting, &dtype) && dtype == TX_NONE); /* "auto" */
  *field = f;
  *decided = !is_none || none_is_legal(f);
  if (!*decided) return TX_OK;

  const tx_fp_mode saved = tx_fp_enter(); /* so that a subnormal is not read as 0 */
  const volatile int ok = read_value(setting, f, is_none, dtype, values);
  tx_fp_leave(saved);
  return ok ? TX_OK : fail_value(setting, where, f, error);
}

/* -- printing --------------------------------------------------------------------------------------------------- */

void tx_policy_format(const tx_policy *policy, int32_t field, tx_text *text) {
  const void *value = at(policy, field);
  switch ((tx_field_type)kFields[field].type) {
    case TX_FIELD_F64: {
      const double number = *(const double *)value;
      if (isnan(number)) {
        tx_text_add(text, "None");
      } else {
        tx_text_add(text, "%.15g", number);
      }
      return;
    }
    case TX_FIELD_I64:
      if (*(const int64_t *)value == TX_NO_INT) {
        tx_text_add(text, "None");
      } else {
        tx_text_add(text, "%lld", (long long)*(const int64_t *)value);
      }
      return;
    case TX_FIELD_I32:
      tx_text_add(text, "%d", (int)*(const int32_t *)value);
      return;
    case TX_FIELD_DTYPE: {
      const tx_dtype dtype = (tx_dtype) * (const int32_t *)value;
      tx_text_add(text, "%s", dtype == TX_NONE ? "None" : tx_dtype_name(dtype));
      return;
    }
    case TX_FIELD_BOOL:
      tx_text_add(text, *(const int32_t *)value ? "True" : "False");
      return;
    case TX_FIELD_ENUM: {
      int64_t length = 0;
      if (*(const int32_t *)value == 0 && none_is_legal(field)) {
        tx_text_add(text, "None");
        return;
      }
      const char *name = name_at(kFields[field].legal, *(const int32_t *)value, &length);
      tx_text_add(text, "%.*s", name ? (int)length : 0, name ? name : "");
      return;
    }
    case TX_FIELD_TEXT:
      tx_text_add(text, "%.*s", TX_TEXT_CAPACITY - 1, (const char *)value);
      return;
  }
}
