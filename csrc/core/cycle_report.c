/* The reports that ranks exchange at the end of a cycle, and the verdict that every rank derives from them, in the same
 * words.
 *
 * A report consists of
 *   - int64: the cycle and, times TX_CYCLE_STEP, how many steps this rank has made;
 *   - int64: position of a parameter whose gradient is not finite, or -1;
 *   - for TX_CYCLE_UNITS an int64 per unit: the elements that were reduced and, times TX_CYCLE_CALL, how many
 *     reductions;
 *   - if the kind has tells_states, one byte per parameter: TX_STATE_*. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "csrc/core/cycle.h"
#include "csrc/core/text.h"

enum { SHOWN = 8 }; /* names in a message */

static int64_t n_units(const tx_cycle *c) {
  return c->args.kind == TX_CYCLE_UNITS ? c->args.n_buckets : 0;
}

/* The byte of a report at which the parameters' states begin. */
static int64_t states_at(const tx_cycle *c) {
  return 8 * (2 + n_units(c));
}

int64_t tx_cycle_report_bytes(const tx_cycle *c) {
  return states_at(c) + (c->row->tells_states ? c->args.n_params : 0);
}

/* Both numbers may wrap: they are only compared for equality. */
static int64_t place_of(const tx_cycle *c) {
  return c->number % TX_CYCLE_STEP + c->n_steps % (TX_CYCLE_STEP / 4) * TX_CYCLE_STEP;
}

void tx_cycle_report(tx_cycle *c, int64_t nonfinite, const uint8_t *requires_grad, uint8_t *report) {
  const int64_t head[2] = {place_of(c), nonfinite};
  memcpy(report, head, sizeof head);
  if (n_units(c) > 0) memcpy(report + 16, c->units, (size_t)n_units(c) * 8);
  if (!c->row->tells_states) return;
  uint8_t *states = report + states_at(c);
  for (int64_t i = 0; i < c->args.n_params; i++) {
    /* A gradient of a planned bucket may have been ready before its parameter was frozen. torch itself reduces no
     * gradients of frozen parameters. */
    const int frozen = !requires_grad[i] && (!c->row->given || !c->state[i]);
    states[i] = (uint8_t)(c->state[i] | (frozen ? TX_STATE_FROZEN : 0));
  }
}

/* -- texts -------------------------------------------------------------------------------------------------------- */

void tx_cycle_add_names(tx_text *text, const tx_cycle *c, const uint8_t *chosen) {
  int64_t found = 0;
  for (int64_t i = 0; i < c->args.n_params; i++) {
    if (!chosen[i] || found++ >= SHOWN) continue;
    tx_text_add(text, "%s'%s'", found > 1 ? ", " : "", c->args.names[i]);
  }
  if (found > SHOWN) tx_text_add(text, " and %" PRId64 " more", found - SHOWN);
}

/* Appends "rank 1" or "ranks 1, 3": the ranks whose state of parameter i has (is = 1) or has not (is = 0) a bit of
 * `mask`. */
static void add_ranks(tx_text *text, const tx_cycle *c, const uint8_t *const *states, int64_t i, uint8_t mask, int is) {
  int n = 0;
  for (int r = 0; r < c->args.world; r++)
    n += ((states[r][i] & mask) != 0) == is;
  tx_text_add(text, n > 1 ? "ranks " : "rank ");
  const char *separator = "";
  for (int r = 0; r < c->args.world; r++) {
    if (((states[r][i] & mask) != 0) != is) continue;
    tx_text_add(text, "%s%d", separator, r);
    separator = ", ";
  }
}

/* A verdict is a list of parameters and ranks, then what to do about it: REMEDY bytes are reserved for the latter, so
 * that a long list cannot displace it. */
enum { REMEDY = 512 };

static tx_text list_of(tx_cycle *c) {
  return tx_text_in(c->verdict, sizeof c->verdict - REMEDY);
}

static void end_list(tx_cycle *c, const tx_text *list, const char *remedy) {
  const int cut = list->length >= list->capacity;
  tx_text text = {c->verdict, sizeof c->verdict, cut ? list->capacity - 1 : list->length};
  tx_text_add(&text, "%s%s", cut ? " ..." : "", remedy);
  tx_text_repair(c->verdict);
}

