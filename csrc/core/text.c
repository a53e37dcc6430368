#define _GNU_SOURCE /* uselocale */
#include "csrc/core/text.h"

#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/core/fp_mode.h"

/* On x86_64 printf and strtod round as the x87 control word says, which nothing else here uses. This is its value at
 * program start. (fesetenv, which also sets it, takes longer than formatting most texts.) */
#if defined(__x86_64__)
#define X87_PLAIN 0x037f
static uint16_t x87_control(void) {
  uint16_t control;
  __asm__ volatile("fnstcw %0" : "=m"(control));
  return control;
}
static void set_x87_control(uint16_t control) {
  if (control != x87_control()) __asm__ volatile("fldcw %0" : : "m"(control));
}
#else
#define X87_PLAIN 0
static uint16_t x87_control(void) {
  return X87_PLAIN;
}
static void set_x87_control(uint16_t control) {
  (void)control;
}
#endif

/* The modes that the calling thread had set. */
typedef struct caller_mode {
  locale_t plain; /* the C locale; 0: out of memory, and the caller's locale is used */
  locale_t locale;
  tx_fp_mode mode;
  uint16_t x87;
} caller_mode;

static caller_mode enter_plain_mode(void) {
  caller_mode had = {.plain = newlocale(LC_ALL_MASK, "C", (locale_t)0)};
  had.locale = uselocale(had.plain); /* 0 changes nothing */
  had.x87 = x87_control();
  set_x87_control(X87_PLAIN);
  had.mode = tx_fp_enter();
  return had;
}

static void leave_plain_mode(const caller_mode *had) {
  tx_fp_leave(had->mode);
  set_x87_control(had->x87);
  (void)uselocale(had->locale);
  if (had->plain) freelocale(had->plain);
}

int tx_text_vformat(char *data, size_t capacity, const char *format, va_list arguments) {
  const caller_mode had = enter_plain_mode();
  const int length = vsnprintf(data, capacity, format, arguments);
  leave_plain_mode(&had);
  return length;
}

int tx_text_format(char *data, size_t capacity, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int length = tx_text_vformat(data, capacity, format, arguments);
  va_end(arguments);
  return length;
}

/* Bytes of the UTF-8 character at `at`; 0 if there is no complete one (RFC 3629). */
static int character_bytes(const unsigned char *at) {
  const unsigned char lead = at[0];
  if (lead < 0x80) return 1;
  if (lead < 0xc2 || lead > 0xf4) return 0;
  const int bytes = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  for (int i = 1; i < bytes; i++)
    if ((at[i] & 0xc0) != 0x80) return 0; /* also at the end of the text */
  const int is_longer_than_needed = (lead == 0xe0 && at[1] < 0xa0) || (lead == 0xf0 && at[1] < 0x90);
  const int is_surrogate = lead == 0xed && at[1] > 0x9f, is_past_the_last = lead == 0xf4 && at[1] > 0x8f;
  return is_longer_than_needed || is_surrogate || is_past_the_last ? 0 : bytes;
}

void tx_text_repair(char *text) {
  for (int bytes; *text; text += bytes ? bytes : 1) {
    bytes = character_bytes((const unsigned char *)text);
    if (bytes == 0) *text = '?';
  }
}

void tx_text_message(char *data, size_t capacity, const char *format, va_list arguments) {
  (void)tx_text_vformat(data, capacity, format, arguments);
  tx_text_repair(data);
}

double tx_text_number(const char *text, char **end) {
  const caller_mode had = enter_plain_mode();
  const volatile double number = strtod(text, end);
  leave_plain_mode(&had);
  return number;
}

tx_text tx_text_in(char *data, size_t capacity) {
  if (capacity > 0) data[0] = '\0';
  return (tx_text){data, capacity, 0};
}

void tx_text_add(tx_text *text, const char *format, ...) {
  const size_t used = text->length < text->capacity ? text->length : text->capacity;
  va_list arguments;
  va_start(arguments, format);
  const int added =
      tx_text_vformat(used < text->capacity ? text->data + used : NULL, text->capacity - used, format, arguments);
  va_end(arguments);
  if (added > 0) text->length += (size_t)added;
}

void tx_text_add_float(tx_text *text, double number) {
  char digits[32];
  (void)tx_text_format(digits, sizeof digits, "%.15g", isnan(number) ? (double)NAN : number);
  const double read = tx_text_number(digits, NULL);
  /* Compared by bits: where subnormals count as 0, they would compare equal to 0. */
  if (memcmp(&read, &number, sizeof read) != 0 && !isnan(number))
    (void)tx_text_format(digits, sizeof digits, "%.17g", number);
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
