/* tx_layout_slices: which parts of placed parameters are in which range of a buffer. */
#include <inttypes.h>

#include "csrc/core/status.h"
#include "csrc/torch_ext_advanced.h"

/* Checks everything, and writes if `slices` is not NULL. */
static tx_status walk(const tx_layout_slice *placed, int64_t n, const tx_layout_range *ranges, int64_t n_ranges,
                      tx_layout_slice *slices, int64_t capacity, int64_t *n_slices, tx_error *error) {
  int64_t found = 0, before = 0; /* before: elements of the previous ranges */
  for (int64_t r = 0; r < n_ranges; r++) {
    int64_t size, next;
    if (__builtin_sub_overflow(ranges[r].end, ranges[r].begin, &size) || size < 0 ||
        __builtin_add_overflow(before, size, &next)) {
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                     "tx_layout_slices: ranges[%" PRId64 "] is [%" PRId64 ", %" PRId64 "); legal: begin <= end", r,
                     ranges[r].begin, ranges[r].end);
    }
    for (int64_t i = 0; i < n; i++) {
      tx_layout_slice slice = placed[i];
      int64_t first;
      slice.numel = tx_layout_intersect(placed[i].at, placed[i].numel, ranges[r].begin, ranges[r].end, &first);
      if (slice.numel == 0) continue;
      if (found == capacity || __builtin_add_overflow(slice.first, first, &slice.first)) {
        return tx_fail(
            error, TX_ERROR_INVALID_ARGUMENT,
            "tx_layout_slices: there is room for %" PRId64
            "; legal: n + n_ranges, which is enough where nothing overlaps, and elements that an int64 counts",
            capacity);
      }
      slice.at = before + (placed[i].at + first - ranges[r].begin);
      if (slices) slices[found] = slice;
      found++;
    }
    before = next;
  }
  *n_slices = found;
  return TX_OK;
}

tx_status tx_layout_slices(const tx_layout_slice *placed, int64_t n, const tx_layout_range *ranges, int64_t n_ranges,
                           tx_layout_slice *slices, int64_t capacity, int64_t *n_slices, tx_error *error) {
  if (n < 0 || n_ranges < 0 || (n > 0 && !placed) || (n_ranges > 0 && !ranges) || (capacity > 0 && !slices) ||
      !n_slices) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_layout_slices: %" PRId64 " slices, %" PRId64 " ranges; legal: >= 0, and no array NULL", n,
                   n_ranges);
  }
  int64_t found;
  TX_FORWARD(walk(placed, n, ranges, n_ranges, NULL, capacity, &found, error));
  return walk(placed, n, ranges, n_ranges, slices, capacity, n_slices, error);
}
