/* tx_muon_exchange: the step of matrices that are sharded over ranks. Which rank does what, when, and how many bytes it
 * takes. */
#include "csrc/core/hash.h"
#include "csrc/core/muon_memory.h"
#include "csrc/core/status.h"
#include "csrc/torch_ext_advanced.h"

/* The most elements of all matrices together, so that a few times their bytes fit into an int64. */
#define LARGEST (INT64_C(1) << 56)

/* One block of the caller's memory: this struct, then the arrays that it points to. */
struct tx_muon_exchange {
  tx_muon_exchange_args args;
  tx_muon_action current;
  int64_t n_rounds;
  int64_t turn;   /* -1 ... n_rounds */
  int32_t step;   /* index into kSteps */
  int32_t handed; /* whether this step's own action was returned */
  int64_t cursor; /* next rank whose matrix to look at before the step's action, or next parameter after it */
  int64_t failed;
  int64_t held, peak; /* bytes */
  int64_t *order;     /* [n] matrices by owner, ascending */
  int64_t *first;     /* [world + 1] index in `order` of each owner's first matrix */
  int64_t *last;      /* [n_params] the last round of a parameter's matrices; -1: it has none */
  uint8_t *state;     /* [n_params] */
  uint8_t *item;      /* [n_params] bytes per element when sent */
};

/* Bits of `state`. */
enum { TX_MUON_MADE = 1, TX_MUON_COMPLETE = 2, TX_MUON_FAILED = 4 };

/* The steps of each turn, in order; `after` is added to the turn to give the step's round. */
static const struct {
  int32_t kind;
  int32_t after;
} kSteps[] = {
    {TX_MUON_RECEIVE, 0}, {TX_MUON_GATHER, 1}, {TX_MUON_MULTIPLY, 0}, {TX_MUON_SCATTER, 0}, {TX_MUON_INSTALL, -1},
};
#define STEPS (int32_t)(sizeof kSteps / sizeof *kSteps)

/* -- who has what ------------------------------------------------------------------------------------------------ */

static int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static int64_t most(int64_t a, int64_t b) {
  return a > b ? a : b;
}

static int64_t item_bytes(const tx_muon_matrix *m) {
  return m->wire_dtype == TX_BF16 ? 2 : 4;
}

static tx_muon_run run_of(const tx_muon_exchange_args *args, int64_t param, int64_t rank) {
  return args->runs[param * args->world + rank];
}

int64_t tx_muon_exchange_matrix(const tx_muon_exchange *x, int64_t round, int64_t rank) {
  const int64_t at = x->first[rank] + round;
  return round >= 0 && at < x->first[rank + 1] ? x->order[at] : -1;
}

tx_muon_run tx_muon_exchange_part(const tx_muon_exchange *x, int64_t matrix, int64_t rank) {
  const tx_muon_matrix *m = &x->args.matrices[matrix];
  const tx_muon_run run = run_of(&x->args, m->param, rank);
  const tx_muon_run found = {most(run.begin, m->begin), least(run.end, m->begin + m->rows * m->columns)};
  return found.begin < found.end ? found : (tx_muon_run){0, 0};
}

static int64_t part_bytes(const tx_muon_exchange *x, int64_t matrix, int64_t rank) {
  if (matrix < 0) return 0;
  const tx_muon_run part = tx_muon_exchange_part(x, matrix, rank);
  return (part.end - part.begin) * item_bytes(&x->args.matrices[matrix]);
}

void tx_muon_exchange_sizes(const tx_muon_exchange *x, int64_t round, int64_t *receive_bytes, int64_t *send_bytes) {
  for (int64_t r = 0; r < x->args.world; r++) {
    receive_bytes[r] = part_bytes(x, tx_muon_exchange_matrix(x, round, x->args.rank), r);
    send_bytes[r] = part_bytes(x, tx_muon_exchange_matrix(x, round, r), x->args.rank);
  }
}

