#include "csrc/core/text.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

tx_text tx_text_in(char *data, size_t capacity) {
  if (capacity > 0) data[0] = '\0';
  return (tx_text){data, capacity, 0};
}

void tx_text_add(tx_text *text, const char *format, ...) {
  const size_t used = text->length < text->capacity ? text->length : text->capacity;
  va_list arguments;
  va_start(arguments, format);
  const int added =
      vsnprintf(used < text->capacity ? text->data + used : NULL, text->capacity - used, format, arguments);
  va_end(arguments);
  if (added > 0) text->length += (size_t)added;
}

void tx_text_add_float(tx_text *text, double number) {
  char digits[32];
  (void)snprintf(digits, sizeof digits, "%.15g", isnan(number) ? (double)NAN : number);
  if (strtod(digits, NULL) != number && !isnan(number)) (void)snprintf(digits, sizeof digits, "%.17g", number);
  tx_text_add(text, "%s%s", digits, digits[strspn(digits, "-0123456789")] ? "" : ".0");
}

int64_t tx_text_item(const char **cursor, const char *separators, const char **item) {
  const char *begin = *cursor;
  if (!*begin) return -1;
  const size_t length = strcspn(begin, separators);
  const char *end = begin + length;
  *item = begin;
  if (*end) end++;
  while (*end == ' ')
    end++;
  *cursor = end;
  return (int64_t)length;
}

int tx_text_is(const char *item, int64_t length, const char *word) {
  return strlen(word) == (size_t)length && memcmp(item, word, (size_t)length) == 0;
}
