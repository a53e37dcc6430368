#include "csrc/ops/planes_block.h"

#include <string.h>

enum { kRaw, kConstant, kCoded };

#define BITMAP_BYTES 32
#define STATES_BYTES ((int64_t)(TX_RANS_LANES * sizeof(uint32_t)))
/* Coding must save at least 1 / GAIN of the plane; else it is stored as it is, which is read faster. */
#define GAIN 32
/* Symbols are counted in a sample: runs of SAMPLED bytes, one per stride. That is a quarter of the plane, which costs
 * less than a thousandth of the size. For planes that are likely to be noise, a sixteenth is sampled first. The strides
 * are not powers of two, since columns of matrices often are. */
#define SAMPLED TX_COUNT_RUN
#define STRIDE (4 * SAMPLED + 16)
#define COARSE_STRIDE (16 * SAMPLED + 16)

static int log2_of(int64_t width) {
  return width == 4 ? 2 : (int)width - 1;
}

static int pays(int64_t bytes, int64_t n) {
  return bytes < n - n / GAIN;
}

/* Counts the symbols of a sample, or of all bytes if there are few; returns how many were counted. */
static uint32_t count(const uint8_t *plane, int64_t n, int64_t stride, uint32_t *counts) {
  return tx_coding_kernels_selected()->count_bytes(plane, n, n < 16 * stride ? SAMPLED : stride, counts);
}

/* Whether a plane that is likely to be noise may be worth coding. */
static int looks_worth(const uint8_t *plane, int64_t n) {
  uint32_t counts[256];
  const uint32_t seen = count(plane, n, COARSE_STRIDE, counts);
  return pays(tx_entropy_bytes(counts, seen), seen);
}

/* Counts a sample, and counts 1 for each other symbol that may occur: 0, and those between the least and the greatest
 * non-zero byte. Returns the sum of counts; 0 if all bytes are the same. */
static uint32_t count_all(const uint8_t *plane, int64_t n, uint32_t *counts) {
  uint8_t least, greatest;
  const int zero = tx_coding_kernels_selected()->range_of_bytes(plane, n, &least, &greatest);
  if (zero ? greatest == 0 : least == greatest) return 0;
  uint32_t sum = count(plane, n, STRIDE, counts);
  for (int32_t s = 0; s < 256; s++) {
    const int may_be = s == 0 ? zero : s >= least && s <= greatest;
    sum += may_be && !counts[s];
    counts[s] += may_be && !counts[s];
  }
  return sum;
}

static uint8_t *put_frequencies(const uint16_t *freq, uint8_t *to) {
  memset(to, 0, BITMAP_BYTES);
  uint8_t *at = to + BITMAP_BYTES;
  for (int32_t s = 0; s < 256; s++) {
    if (!freq[s]) continue;
    to[s >> 3] |= (uint8_t)(1 << (s & 7));
    if (freq[s] > 0x7f) *at++ = (uint8_t)(freq[s] >> 7 | 0x80);
    *at++ = freq[s] & 0x7f;
  }
  return at;
}

/* Reads the frequencies; returns their end, or NULL if they do not end before `end`, or do not sum to TX_RANS_SCALE. */
static const uint8_t *get_frequencies(const uint8_t *from, const uint8_t *end, uint16_t *freq) {
  uint32_t sum = 0;
  if (end - from < BITMAP_BYTES) return NULL;
  const uint8_t *at = from + BITMAP_BYTES;
  for (int32_t s = 0; s < 256; s++) {
    freq[s] = 0;
    if (!(from[s >> 3] >> (s & 7) & 1)) continue;
    if (at == end) return NULL;
    uint32_t f = *at++;
    if (f > 0x7f) {
      if (at == end) return NULL;
      f = (f & 0x7f) << 7 | (*at++ & 0x7fu);
    }
    if (f == 0 || f >= TX_RANS_SCALE) return NULL;
    freq[s] = (uint16_t)f;
    sum += f;
  }
  return sum == TX_RANS_SCALE ? at : NULL;
}