/* Bytes of this rank's matrix of a round. */
static int64_t own_bytes(const tx_muon_exchange *x, int64_t round) {
  const int64_t own = tx_muon_exchange_matrix(x, round, x->args.rank);
  if (own < 0) return 0;
  const tx_muon_matrix *m = &x->args.matrices[own];
  return m->rows * m->columns * item_bytes(m);
}

/* Bytes of this rank's parts of all ranks' matrices of a round. */
static int64_t parts_bytes(const tx_muon_exchange *x, int64_t round) {
  int64_t sum = 0;
  for (int64_t r = 0; r < x->args.world; r++)
    sum += part_bytes(x, tx_muon_exchange_matrix(x, round, r), x->args.rank);
  return sum;
}

/* Bytes of this rank's elements of a parameter, in the dtype in which they are sent. */
static int64_t momentum_bytes(const tx_muon_exchange *x, int64_t param) {
  const tx_muon_run run = run_of(&x->args, param, x->args.rank);
  return (run.end - run.begin) * x->item[param];
}

/* -- init ------------------------------------------------------------------------------------------------------- */

static int is_float(int32_t dtype) {
  return dtype == TX_F32 || dtype == TX_BF16;
}

static int fits(const tx_muon_exchange_args *args, const tx_muon_matrix *m) {
  int64_t numel, end;
  return m->param >= 0 && m->param < args->n_params && m->begin >= 0 && m->rows > 0 && m->columns > 0 &&
         m->owner >= 0 && m->owner < args->world && is_float(m->wire_dtype) && is_float(m->product_dtype) &&
         !__builtin_mul_overflow(m->rows, m->columns, &numel) && !__builtin_add_overflow(m->begin, numel, &end) &&
         end <= LARGEST;
}

/* Whether the non-empty runs of the ranks follow each other from 0 to the end of the last matrix. */
static int are_runs(const tx_muon_exchange_args *args, int64_t param, int64_t end) {
  int64_t at = 0;
  for (int64_t r = 0; r < args->world; r++) {
    const tx_muon_run run = run_of(args, param, r);
    if (run.begin == run.end) continue;
    if (run.begin != at || run.end < at) return 0;
    at = run.end;
  }
  return at == end;
}

static tx_status check(const tx_muon_exchange_args *args, tx_error *error) {
  if (!args || args->size != sizeof *args || args->n < 0 || args->n > LARGEST || args->n_params < 0 ||
      args->n_params > LARGEST || (args->n > 0 && (!args->matrices || !args->runs)) || args->world < 1 ||
      args->world > INT32_MAX || args->rank < 0 || args->rank >= args->world) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_muon_exchange: args must begin with TX_MUON_EXCHANGE_ARGS_INIT, n and n_params must be >= 0, "
                   "matrices and runs not NULL, and 0 <= rank < world");
  }
  int64_t numel = 0;
  for (int64_t i = 0; i < args->n; i++) {
    const tx_muon_matrix *m = &args->matrices[i], *before = i > 0 ? m - 1 : NULL;
    const int goes_on = before && before->param == m->param;
    const int64_t begin = goes_on ? before->begin + before->rows * before->columns : 0;
    const int last = i + 1 == args->n || m[1].param != m->param;
    const int legal = fits(args, m) && m->begin == begin && (!before || before->param <= m->param) &&
                      (!goes_on || before->wire_dtype == m->wire_dtype) && (numel += m->rows * m->columns) <= LARGEST &&
                      (!last || are_runs(args, m->param, begin + m->rows * m->columns));
    if (!legal) {
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                     "tx_muon_exchange: matrices[%lld] is %lld x %lld from element %lld of parameter %lld, of rank "
                     "%d; legal: of one parameter after the other, each from its first element to its last, which "
                     "the ranks' runs hold in their order",
                     (long long)i, (long long)m->rows, (long long)m->columns, (long long)m->begin, (long long)m->param,
                     (int)m->owner);
    }
  }
  return TX_OK;
}