static int64_t word_of(const uint8_t *report, int64_t k) {
  int64_t word;
  memcpy(&word, report + 8 * k, sizeof word);
  return word;
}

/* -- verdicts: each function returns whether it has a verdict, and writes it --------------------------------------- */

/* Verdict if the ranks do not end the same cycle after the same number of steps. The cycle alone is not enough: a rank
 * whose loss depended on no parameter reduces and reports nothing, so its next backward would answer the other ranks'
 * previous one. Its number of steps reveals that. */
static int judge_places(tx_cycle *c, const uint8_t *const *reports) {
  const int64_t own = place_of(c);
  for (int r = 0; r < c->args.world; r++) {
    const int64_t theirs = word_of(reports[r], 0);
    if (theirs == own) continue;
    if (theirs % TX_CYCLE_STEP != own % TX_CYCLE_STEP) {
      (void)snprintf(c->verdict, sizeof c->verdict, "rank %d is in gradient cycle %" PRId64 " and rank %d in %" PRId64,
                     r, theirs % TX_CYCLE_STEP, (int)c->args.rank, own % TX_CYCLE_STEP);
    } else {
      (void)snprintf(c->verdict, sizeof c->verdict,
                     "rank %d reduces gradients after a different number of steps than rank %d: one of them called "
                     "step() less often, or was interrupted in it",
                     r, (int)c->args.rank);
    }
    return 1;
  }
  return 0;
}

static int judge_finite(tx_cycle *c, const uint8_t *const *reports) {
  tx_text text = list_of(c);
  const char *separator = "gradients with NaN or Inf before communication (check_for_nan_in_grad): ";
  int found = 0;
  for (int r = 0; r < c->args.world; r++) {
    const int64_t i = word_of(reports[r], 1);
    if (i < 0 || i >= c->args.n_params) continue;
    c->nonfinite[i] = 1;
    tx_text_add(&text, "%s'%s' on rank %d", separator, c->args.names[i], r);
    separator = ", ";
    found = 1;
  }
  if (found) end_list(c, &text, c->row->tells_states ? ". Nothing was stepped; call zero_grad() before going on." : "");
  return found;
}

static int judge_trained(tx_cycle *c, const uint8_t *const *states) {
  tx_text text = list_of(c);
  int64_t found = 0;
  for (int64_t i = 0; i < c->args.n_params; i++) {
    int any = 0, all = 1;
    for (int r = 0; r < c->args.world; r++) {
      const int frozen = (states[r][i] & TX_STATE_FROZEN) != 0;
      any |= frozen;
      all &= frozen;
    }
    if (any == all || found++ >= SHOWN) continue;
    tx_text_add(&text, "%s'%s' is frozen on ",
                found > 1 ? "; " : "the ranks train different parameters: ", c->args.names[i]);
    add_ranks(&text, c, states, i, TX_STATE_FROZEN, 1);
    tx_text_add(&text, " and trainable on ");
    add_ranks(&text, c, states, i, TX_STATE_FROZEN, 0);
  }
  if (!found) return 0;
  if (found > SHOWN) tx_text_add(&text, "; and %" PRId64 " more parameters", found - SHOWN);
  end_list(c, &text, ". Call requires_grad_() on every rank alike, and zero_grad() before going on.");
  return 1;
}

static int is_missing(uint8_t state) {
  return (state & (TX_STATE_READY | TX_STATE_FROZEN)) == 0;
}

/* Appends names of the parameters whose gradient is missing on at least one of the ranks [first, end). Uses `left`,
 * which is not decided yet, as workspace. Returns whether there are any. */
static int add_missing(tx_text *text, tx_cycle *c, const uint8_t *const *states, int first, int end) {
  int found = 0;
  for (int64_t i = 0; i < c->args.n_params; i++) {
    c->left[i] = 0;
    for (int r = first; r < end; r++)
      c->left[i] |= (uint8_t)is_missing(states[r][i]);
    found |= c->left[i];
  }
  if (found) tx_cycle_add_names(text, c, c->left);
  return found;
}