/* Codes a plane; returns its end, or NULL if coding does not pay. */
static uint8_t *put_coded(tx_planes_work *work, const uint8_t *plane, int64_t n, const uint32_t *counts, uint32_t sum,
                          uint8_t *to) {
  const uint8_t *limit = to + n; /* its size if stored as it is */
  uint32_t states[TX_RANS_LANES];
  uint16_t freq[256];
  if (!pays(tx_entropy_bytes(counts, sum) * n / sum + 2 * BITMAP_BYTES + STATES_BYTES, n)) return NULL;
  tx_rans_frequencies(counts, sum, freq);
  /* so that the frequencies fit */
  if (n < 2 * 256 + BITMAP_BYTES + STATES_BYTES + TX_RANS_ROW_BYTES) return NULL;
  uint8_t *words = put_frequencies(freq, to) + sizeof(uint32_t);
  tx_rans_encoder_of(freq, &work->encoder);
  uint8_t *end =
      tx_coding_kernels_selected()->rans_encode(&work->encoder, states, plane, n, words, limit - STATES_BYTES);
  if (!end) return NULL;
  const uint32_t length = (uint32_t)(end - words);
  memcpy(words - sizeof length, &length, sizeof length);
  memcpy(end, states, sizeof states);
  return end + sizeof states;
}

static uint8_t *put_plane(tx_planes_work *work, const uint8_t *plane, int64_t n, int surely, uint8_t *to) {
  if (surely || looks_worth(plane, n)) {
    uint32_t counts[256];
    const uint32_t sum = count_all(plane, n, counts);
    if (sum == 0) {
      *to++ = kConstant;
      *to++ = plane[0];
      return to;
    }
    uint8_t *end = put_coded(work, plane, n, counts, sum, to + 1);
    if (end) {
      *to = kCoded;
      return end;
    }
  }
  *to++ = kRaw;
  memcpy(to, plane, (size_t)n);
  return to + n;
}

uint8_t *tx_planes_put(tx_planes_work *work, const void *values, int64_t n, int64_t width, int rotate, uint8_t *to) {
  uint8_t *planes[TX_PLANES_MOST];
  for (int64_t p = 0; p < width; p++)
    planes[p] = work->planes[p];
  tx_coding_kernels_selected()->split[log2_of(width)](values, n, rotate, planes);
  for (int64_t p = 0; p < width; p++)
    to = put_plane(work, planes[p], n, p == 0, to);
  return to;
}

/* Decodes a coded plane; returns its end, or NULL if the bytes are invalid. */
static const uint8_t *get_coded(tx_planes_work *work, const uint8_t *from, const uint8_t *end, int64_t n,
                                uint8_t *plane) {
  uint16_t freq[256];
  uint32_t length, states[TX_RANS_LANES];
  const uint8_t *at = get_frequencies(from, end, freq);
  if (!at || end - at < (int64_t)sizeof length) return NULL;
  memcpy(&length, at, sizeof length);
  const uint8_t *words = at + sizeof length;
  if (end - words < STATES_BYTES || length > end - words - STATES_BYTES) return NULL;
  memcpy(states, words + length, sizeof states);
  for (int32_t i = 0; i < TX_RANS_LANES; i++) {
    if (states[i] < TX_RANS_LEAST || states[i] >= TX_RANS_LEAST << 16) return NULL;
  }
  tx_rans_decoder_of(freq, &work->decoder);
  const int whole = tx_coding_kernels_selected()->rans_decode(&work->decoder, states, words, words + length, n, plane);
  return whole ? words + length + STATES_BYTES : NULL;
}

/* Decodes a plane; returns its end, or NULL if the bytes are invalid. *plane points to the result, in the message or in
 * `room`. */
static const uint8_t *get_plane(tx_planes_work *work, const uint8_t *from, const uint8_t *end, int64_t n, uint8_t *room,
                                const uint8_t **plane) {
  if (from == end) return NULL;
  const uint8_t how = *from++;
  *plane = room;
  if (how == kRaw) {
    *plane = from;
    return end - from < n ? NULL : from + n;
  }
  if (how == kConstant) {
    if (from == end) return NULL;
    memset(room, *from, (size_t)n);
    return from + 1;
  }
  return how == kCoded ? get_coded(work, from, end, n, room) : NULL;
}

int tx_planes_get(tx_planes_work *work, const uint8_t *from, int64_t bytes, int64_t n, int64_t width, int rotate,
                  void *values) {
  const uint8_t *planes[TX_PLANES_MOST], *end = from + bytes;
  for (int64_t p = 0; p < width; p++) {
    from = get_plane(work, from, end, n, work->planes[p], &planes[p]);
    if (!from) return 0;
  }
  if (from != end) return 0;
  tx_coding_kernels_selected()->merge[log2_of(width)](planes, n, rotate, values);
  return 1;
}
