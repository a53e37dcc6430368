/* Text in a buffer of fixed size, for messages and tables. */
#ifndef TX_CORE_TEXT_H
#define TX_CORE_TEXT_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

/* vsnprintf and snprintf in the C locale, with numbers rounded to nearest, whatever the caller has set: a decimal point
 * is a point. */
int tx_text_vformat(char *data, size_t capacity, const char *format, va_list arguments)
    __attribute__((format(printf, 3, 0)));
int tx_text_format(char *data, size_t capacity, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Replaces each byte that is not part of a complete UTF-8 character by '?': names may be any bytes, and are cut
 * anywhere. */
void tx_text_repair(char *text);

/* Formats a message: tx_text_vformat, then tx_text_repair. */
void tx_text_message(char *data, size_t capacity, const char *format, va_list arguments)
    __attribute__((format(printf, 3, 0)));

/* strtod in the C locale, rounded to nearest, whatever the caller has set. */
double tx_text_number(const char *text, char **end);

/* A text in a buffer. As with snprintf, `length` counts the whole text; what does not fit into `capacity` bytes is
 * cut. */
typedef struct tx_text {
  char *data;
  size_t capacity;
  size_t length;
} tx_text;

/* An empty text in `data`; capacity 0 only counts. */
tx_text tx_text_in(char *data, size_t capacity);

void tx_text_add(tx_text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Appends a number as Python writes it ("1.0", "1e-05", "nan"): 15 digits, or 17 if 15 do not give the same number. */
void tx_text_add_float(tx_text *text, double number);

/* Walks a list such as "fp32, fp16" or "fp8|float8", split at any of `separators` and the spaces that follow. Returns
 * the length of the item at *cursor, which *item then points to (not terminated), and moves *cursor on; -1 at the end.
 */
int64_t tx_text_item(const char **cursor, const char *separators, const char **item);

/* Returns 1 if the `length` bytes at `item` are the string `word`. */
int tx_text_is(const char *item, int64_t length, const char *word);

#endif
