/* What Muon decides without looking at a matrix: what its hyper-parameters may be, what an orthogonalisation costs, and
 * what a shape does to the learning rate. */
#include <math.h>
#include <stdio.h>

#include "csrc/core/status.h"
#include "csrc/core/text.h"

/* The iteration takes each singular value s of a matrix to a s + b s^3 + c s^5. */
#define MOST_SINGULAR 64.0
#define SINGULAR_VALUES 4096

/* The largest size that a singular value from 0 to 1 reaches in so many steps, by trying many of them; NaN or Inf where
 * one leaves every bound. */
static double largest_singular(const double coefficients[3], int64_t steps) {
  double largest = 0.0;
  for (int64_t i = 1; i <= SINGULAR_VALUES; i++) {
    double s = (double)i / SINGULAR_VALUES;
    for (int64_t k = 0; k < steps; k++) {
      const double square = s * s;
      s *= coefficients[0] + square * (coefficients[1] + square * coefficients[2]);
      const double size = fabs(s);
      if (!(size <= MOST_SINGULAR)) return INFINITY;
      if (size > largest) largest = size;
    }
  }
  return largest;
}

static tx_status check_number(double value, int legal, const char *where, const char *name, const char *rule,
                              tx_error *error) {
  if (legal) return TX_OK;
  char number[64];
  tx_text text = tx_text_in(number, sizeof number);
  tx_text_add_float(&text, value);
  return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "%s%s is %s; %s is legal", where ? where : "", name, number, rule);
}

static int is_size(double value) {
  return isfinite(value) && value >= 0;
}

tx_status tx_muon_check_group(const tx_muon_group *group, const char *where, tx_error *error) {
  if (!group) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_muon_check_group: group is NULL");
  static const char size[] = "a finite number >= 0";
  const double c[3] = {group->ns_a, group->ns_b, group->ns_c};
  TX_FORWARD(check_number(group->lr, is_size(group->lr), where, "lr", size, error));
  TX_FORWARD(check_number(group->weight_decay, is_size(group->weight_decay), where, "weight_decay", size, error));
  TX_FORWARD(check_number(group->momentum, group->momentum >= 0 && group->momentum <= 1, where, "momentum",
                          "a number in [0, 1]", error));
  TX_FORWARD(check_number(group->eps, is_size(group->eps), where, "eps", size, error));
  if (group->ns_steps < 1 || group->ns_steps >= 100) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "%sns_steps is %lld; a number in [1, 100) is legal",
                   where ? where : "", (long long)group->ns_steps);
  }
  if (largest_singular(c, group->ns_steps) <= MOST_SINGULAR) return TX_OK;
  return tx_fail(error, TX_ERROR_ILLEGAL_VALUE,
                 "%sns_coefficients are (%g, %g, %g): with these some singular value leaves [0, %g] in %lld ns_steps; "
                 "coefficients that keep them bounded, as (3.4445, -4.775, 2.0315), are legal",
                 where ? where : "", c[0], c[1], c[2], MOST_SINGULAR, (long long)group->ns_steps);
}

/* -- operations --------------------------------------------------------------------------------------------------- */

/* Fewer rows are multiplied at once, and there are no more panels than these, which would save operations: each packs
 * what it multiplies by anew. Of GPT-2 small's matrices, on one thread, standard in bf16 where a processor multiplies
 * tiles (AMX), and Gram in fp32: whole products 181 and 566 ms, two panels 169 and 486, three 197 and 460. */
#define PANELS_FROM 640
#define PANELS 2
/* Panels begin at cache lines, so that products have the same bits wherever a matrix lies. */
#define PANEL_ROWS 64

int64_t tx_muon_panel(int64_t n) {
  if (n < 1) return 0;
  if (n < PANELS_FROM) return n;
  const int64_t blocks = n / (PANELS * PANEL_ROWS) + (n % (PANELS * PANEL_ROWS) != 0);
  return blocks * PANEL_ROWS;
}

/* The part of a symmetric product of n rows that is multiplied out. */
static double panel_share(int64_t n) {
  double elements = 0.0;
  const int64_t panel = tx_muon_panel(n);
  for (int64_t row = 0; row < n; row += panel) {
    const double rows = (double)(n - row < panel ? n - row : panel);
    elements += rows * (double)(n - row);
  }
  return n > 0 ? elements / ((double)n * (double)n) : 1.0;
}

/* 2 n operations for each element of a product over n that is multiplied out. Standard: of each step X X^T, its square,
 * and what X is multiplied by. Gram: of each step the square of G, Q G Q (two products, not in the last step of a
 * round) and the product of all Q so far (not in the first of a round); of each round X X^T and what X is multiplied
 * by. All but the last are symmetric. */
static double operations(int64_t small, int64_t large, double steps, int32_t ns, double restart) {
  const double n = (double)small, oblong = 2 * n * n * (double)large, share = panel_share(small);
  const double square = share * (2 * n * n * n);
  if (ns == TX_MUON_STANDARD) return steps * (square + share * oblong + oblong);
  const double rounds = restart > 0 ? 1 + (steps > restart) : 1;
  return rounds * (share * oblong + oblong) + (steps + 3 * (steps - rounds)) * square;
}

double tx_muon_operations(int64_t rows, int64_t columns, int64_t ns_steps, int32_t ns, int64_t restart) {
  if (rows < 0 || columns < 0 || ns_steps < 1 || ns < TX_MUON_STANDARD || ns > TX_MUON_AUTO || restart < 0) return 0.0;
  const int64_t small = rows < columns ? rows : columns, large = rows < columns ? columns : rows;
  const double standard = operations(small, large, (double)ns_steps, TX_MUON_STANDARD, 0);
  const double gram = operations(small, large, (double)ns_steps, TX_MUON_GRAM, (double)restart);
  if (ns == TX_MUON_AUTO) return gram < standard ? gram : standard;
  return ns == TX_MUON_GRAM ? gram : standard;
}

double tx_muon_lr_ratio(int64_t rows, int64_t columns, int32_t match_rms_adamw) {
  const double most = (double)(rows > columns ? rows : columns);
  if (match_rms_adamw) return 0.2 * sqrt(most);
  return rows > columns && columns > 0 ? sqrt((double)rows / (double)columns) : 1.0;
}