static int judge_missing(tx_cycle *c, const uint8_t *const *states) {
  tx_text text = list_of(c);
  tx_text_add(&text, "no gradient is ready for ");
  int found = 0;
  if (c->row->names_by_rank) {
    for (int r = 0; r < c->args.world; r++) {
      tx_text part = tx_text_in(c->refusal, sizeof c->refusal);
      if (!add_missing(&part, c, states, r, r + 1)) continue;
      tx_text_add(&text, "%s%s on rank %d", found ? "; " : "", c->refusal, r);
      found = 1;
    }
    end_list(
        c, &text,
        ". The loss does not depend on the parameter, or it was replaced after parallelize, or checkpointing runs "
        "with use_reentrant=True. If parameters may be unused, call parallelize(..., find_unused_parameters=True): "
        "they then count as zero. Call zero_grad() before going on.");
  } else {
    found = add_missing(&text, c, states, 0, c->args.world);
    end_list(c, &text,
             ". The loss does not depend on the parameter, or it was replaced after parallelize. If parameters may be "
             "unused, call parallelize(..., find_unused_parameters=True). Call zero_grad() before going on.");
  }
  if (!found) c->verdict[0] = '\0';
  return found;
}

/* Verdict if the ranks did not reduce the same gradients: waiting for them could last forever. */
static int judge_units(tx_cycle *c, const uint8_t *const *reports) {
  for (int64_t u = 0; u < n_units(c); u++) {
    int differ = 0;
    for (int r = 1; r < c->args.world; r++)
      differ |= word_of(reports[r], 2 + u) != word_of(reports[0], 2 + u);
    if (!differ) continue;
    tx_text text = list_of(c);
    tx_text_add(&text, "the ranks reduced different gradients of %s (", c->args.units[u]);
    for (int r = 0; r < c->args.world; r++) {
      const int64_t word = word_of(reports[r], 2 + u);
      tx_text_add(&text, "%srank %d %" PRId64 " elements in %" PRId64 " reductions", r ? ", " : "", r,
                  word % TX_CYCLE_CALL, word / TX_CYCLE_CALL);
    }
    end_list(c, &text,
             "): a parameter was used on some ranks only. With torch >= 2.13, parallelize(..., "
             "find_unused_parameters=True) lets such parameters count as zero; this process group cannot be used any "
             "more");
    return 1;
  }
  return 0;
}

/* Decides `anywhere` (some rank has a gradient) and `left` (every rank has what an earlier reduction left). */
static void agree(tx_cycle *c, const uint8_t *const *states) {
  for (int64_t i = 0; i < c->args.n_params; i++) {
    uint8_t any = 0, all = 0xFF;
    for (int r = 0; r < c->args.world; r++) {
      any |= states[r][i];
      all &= states[r][i];
    }
    c->anywhere[i] = (any & (TX_STATE_READY | TX_STATE_REDUCED | TX_STATE_HELD)) != 0;
    c->left[i] = (all & TX_STATE_REDUCED) != 0;
  }
}

/* Finds the verdict, if there is one. Returns 1 if it is a permanent failure. */
static int judge(tx_cycle *c, const uint8_t *const *reports, const uint8_t *const *states) {
  if (!c->row->tells_states) {
    judge_finite(c, reports);
    return 0;
  }
  const int final = c->row->parts_are_final;
  if (final && judge_trained(c, states)) return 1;
  if (judge_places(c, reports) || judge_units(c, reports)) return 1;
  if (judge_finite(c, reports) || (!final && judge_trained(c, states))) return 0;
  if (!c->args.find_unused && !c->held_back) judge_missing(c, states);
  return 0;
}

void tx_cycle_read(tx_cycle *c, const uint8_t *const *reports, const uint8_t **states, int32_t held_back) {
  if (c->phase == TX_PHASE_RECOVERING) return; /* the reports are about sums that are invalid */
  for (int r = 0; r < c->args.world; r++)
    states[r] = reports[r] + states_at(c);
  c->held_back = held_back;
  c->verdict[0] = '\0';
  if (judge(c, reports, states)) tx_cycle_fail(c, c->verdict);
  if (c->row->tells_states) agree(c, states);
}
