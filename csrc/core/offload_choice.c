/* tx_offload_choose: which parameters' states are offloaded for a given fraction. */
#include <inttypes.h>
#include <math.h>

#include "csrc/core/fp_mode.h"
#include "csrc/core/status.h"
#include "csrc/torch_ext_advanced.h"

/* Holds the product of a 64-bit number of bytes and the 53 bits of a fraction. */
__extension__ typedef unsigned __int128 uint128;

/* Whether i is visited before j: the larger first, equal ones in their order. */
static int is_before(const int64_t *bytes, int64_t i, int64_t j) {
  return bytes[i] != bytes[j] ? bytes[i] > bytes[j] : i < j;
}

/* Restores the heap below `at`: moves heap[at] down until no child comes before it. */
static void sift(const int64_t *bytes, int64_t *heap, int64_t at, int64_t n) {
  for (int64_t child; (child = 2 * at + 1) < n; at = child) {
    if (child + 1 < n && is_before(bytes, heap[child + 1], heap[child])) child++;
    if (!is_before(bytes, heap[child], heap[at])) return;
    const int64_t moved = heap[at];
    heap[at] = heap[child];
    heap[child] = moved;
  }
}

static tx_status choose(const int64_t *bytes, int64_t n, double fraction, int64_t *heap, int32_t *chosen,
                        tx_error *error) {
  if (!(fraction >= 0 && fraction <= 1)) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "offload_fraction is %.17g; a number in [0, 1] is legal", fraction);
  }
  if (n < 0 || (n > 0 && (!bytes || !heap || !chosen))) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_offload_choose: %" PRId64 " parameters; legal: >= 0, and no array NULL", n);
  }
  int64_t sum = 0;
  for (int64_t i = 0; i < n; i++) {
    if (bytes[i] < 0 || __builtin_add_overflow(sum, bytes[i], &sum)) {
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                     "tx_offload_choose: bytes[%" PRId64 "] is %" PRId64 "; legal: >= 0, a sum that an int64 holds", i,
                     bytes[i]);
    }
  }
  for (int64_t i = 0; i < n; i++) {
    heap[i] = i;
    chosen[i] = 0;
  }
  /* Exact integer arithmetic, because all ranks must choose alike: twice the wanted bytes, rounded down. */
  int exponent;
  const uint128 product = (uint128)ldexp(frexp(fraction, &exponent), 53) * (uint64_t)sum;
  const int shift = 52 - exponent;
  uint64_t twice = shift < 128 ? (uint64_t)(product >> shift) : 0;
  const int is_whole = shift < 128 ? product >> shift << shift == product : product == 0;

  int64_t smallest = -1; /* of those not chosen; all of them are larger than what is still missing */
  for (int64_t at = n / 2; at-- > 0;)
    sift(bytes, heap, at, n);
  for (int64_t rest = n; rest > 0 && bytes[heap[0]] > 0; sift(bytes, heap, 0, rest)) {
    const int64_t i = heap[0];
    heap[0] = heap[--rest];
    if (2 * (uint64_t)bytes[i] <= twice) {
      chosen[i] = 1;
      twice -= 2 * (uint64_t)bytes[i];
    } else if (smallest < 0 || bytes[i] < bytes[smallest]) {
      smallest = i;
    }
  }
  if (smallest >= 0 && ((uint64_t)bytes[smallest] < twice || ((uint64_t)bytes[smallest] == twice && !is_whole))) {
    chosen[smallest] = 1;
  }
  return TX_OK;
}

tx_status tx_offload_choose(const int64_t *bytes, int64_t n, double fraction, int64_t *heap, int32_t *chosen,
                            tx_error *error) {
  const volatile double share = fraction;
  TX_RETURN_UNDER_FP_MODE(tx_status, choose(bytes, n, share, heap, chosen, error));
}
