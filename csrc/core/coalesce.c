/* Which buckets travel together. Ranks compute it each for itself, from the same numbers: IEEE doubles, no contraction.
 */
#include <inttypes.h>

#include "csrc/core/status.h"
#include "csrc/torch_ext_advanced.h"

/* Microseconds on the wire. A message that takes kWorth, which is what it costs processors that have enough to do, is
 * worth that by itself; one that takes less is joined until it takes kShortest, which is more, since the wire is then
 * as fast as the processors, of which all messages cost time; and no joined one takes more than kLongest. */
static const double kWorth = 2.5e3, kShortest = 10e3, kLongest = 16e3;

/* When compression is tried, and given up. */
static const int32_t kSlowInARow = 2, kRest = 8;
static const double kLonger = 1.05;

/* Microseconds of a whole buffer: there is too little to hide behind backward for more than one message. */
static const double kAtOnce = 5e3;

/* What a message takes beside its bytes: nearly all of the tail where few bytes left last. */
static const double kMessage = 500;

/* found: where the answer goes, and what that is called. */
static tx_status check(const tx_coalesce_args *args, const void *found, const char *name, tx_error *error) {
  if (!args || args->size != sizeof *args || !found) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "coalesce: args must begin with TX_COALESCE_ARGS_INIT, and %s must not be NULL", name);
  }
  if (args->n_buckets < 0 || args->n_ranks < 1) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "coalesce: %" PRId64 " buckets, %" PRId64 " ranks; legal: >= 0, >= 1", args->n_buckets,
                   args->n_ranks);
  }
  int64_t times;
  if (__builtin_mul_overflow(args->n_ranks, args->n_buckets, &times)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "coalesce: %" PRId64 " buckets on %" PRId64 " ranks; legal: as many times as an int64 counts",
                   args->n_buckets, args->n_ranks);
  }
  if (args->n_buckets > 0 && (!args->bytes || !args->buffer || !args->ready || !args->ended)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "coalesce: bytes, buffer, ready and ended must not be NULL");
  }
  for (int64_t b = 0; b < args->n_buckets; b++) {
    if (args->bytes[b] < 0) {
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                     "coalesce: bucket %" PRId64 " has %" PRId64 " bytes; legal: >= 0", b, args->bytes[b]);
    }
  }
  return TX_OK;
}

/* When bucket b was complete on the last rank, and so all before it, which leave first. */
static double complete(const tx_coalesce_args *args, int64_t b, double before) {
  for (int64_t rank = 0; rank < args->n_ranks; rank++) {
    const double at = (double)args->ready[rank * args->n_buckets + b];
    if (at > before) before = at;
  }
  return before;
}

/* Microseconds until everything had come, on the slowest rank; 0: not known. */
static int64_t whole(const tx_coalesce_args *args) {
  int64_t most = 0;
  for (int64_t rank = 0; args->n_buckets > 0 && rank < args->n_ranks; rank++) {
    if (args->ended[rank] <= 0) return 0;
    if (args->ended[rank] > most) most = args->ended[rank];
  }
  return most;
}

/* Microseconds that the wire takes for a byte; 0: not known. Both ways to know can only be too slow: all of the
 * time has waits for backward in it, and a tail waits for what left before and for other ranks. */
static double each_byte(const tx_coalesce_args *args) {
  double bytes = 0;
  for (int64_t b = 0; b < args->n_buckets; b++)
    bytes += (double)args->bytes[b];
  if (bytes <= 0) return 0;
  double least = (double)whole(args) / bytes;
  for (int64_t rank = 0; args->tail && args->tail_bytes > 0 && rank < args->n_ranks; rank++) {
    if (args->tail[rank] <= 0) continue;
    const double beyond = (double)args->tail[rank] - kMessage;
    const double by_tail = beyond > 0 ? beyond / (double)args->tail_bytes : 0;
    if (by_tail < least) least = by_tail;
  }
  return least;
}

/* Whether there is a bucket b, and neighbours may have it along. */
static int same_buffer(const tx_coalesce_args *args, int64_t first, int64_t b) {
  return b < args->n_buckets && args->buffer[b] == args->buffer[first];
}

