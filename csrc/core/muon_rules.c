/* What Muon decides without the content of a matrix: legal hyper-parameters, the cost of an orthogonalisation, and the
 * effect of the shape on the learning rate. */
#include <math.h>

#include "csrc/core/fp_mode.h"
#include "csrc/core/muon_iteration.h"
#include "csrc/core/status.h"
#include "csrc/core/text.h"

/* The iteration turns each singular value s of a matrix into a s + b s^3 + c s^5. */
#define MOST_SINGULAR 64.0
#define SINGULAR_VALUES 4096

/* The largest magnitude that a singular value from 0 to 1 reaches in this many steps, found by trying SINGULAR_VALUES
 * of them; INFINITY if one exceeds MOST_SINGULAR. */
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

/* Width of panels. Narrow panels save operations, but lose them again to packing their factors and to smaller blocks in
 * the caches. On one thread, matrices of 256 to 2048 rows take the same time, within a few percent, in panels of 64 to
 * 192 columns, and 6 to 15 % less than in panels of 384 (Zen 5, bf16 and fp32). Processors that multiply tiles lose
 * more to packing, so their panels are wider. Several threads share the columns of a panel, so their panels stay wide
 * too. */
#define NARROW 128
#define NARROW_FROM 256
#define TILED 384
#define WIDE_FROM 640
#define PANELS 2
/* Panels begin at cache lines, so that products have the same bits wherever a matrix is in memory. */
#define PANEL_COLUMNS 64

/* The width of a panel if there are `panels` of them; the last one may be narrower. */
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

/* bf16 products are computed by one thread each, up to sizes at which products and what runs at the same time leave the
 * caches. Measured with 768, 1024 and 2048 rows: 1.45, 1.46 and 1.28 TF/s on two threads, 1.44, 1.42 and 1.29 on one.
 * More threads than LANES were not measured; with those, all threads compute each product. */
#define LANES 4
#define LANE_ROWS 2048

int64_t tx_muon_lanes(int64_t rows, int64_t columns, int32_t dtype, int64_t threads) {
  const int64_t small = rows < columns ? rows : columns;
  return dtype == TX_BF16 && small >= 1 && small <= LANE_ROWS && threads >= 2 && threads <= LANES ? threads : 0;
}

/* A call of torch for one product takes the host of a GPU 10 to 20 us, and one matrix of 768 x 768 does not fill a GPU:
 * an H200 multiplies 12 of them in the time of one, at 467 TF/s. From TX_MUON_STACK elements on, a product takes the
 * GPU longer than its call takes the host. */
int64_t tx_muon_stack(int64_t rows, int64_t columns) {
  if (rows < 1 || columns < 1) return 0;
  if (rows > TX_MUON_STACK / columns) return 1;
  return TX_MUON_STACK / (rows * columns);
}

static double lr_ratio(int64_t rows, int64_t columns, int32_t match_rms_adamw) {
  const double most = (double)(rows > columns ? rows : columns);
  if (match_rms_adamw) return 0.2 * sqrt(most);
  return rows > columns && columns > 0 ? sqrt((double)rows / (double)columns) : 1.0;
}

double tx_muon_lr_ratio(int64_t rows, int64_t columns, int32_t match_rms_adamw) {
  TX_RETURN_UNDER_FP_MODE(double, lr_ratio(rows, columns, match_rms_adamw));
}
