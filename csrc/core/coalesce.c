/* tx_coalesce: which buckets are sent together. Every rank computes it for itself from the same numbers: IEEE doubles,
 * no contraction. */
#include <inttypes.h>

#include "csrc/core/fp_mode.h"
#include "csrc/core/status.h"
#include "csrc/torch_ext_advanced.h"

/* Microseconds on the wire. A message of at least kWorth, which is what it costs processors that are busy, is sent by
 * itself. Shorter ones are joined until the message takes kShortest. That is more than kWorth, because the wire is then
 * as fast as the processors, and every message costs processor time. No joined message takes more than kLongest. */
static const double kWorth = 2.5e3, kShortest = 10e3, kLongest = 16e3;

/* Microseconds of a whole buffer up to which it is one message: there is too little to hide behind backward. */
static const double kAtOnce = 5e3;

/* Least bytes of a message that a bucket is cut into: shorter ones are dominated by overhead. */
static const double kLeastCut = 256 << 10;

static tx_status check(const tx_coalesce_args *args, const int64_t *ends, const int64_t *n_messages, tx_error *error) {
  if (!args || args->size != sizeof *args || !n_messages) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "coalesce: args must begin with TX_COALESCE_ARGS_INIT, and n_messages must not be NULL");
  }
  if (args->n_buckets < 0 || args->world < 1 || !(args->link_gbps >= 0)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "coalesce: %" PRId64 " buckets, %" PRId64 " ranks, a link of %g Gbit/s; legal: >= 0, >= 1, >= 0",
                   args->n_buckets, args->world, args->link_gbps);
  }
  if (args->n_buckets > 0 && (!args->bytes || !args->buffer || !ends)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "coalesce: bytes, buffer and ends must not be NULL");
  }
  for (int64_t b = 0; b < args->n_buckets; b++) {
    if (args->bytes[b] < 0) {
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                     "coalesce: bucket %" PRId64 " has %" PRId64 " bytes; legal: >= 0", b, args->bytes[b]);
    }
  }
  return TX_OK;
}

/* Whether bucket b exists and is in the buffer of bucket `first`, so that they may be joined. */
static int same_buffer(const tx_coalesce_args *args, int64_t first, int64_t b) {
  return b < args->n_buckets && args->buffer[b] == args->buffer[first];
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

/* Bytes of the buffer that begins with bucket `first`. */
static int64_t bytes_of_buffer(const tx_coalesce_args *args, int64_t first) {
  int64_t sum = 0;
  for (int64_t b = first; same_buffer(args, first, b); b++)
    if (__builtin_add_overflow(sum, args->bytes[b], &sum)) return INT64_MAX;
  return sum;
}

/* Microseconds per byte of a bucket: a rank sends the other ranks' parts and, if all ranks want the sum, its own sum to
 * each of them. */
static double each_byte(const tx_coalesce_args *args) {
  const double sent = (1 - 1 / (double)args->world) * (args->sharded ? 1 : 2);
  return sent * 8e-3 / args->link_gbps;
}

/* The most bytes of joined buckets. all: bytes of their buffer. each: microseconds per byte. */
static double most(const tx_coalesce_args *args, int64_t all, double each) {
  if (!args->compressed && tx_coalesce_whole(all) && (double)all * each <= kAtOnce) return (double)all;
  const double limit = (double)tx_coalesce_most(all, args->sharded, args->compressed);
  return limit * each > kLongest ? kLongest / each : limit;
}

static int64_t cuts(int64_t bytes, int64_t world, double link_gbps, int32_t compressed) {
  const tx_coalesce_args args = {.world = world, .link_gbps = link_gbps, .compressed = compressed};
  const double limit = most(&args, bytes, each_byte(&args));
  const double found = (double)bytes / (limit > kLeastCut ? limit : kLeastCut);
  return (int64_t)found + (found > (double)(int64_t)found);
}

int64_t tx_coalesce_cuts(int64_t bytes, int64_t world, double link_gbps, int32_t compressed) {
  const volatile double gbps = link_gbps;
  TX_RETURN_UNDER_FP_MODE(int64_t, bytes < 1 || world < 2 || !(gbps > 0) ? 1 : cuts(bytes, world, gbps, compressed));
}

static tx_status join(const tx_coalesce_args *args, int64_t *ends, int64_t *n_messages, tx_error *error) {
  TX_FORWARD(check(args, ends, n_messages, error));
  const int known = args->link_gbps > 0;
  const double each = known ? each_byte(args) : 0;
  double limit = 0;
  *n_messages = 0;
  for (int64_t first = 0; first < args->n_buckets;) {
    if (known && (first == 0 || !same_buffer(args, first - 1, first)))
      limit = most(args, bytes_of_buffer(args, first), each);
    double carried = (double)args->bytes[first];
    int64_t end = first + 1;
    for (const int joins = carried * each < kWorth; joins && carried * each < kShortest; end++) {
      if (!same_buffer(args, first, end) || carried + (double)args->bytes[end] > limit) break;
      carried += (double)args->bytes[end];
    }
    ends[(*n_messages)++] = first = end;
  }
  return TX_OK;
}

tx_status tx_coalesce(const tx_coalesce_args *args, int64_t *ends, int64_t *n_messages, tx_error *error) {
  TX_RETURN_UNDER_FP_MODE(tx_status, join(args, ends, n_messages, error));
}