/* The end of a message that begins with bucket `first` at the time `now`; *carried: its bytes. each: microseconds for a
 * byte. limit: bytes of joined buckets. */
static int64_t message(const tx_coalesce_args *args, int64_t first, double now, double each, double limit,
                       double *carried) {
  int64_t waiting = 1;
  double at = now;
  while (same_buffer(args, first, first + waiting) && (at = complete(args, first + waiting, at)) <= now)
    waiting++;
  const int64_t most = same_buffer(args, first, first + waiting) ? waiting / 2 : waiting;
  int64_t end = first + 1;
  *carried = (double)args->bytes[first];
  const double least = *carried * each < kWorth ? kShortest : 0; /* even if that has to be waited for */
  while (same_buffer(args, first, end) && (end - first < most || *carried * each < least) &&
         *carried + (double)args->bytes[end] <= limit)
    *carried += (double)args->bytes[end++];
  return end;
}

int64_t tx_coalesce_most(int64_t buffer_bytes, int32_t sharded, int32_t compressed) {
  const int64_t half = buffer_bytes / 2, quarter = buffer_bytes / 4;
  const int64_t small = half < TX_COALESCE_SMALL ? half : TX_COALESCE_SMALL;
  const int64_t wanted = quarter > small ? quarter : small, most = sharded ? TX_COALESCE_SMALL : TX_COALESCE_BYTES;
  const int64_t found = wanted < most ? wanted : most;
  return compressed ? found / 10 * 3 : found;
}

int32_t tx_coalesce_whole(int64_t buffer_bytes) {
  return buffer_bytes <= 2 * TX_COALESCE_SMALL;
}

/* Bytes of the buffer whose first bucket this is. */
static int64_t of_buffer(const tx_coalesce_args *args, int64_t first) {
  int64_t sum = 0;
  for (int64_t b = first; same_buffer(args, first, b); b++)
    if (__builtin_add_overflow(sum, args->bytes[b], &sum)) return INT64_MAX;
  return sum;
}

tx_status tx_compress_pays(const tx_coalesce_args *args, double gbps, tx_compression *found, tx_error *error) {
  TX_FORWARD(check(args, found, "found", error));
  if (!(gbps >= 0)) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "compress: below %g Gbit/s; legal: >= 0", gbps);
  }
  const int64_t took = whole(args);
  const int slow = each_byte(args) * gbps > 8e-3; /* microseconds for a byte, at 1 Gbit/s */
  if (found->on) {
    const int longer = found->plain > 0 && (double)took > kLonger * (double)found->plain;
    found->on = slow && !longer;
    found->slow = 0;
    if (longer) found->resting = kRest;
    return TX_OK;
  }
  found->plain = took;
  if (found->resting > 0) {
    found->resting--;
  } else {
    found->slow = slow ? found->slow + 1 : 0;
    found->on = found->slow >= kSlowInARow;
  }
  return TX_OK;
}

tx_status tx_coalesce(const tx_coalesce_args *args, int64_t *ends, int64_t *n_messages, tx_error *error) {
  TX_FORWARD(check(args, n_messages, "n_messages", error));
  if (args->n_buckets > 0 && !ends) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "coalesce: ends must not be NULL");
  const double each = each_byte(args);
  double now = 0, at = 0, limit = 0;
  *n_messages = 0;
  for (int64_t first = 0; first < args->n_buckets;) {
    if (first == 0 || !same_buffer(args, first - 1, first)) {
      const int64_t all = of_buffer(args, first);
      limit = (double)tx_coalesce_most(all, args->sharded, args->compressed);
      if (limit * each > kLongest) limit = kLongest / each;
      if (!args->compressed && tx_coalesce_whole(all) && (double)all * each <= kAtOnce) limit = (double)all;
      if (whole(args) <= 0) limit = 0;
    }
    at = complete(args, first, at);
    double carried;
    const int64_t end = message(args, first, now > at ? now : at, each, limit, &carried);
    for (int64_t b = first; b < end; b++)
      at = complete(args, b, at);
    now = (now > at ? now : at) + carried * each;
    ends[(*n_messages)++] = first = end;
  }
  return TX_OK;
}
