/* tx_plan_owners: assigns pieces of work of known size to ranks. It makes two kinds of plans, both of which assign the
 * largest pieces first, and returns the better one. The first gives each piece to the rank with the least load so far
 * (LPT, Graham 1969). The second gives it to the first rank on which it fits below a bound, for which it searches
 * (MULTIFIT, Coffman, Garey and Johnson 1978); that is better if a rank has few pieces. */
#include <math.h>

#include "csrc/core/fp_mode.h"
#include "csrc/core/hash.h"
#include "csrc/core/status.h"

typedef struct piece {
  double size;
  int64_t index;
} piece;

/* The content of the caller's workspace. */
typedef struct plan {
  int64_t n, ranks;
  piece *pieces; /* the largest first, equal ones in their order */
  double *loads;
  int32_t *owners; /* rank of each entry of pieces */
} plan;

/* Steps of the bisection: after the twelfth the interval is 1/4096 of the first one. */
#define BOUNDS 12
/* A plan whose largest load is at most this factor above the lower bound is not improved further. */
#define NEAR 1.005

int64_t tx_plan_owners_bytes(int64_t n, int64_t ranks) {
  const int64_t most = INT64_C(1) << 40;
  if (n < 0 || n > most || ranks < 1 || ranks > INT32_MAX) return 0;
  return n * (int64_t)sizeof(piece) + ranks * (int64_t)sizeof(double) + n * (int64_t)sizeof(int32_t);
}

static int comes_before(piece a, piece b) {
  return a.size != b.size ? a.size > b.size : a.index < b.index;
}

/* Moves the piece at `at` down to its place in a heap of n that has the last piece in the order on top. */
static void sift(piece *pieces, int64_t at, int64_t n) {
  const piece moved = pieces[at];
  for (int64_t child = 2 * at + 1; child < n; child = 2 * at + 1) {
    if (child + 1 < n && comes_before(pieces[child], pieces[child + 1])) child++;
    if (!comes_before(moved, pieces[child])) break;
    pieces[at] = pieces[child];
    at = child;
  }
  pieces[at] = moved;
}

/* Heapsort, because qsort may allocate. */
static void sort(piece *pieces, int64_t n) {
  for (int64_t i = n / 2 - 1; i >= 0; i--)
    sift(pieces, i, n);
  for (int64_t end = n - 1; end > 0; end--) {
    const piece last = pieces[0];
    pieces[0] = pieces[end];
    pieces[end] = last;
    sift(pieces, 0, end);
  }
}

static double largest_load(const plan *p) {
  double most = 0.0;
  for (int64_t r = 0; r < p->ranks; r++)
    most = p->loads[r] > most ? p->loads[r] : most;
  return most;
}

static void give(plan *p, int64_t i, int64_t rank) {
  p->loads[rank] += p->pieces[i].size;
  p->owners[i] = (int32_t)rank;
}

/* Gives each piece to the rank with the least load so far. */
static void plan_greedy(plan *p) {
  memset(p->loads, 0, (size_t)p->ranks * sizeof *p->loads);
  for (int64_t i = 0; i < p->n; i++) {
    int64_t least = 0;
    for (int64_t r = 1; r < p->ranks; r++)
      if (p->loads[r] < p->loads[least]) least = r;
    give(p, i, least);
  }
}

/* Gives each piece to the first rank whose load stays within `bound`. Returns 0 if there is none for some piece. */
static int plan_first_fit(plan *p, double bound) {
  memset(p->loads, 0, (size_t)p->ranks * sizeof *p->loads);
  for (int64_t i = 0; i < p->n; i++) {
    int64_t rank = 0;
    while (rank < p->ranks && p->loads[rank] + p->pieces[i].size > bound)
      rank++;
    if (rank == p->ranks) return 0;
    give(p, i, rank);
  }
  return 1;
}

