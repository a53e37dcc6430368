#include "csrc/core/dtype.h"

#include <stddef.h>
#include <string.h>

#include "csrc/core/status.h"
#include "csrc/core/text.h"

static const struct row {
  const char *name;
  const char *torch_name;
  const char *aliases;
  int64_t bytes;
  int32_t floating;
} kRows[] = {
    [TX_NONE] = {"none", NULL, "auto", 0, 0},
#define X(code, name, torch_name, bytes, floating, aliases) [TX_##code] = {name, #torch_name, aliases, bytes, floating},
#include "csrc/core/dtypes.def"
#undef X
};

int tx_dtype_is_known(int64_t code) {
  return code >= 0 && code < (int64_t)(sizeof kRows / sizeof *kRows);
}

const char *tx_dtype_choices(void) {
  return
#define X(code, name, torch_name, bytes, floating, aliases) aliases
#include "csrc/core/dtypes.def"
#undef X
      "auto";
}

/* ASCII only: the meaning of a name must not depend on the locale. */
static char lower(char c) {
  return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

static int is_space(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r');
}

/* Copies the name in lower case, without surrounding space. Returns 0 if it does not fit, as is the case for no legal
 * name. */
static int normalise(const char *text, size_t length, char *name, size_t capacity) {
  while (length > 0 && is_space(*text))
    text++, length--;
  while (length > 0 && is_space(text[length - 1]))
    length--;
  if (length >= capacity) return 0;
  for (size_t i = 0; i < length; i++)
    name[i] = lower(text[i]);
  name[length] = '\0';
  return 1;
}

int tx_dtype_find(const char *text, size_t length, tx_dtype *dtype) {
  char name[16];
  if (!normalise(text, length, name, sizeof name)) return 0;
  for (size_t i = 0; i < sizeof kRows / sizeof *kRows; i++) {
    const char *cursor = kRows[i].aliases;
    const char *alias;
    int64_t alias_length;
    while ((alias_length = tx_text_item(&cursor, "|,", &alias)) >= 0) {
      if (tx_text_is(alias, alias_length, name)) {
        *dtype = (tx_dtype)i;
        return 1;
      }
    }
  }
  return 0;
}

tx_status tx_dtype_parse(const char *text, tx_dtype *dtype, tx_error *error) {
  if (!text || !dtype)
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_dtype_parse: text and dtype must not be NULL");
  if (!tx_dtype_find(text, strlen(text), dtype)) {
    return tx_fail(error, TX_ERROR_UNKNOWN_DTYPE, "'%.64s' is not a dtype; legal: %s", text, tx_dtype_choices());
  }
  return TX_OK;
}

const char *tx_dtype_name(tx_dtype dtype) {
  return tx_dtype_is_known(dtype) ? kRows[dtype].name : "unknown dtype";
}

const char *tx_dtype_torch_name(tx_dtype dtype) {
  return tx_dtype_is_known(dtype) ? kRows[dtype].torch_name : NULL;
}

int32_t tx_dtype_is_floating(tx_dtype dtype) {
  return tx_dtype_is_known(dtype) ? kRows[dtype].floating : 0;
}

tx_status tx_dtype_size(tx_dtype dtype, int64_t *bytes, tx_error *error) {
  if (!bytes) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_dtype_size: bytes must not be NULL");
  if (!tx_dtype_is_known(dtype) || kRows[dtype].bytes == 0) {
    return tx_fail(error, TX_ERROR_UNKNOWN_DTYPE, "dtype code %d (%s) has no element size", (int)dtype,
                   tx_dtype_name(dtype));
  }
  *bytes = kRows[dtype].bytes;
  return TX_OK;
}

int64_t tx_wire_block_bytes(tx_dtype dtype) {
  return tx_dtype_is_known(dtype) ? TX_BLOCK * kRows[dtype].bytes + (dtype == TX_U8) : 0;
}