int64_t tx_muon_exchange_room(const tx_muon_exchange_args *args) {
  const int64_t numbers = args->n + args->world + 1 + args->n_params;
  return (int64_t)sizeof(tx_muon_exchange) + numbers * (int64_t)sizeof(int64_t) + (args->n_params + 3) / 4 * 8;
}

int64_t tx_muon_exchange_bytes(const tx_muon_exchange_args *args) {
  return check(args, NULL) == TX_OK ? tx_muon_exchange_room(args) : 0;
}

/* Sorts the matrices by owner, and finds the number of rounds and each parameter's last round. */
static void plan_rounds(tx_muon_exchange *x) {
  const tx_muon_exchange_args *args = &x->args;
  memset(x->first, 0, (size_t)(args->world + 1) * sizeof *x->first);
  for (int64_t i = 0; i < args->n; i++)
    x->first[args->matrices[i].owner + 1]++;
  for (int64_t r = 0; r < args->world; r++) {
    x->n_rounds = most(x->n_rounds, x->first[r + 1]);
    x->first[r + 1] += x->first[r];
  }
  for (int64_t p = 0; p < args->n_params; p++)
    x->last[p] = -1;
  for (int64_t i = 0; i < args->n; i++) {
    const tx_muon_matrix *m = &args->matrices[i];
    x->order[x->first[m->owner]++] = i;
    x->item[m->param] = (uint8_t)item_bytes(m);
  }
  for (int64_t r = args->world; r > 0; r--) /* the loop above moved each entry to the start of the next owner */
    x->first[r] = x->first[r - 1];
  x->first[0] = 0;
  for (int64_t r = 0; r < args->world; r++) {
    for (int64_t at = x->first[r]; at < x->first[r + 1]; at++) {
      const int64_t param = args->matrices[x->order[at]].param;
      x->last[param] = most(x->last[param], at - x->first[r]);
    }
  }
}

tx_status tx_muon_exchange_init(void *memory, const tx_muon_exchange_args *args, tx_muon_exchange **exchange,
                                tx_error *error) {
  TX_FORWARD(check(args, error));
  if (!exchange) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_muon_exchange: exchange is NULL");
  if (!memory || (uintptr_t)memory % sizeof(int64_t))
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_muon_exchange: memory at %p; a multiple of 8 is legal",
                   memory);
  tx_muon_exchange *x = memory;
  *x = (tx_muon_exchange){.args = *args, .turn = -1, .failed = -1};
  x->order = (int64_t *)(x + 1);
  x->first = x->order + args->n;
  x->last = x->first + args->world + 1;
  x->state = (uint8_t *)(x->last + args->n_params);
  x->item = x->state + args->n_params;
  memset(x->state, 0, (size_t)args->n_params);
  plan_rounds(x);
  *exchange = x;
  return TX_OK;
}

/* -- next ------------------------------------------------------------------------------------------------------- */

/* Subtracts the bytes that the caller may free after the last action. */
static void leave(tx_muon_exchange *x) {
  const int64_t round = x->current.round;
  switch (x->current.kind) {
    case TX_MUON_RECEIVE:
      x->held -= parts_bytes(x, round);
      break;
    case TX_MUON_INSTALL:
      x->held -= own_bytes(x, round) + parts_bytes(x, round);
      break;
    case TX_MUON_UPDATE:
      x->held -= momentum_bytes(x, x->current.param);
      break;
    default:
      break;
  }
}

static int32_t hand_out(tx_muon_exchange *x, tx_muon_action *action, int32_t kind, int64_t param, int64_t round) {
  x->current = (tx_muon_action){.kind = kind, .param = param, .round = round};
  switch (kind) {
    case TX_MUON_MOMENTUM:
      x->held += momentum_bytes(x, param);
      break;
    case TX_MUON_GATHER:
      x->held += own_bytes(x, round) + parts_bytes(x, round);
      break;
    case TX_MUON_SCATTER:
      x->held += parts_bytes(x, round);
      break;
    default:
      break;
  }
  x->peak = most(x->peak, x->held);
  *action = x->current;
  return kind != TX_MUON_DONE;
}