/* A lower bound of every plan's largest load. It is the largest of: the mean; the largest piece; and for each k, the
 * k + 1 smallest of the k * ranks + 1 largest pieces together, since some rank has k + 1 of these. */
static double least_bound(const plan *p) {
  double sum = 0.0, bound = p->n ? p->pieces[0].size : 0.0;
  for (int64_t i = 0; i < p->n; i++)
    sum += p->pieces[i].size;
  if (sum / (double)p->ranks > bound) bound = sum / (double)p->ranks;
  for (int64_t k = 1; k * p->ranks < p->n; k++) {
    double together = 0.0;
    for (int64_t i = k * p->ranks - k; i <= k * p->ranks; i++)
      together += i < 0 ? 0.0 : p->pieces[i].size;
    bound = together > bound ? together : bound;
  }
  return bound;
}

/* Writes the owners in the caller's order of pieces. */
static void put_owners(const plan *p, int32_t *owners) {
  for (int64_t i = 0; i < p->n; i++)
    owners[p->pieces[i].index] = p->owners[i];
}

static int64_t fingerprint_of(int64_t n, const double *sizes, int64_t ranks, const int32_t *owners) {
  uint64_t hash = tx_hash_int(tx_hash_int(tx_hash_begin(), n), ranks);
  for (int64_t i = 0; i < n; i++) {
    int64_t bits;
    memcpy(&bits, &sizes[i], sizeof bits);
    hash = tx_hash_int(tx_hash_int(hash, bits), owners[i]);
  }
  return (int64_t)(tx_hash_end(hash) >> 1);
}

static tx_status check(int64_t n, const double *sizes, int64_t ranks, const void *workspace, const int32_t *owners,
                       tx_error *error) {
  if (tx_plan_owners_bytes(n, ranks) == 0 || !workspace || (uintptr_t)workspace % sizeof(int64_t) ||
      (n > 0 && (!sizes || !owners))) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_plan_owners: %lld pieces for %lld ranks, workspace at %p",
                   (long long)n, (long long)ranks, workspace);
  }
  for (int64_t i = 0; i < n; i++) {
    if (!isfinite(sizes[i]) || sizes[i] < 0)
      return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "sizes[%lld] is %g; a finite number >= 0 is legal", (long long)i,
                     sizes[i]);
  }
  return TX_OK;
}

static void find_owners(plan p, const double *sizes, int32_t *owners) {
  const int64_t n = p.n;
  for (int64_t i = 0; i < n; i++)
    p.pieces[i] = (piece){sizes[i], i};
  sort(p.pieces, n);
  plan_greedy(&p);
  put_owners(&p, owners);
  double low = least_bound(&p), high = largest_load(&p);
  for (int i = 0; i < BOUNDS && high > NEAR * low; i++) {
    const double bound = low + (high - low) / 2.0;
    if (plan_first_fit(&p, bound)) {
      put_owners(&p, owners);
      high = largest_load(&p);
    } else {
      low = bound; /* a lower bound for this kind of plan only */
    }
  }
}

static tx_status plan_owners(int64_t n, const double *sizes, int64_t ranks, void *workspace, int32_t *owners,
                             tx_error *error) {
  TX_FORWARD(check(n, sizes, ranks, workspace, owners, error));
  plan p = {.n = n, .ranks = ranks, .pieces = workspace};
  p.loads = (double *)(p.pieces + n);
  p.owners = (int32_t *)(p.loads + ranks);
  find_owners(p, sizes, owners);
  return TX_OK;
}

tx_status tx_plan_owners(int64_t n, const double *sizes, int64_t ranks, void *workspace, int32_t *owners,
                         int64_t *fingerprint, tx_error *error) {
  const tx_fp_mode saved = tx_fp_enter();
  const volatile tx_status status = plan_owners(n, sizes, ranks, workspace, owners, error);
  tx_fp_leave(saved);
  if (status == TX_OK && fingerprint) *fingerprint = fingerprint_of(n, sizes, ranks, owners);
  return status;
}
