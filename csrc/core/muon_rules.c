/* What Muon decides without looking at a matrix: what its hyper-parameters may be, what an orthogonalisation costs, and
 * what a shape does to the learning rate. */
#include <math.h>

#include "csrc/core/fp_mode.h"
#include "csrc/core/muon_iteration.h"
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

static tx_status check_group(const tx_muon_group *group, const char *where, tx_error *error) {
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

tx_status tx_muon_check_group(const tx_muon_group *group, const char *where, tx_error *error) {
  TX_RETURN_UNDER_FP_MODE(tx_status, check_group(group, where, error));
}

/* -- operations --------------------------------------------------------------------------------------------------- */

/* How narrow panels may be before what they save is lost again, to packing their factors and to smaller blocks in the
 * caches. Made by one thread, matrices of 256 to 2048 rows take as long in panels of 64 to 192 columns, within a few
 * percent, and 6 to 15 % less than in panels of 384 (Zen 5, bf16 and fp32); processors that multiply tiles have packed
 * more by then. Several threads share out the columns of a panel, so it stays wide. */
#define NARROW 128
#define NARROW_FROM 256
#define TILED 384
#define WIDE_FROM 640
#define PANELS 2
/* Panels begin at cache lines, so that products have the same bits wherever a matrix lies. */
#define PANEL_COLUMNS 64

/* The width of so many panels, the last of which may be narrower. */
static int64_t even_panel(int64_t n, int64_t panels) {
  const int64_t columns = panels * PANEL_COLUMNS;
  return (n / columns + (n % columns != 0)) * PANEL_COLUMNS;
}

int64_t tx_muon_panel(int64_t n, int32_t dtype, int64_t threads, int32_t tiles) {
  if (n < 1) return 0;
  if (threads <= 1 && !(tiles && dtype == TX_BF16)) return n < NARROW_FROM ? n : NARROW;
  if (n < WIDE_FROM) return n;
  return even_panel(n, threads <= 1 ? n / TILED + (n % TILED != 0) : PANELS);
}

double tx_muon_operations(int64_t rows, int64_t columns, int64_t ns_steps, int32_t ns, int64_t restart, int64_t panel) {
  const tx_muon_iteration iteration = {
      .rows = rows, .columns = columns, .steps = ns_steps, .restart = restart, .panel = panel, .ns = ns};
  return tx_muon_count(&iteration);
}

/* Products of bf16 are made by one thread up to sizes where products and what is beside them leave the caches: on two
 * threads, of 768, 1024 and 2048 rows, 1.45, 1.46 and 1.28 TF/s, and 1.44, 1.42 and 1.29 on one. More threads than
 * LANES were not measured: there products are left to all of them. */
#define LANES 4
#define LANE_ROWS 2048

int64_t tx_muon_lanes(int64_t rows, int64_t columns, int32_t dtype, int64_t threads) {
  const int64_t small = rows < columns ? rows : columns;
  return dtype == TX_BF16 && small >= 1 && small <= LANE_ROWS && threads >= 2 && threads <= LANES ? threads : 0;
}

static double lr_ratio(int64_t rows, int64_t columns, int32_t match_rms_adamw) {
  const double most = (double)(rows > columns ? rows : columns);
  if (match_rms_adamw) return 0.2 * sqrt(most);
  return rows > columns && columns > 0 ? sqrt((double)rows / (double)columns) : 1.0;
}

double tx_muon_lr_ratio(int64_t rows, int64_t columns, int32_t match_rms_adamw) {
  TX_RETURN_UNDER_FP_MODE(double, lr_ratio(rows, columns, match_rms_adamw));
}