/* The next parameter whose momentum this rank must compute for a round; -1: none. */
static int64_t next_momentum(tx_muon_exchange *x, int64_t round) {
  for (; x->cursor < x->args.world; x->cursor++) {
    const int64_t matrix = tx_muon_exchange_matrix(x, round, x->cursor);
    if (part_bytes(x, matrix, x->args.rank) == 0) continue;
    const int64_t param = x->args.matrices[matrix].param;
    if (x->state[param] & TX_MUON_MADE) continue;
    x->state[param] |= TX_MUON_MADE;
    return param;
  }
  return -1;
}

/* The next parameter whose last matrix came back in this round; -1: none. Includes parameters of which this rank has no
 * elements, since their steps are counted too. */
static int64_t completed(tx_muon_exchange *x, int64_t round) {
  for (; x->cursor < x->args.n_params; x->cursor++) {
    if (x->last[x->cursor] != round || (x->state[x->cursor] & TX_MUON_COMPLETE)) continue;
    x->state[x->cursor] |= TX_MUON_COMPLETE;
    return x->cursor;
  }
  return -1;
}

static void advance_step(tx_muon_exchange *x) {
  x->cursor = x->handed = 0;
  if (++x->step < STEPS) return;
  x->step = 0;
  x->turn++;
}

int32_t tx_muon_exchange_next(tx_muon_exchange *x, tx_muon_action *action) {
  leave(x);
  for (; x->turn <= x->n_rounds; advance_step(x)) {
    const int32_t kind = kSteps[x->step].kind;
    const int64_t round = x->turn + kSteps[x->step].after;
    if (round < 0 || round >= x->n_rounds) continue;
    if (kind == TX_MUON_MULTIPLY && tx_muon_exchange_matrix(x, round, x->args.rank) < 0) continue;
    int64_t param = kind == TX_MUON_GATHER ? next_momentum(x, round) : -1;
    if (param >= 0) return hand_out(x, action, TX_MUON_MOMENTUM, param, round);
    if (!x->handed) {
      x->handed = 1;
      return hand_out(x, action, kind, -1, round);
    }
    param = kind == TX_MUON_INSTALL ? completed(x, round) : -1;
    if (param < 0) continue;
    const int failed = (x->state[param] & TX_MUON_FAILED) != 0;
    return hand_out(x, action, failed ? TX_MUON_DISCARD : TX_MUON_UPDATE, param, round);
  }
  return hand_out(x, action, TX_MUON_DONE, -1, -1);
}

void tx_muon_exchange_fail(tx_muon_exchange *x, int64_t matrix) {
  x->state[x->args.matrices[matrix].param] |= TX_MUON_FAILED;
  if (x->failed < 0 || matrix < x->failed) x->failed = matrix;
}

int64_t tx_muon_exchange_failed(const tx_muon_exchange *x) {
  return x->failed;
}

int64_t tx_muon_fingerprint(int64_t plan, int64_t n, const tx_muon_matrix *matrices, const int64_t *ids) {
  uint64_t hash = tx_hash_int(tx_hash_int(tx_hash_begin(), plan), n);
  for (int64_t i = 0; i < n; i++) {
    const tx_muon_matrix *m = &matrices[i];
    const int64_t of[] = {ids[i], m->begin, m->rows, m->columns, m->wire_dtype, m->product_dtype};
    for (size_t k = 0; k < sizeof of / sizeof *of; k++)
      hash = tx_hash_int(hash, of[k]);
  }
  return (int64_t)(tx_hash_end(hash) >> 1);
}

int64_t tx_muon_exchange_peak(const tx_muon_exchange_args *args, void *memory) {
  tx_muon_exchange *x;
  if (tx_muon_exchange_init(memory, args, &x, NULL) != TX_OK) return -1;
  for (tx_muon_action action; tx_muon_exchange_next(x, &action);)
    continue;
  return x->peak;
}
