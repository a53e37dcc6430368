/* Newton-Schulz iterations: they find about the nearest matrix with orthonormal rows or columns, with matrix products
 * alone.
 *
 * A step turns each singular value s of X into a s + b s^3 + c s^5: X' = Q X with Q = a + b G + c G^2, G = X X^T.
 *
 * Note: Gram Newton-Schulz (Dao AI Lab, 2026). All Q are polynomials of the first G, so they commute, and the product
 * of all steps is P X with P = Q_n ... Q_1. The iteration needs only the small square matrices: G' = Q G Q, P' = Q P.
 * The rounding errors of G's small eigenvalues, which are the squares of X's singular values, grow from step to step.
 * So with products in bf16 the iteration restarts from P X after `restart` steps.
 *
 * Note: symmetric products. X X^T and the products of polynomials of G are symmetric. So each is computed in panels of
 * columns, from its diagonal block down (tx_muon_panel), and the rest is copied from the other side of the diagonal.
 * Panels are columns, because torch packs the right factor, of which each panel then uses only its own columns.
 *
 * Note: factors. torch generates code for each value of beta, which takes as long as half a product of 768 in bf16, and
 * caches it. So betas must be the coefficients, whatever the matrix, and the caller divides the matrix by its norm. */
#include "csrc/core/muon_iteration.h"

#include <stddef.h>

#include "csrc/core/fp_mode.h"

#define MOST_STEPS 100

typedef struct run {
  const tx_muon_iteration *it;
  tx_muon_make make;
  void *ctx;
  int64_t small;
  int wide; /* whether rows <= columns */
  int stopped;
  int32_t x, other; /* operands that currently hold X and its result */
} run;

static void hand_out(run *r, const tx_muon_product *product) {
  if (!r->stopped) r->stopped = r->make(r->ctx, product);
}

/* out = beta added + alpha left right, which is known to be symmetric. */
static void symmetric(run *r, tx_muon_product of) {
  const int64_t n = r->small, panel = r->it->panel;
  of.kind = TX_MUON_ADD_PRODUCT;
  for (int64_t column = 0; column < n; column += panel) {
    of.row = of.column = column;
    of.rows = n - column;
    of.columns = n - column < panel ? n - column : panel;
    hand_out(r, &of);
  }
  if (panel < n) {
    const tx_muon_product mirrored = {.kind = TX_MUON_MIRRORED, .out = of.out, .rows = n, .columns = n};
    hand_out(r, &mirrored);
  }
}

static void square(run *r, int32_t out, int32_t left, int32_t right) {
  symmetric(r, (tx_muon_product){.out = out, .added = out, .left = left, .right = right, .alpha = 1.0});
}

/* q = b g + c g^2 */
static void polynomial(run *r, int32_t q, int32_t g) {
  const tx_muon_iteration *it = r->it;
  symmetric(r, (tx_muon_product){.out = q, .added = g, .left = g, .right = g, .beta = it->b, .alpha = it->c});
}

/* g = x x^T or x^T x, whichever is smaller. */
static void gram_of_x(run *r, int32_t g) {
  symmetric(r, (tx_muon_product){.out = g,
                                 .added = g,
                                 .left = r->x,
                                 .right = r->x,
                                 .left_transposed = !r->wide,
                                 .right_transposed = r->wide,
                                 .alpha = 1.0});
}

/* x becomes keep x + square x, or keep x + x square if x has more rows than columns. The square is symmetric. */
static void multiply_x(run *r, int32_t by, double keep) {
  const tx_muon_product product = {.kind = TX_MUON_ADD_PRODUCT,
                                   .out = r->other,
                                   .added = keep != 0.0 ? r->x : r->other,
                                   .left = r->wide ? by : r->x,
                                   .right = r->wide ? r->x : by,
                                   .rows = r->it->rows,
                                   .columns = r->it->columns,
                                   .beta = keep,
                                   .alpha = 1.0};
  hand_out(r, &product);
  const int32_t made = r->other;
  r->other = r->x;
  r->x = made;
}

static int32_t by_matrix(run *r) {
  const int32_t g = TX_MUON_SQUARES, z = g + 1;
  for (int64_t k = 0; k < r->it->steps; k++) {
    gram_of_x(r, g);
    polynomial(r, z, g);
    multiply_x(r, z, r->it->a);
  }
  return z;
}

static void swap(int32_t *a, int32_t *b) {
  const int32_t kept = *a;
  *a = *b;
  *b = kept;
}

static int32_t by_gram(run *r) {
  const int32_t g = TX_MUON_SQUARES;
  int32_t q = g + 1, p = g + 2, t = g + 3;
  int64_t left = r->it->steps, steps = r->it->restart > 0 && r->it->restart < left ? r->it->restart : left;
  for (; left > 0; left -= steps, steps = left) {
    gram_of_x(r, g);
    for (int64_t k = 0; k < steps; k++) {
      polynomial(r, q, g);
      const tx_muon_product shifted = {
          .kind = TX_MUON_SHIFTED, .out = q, .rows = r->small, .columns = r->small, .alpha = r->it->a};
      hand_out(r, &shifted);
      if (k < steps - 1) {
        square(r, t, g, q);
        square(r, g, t, q);
      }
      if (k == 0) {
        swap(&p, &q);
      } else {
        square(r, t, q, p);
        swap(&p, &t);
      }
    }
    multiply_x(r, p, 0.0);
  }
  return p;
}

tx_muon_made tx_muon_iterate(const tx_muon_iteration *it, tx_muon_make make, void *ctx) {
  const int wide = it->rows <= it->columns;
  run r = {.it = it,
           .make = make,
           .ctx = ctx,
           .small = wide ? it->rows : it->columns,
           .wide = wide,
           .x = TX_MUON_X,
           .other = TX_MUON_OTHER};
  const int32_t last = it->ns == TX_MUON_GRAM ? by_gram(&r) : by_matrix(&r);
  return (tx_muon_made){r.x, last, r.stopped};
}

int tx_muon_is_iteration(const tx_muon_iteration *it) {
  return it && it->rows >= 1 && it->columns >= 1 && it->rows <= INT32_MAX && it->columns <= INT32_MAX &&
         it->steps >= 1 && it->steps < MOST_STEPS && it->restart >= 0 && it->panel >= 0 && it->ns >= TX_MUON_STANDARD &&
         it->ns <= TX_MUON_AUTO;
}

/* -- cost of products --------------------------------------------------------------------------------------------- */

typedef struct counted {
  const tx_muon_iteration *it;
  int64_t panel;
  double operations;
} counted;

/* Elements of a square matrix of n that are computed if it is computed in panels. */
static int64_t covered(int64_t n, int64_t panel) {
  const int64_t whole = n / panel, rest = n % panel;
  return panel * (whole * n - panel * (whole * (whole - 1) / 2)) + rest * rest;
}

/* Adds the cost of a product: 2 n operations per element if the sum is over n terms. */
static int count(void *ctx, const tx_muon_product *product) {
  counted *c = ctx;
  if (product->kind != TX_MUON_ADD_PRODUCT) return 0;
  const int64_t rows = c->it->rows, columns = c->it->columns;
  const int64_t small = rows < columns ? rows : columns, large = rows < columns ? columns : rows;
  const int64_t over = product->left >= TX_MUON_SQUARES || product->right >= TX_MUON_SQUARES ? small : large;
  const int symmetrical = product->out >= TX_MUON_SQUARES;
  const double elements =
      symmetrical ? (double)covered(small, c->panel) : (double)product->rows * (double)product->columns;
  c->operations += 2.0 * (double)over * elements;
  return 0;
}

/* Symmetric products are iterated whole, not in panels: millions of columns have thousands of panels. */
static double count_of(tx_muon_iteration it, int32_t ns) {
  const int64_t small = it.rows < it.columns ? it.rows : it.columns;
  counted c = {.it = &it, .panel = it.panel < small ? it.panel : small};
  it.ns = ns;
  it.panel = small;
  const tx_fp_mode saved = tx_fp_enter();
  (void)tx_muon_iterate(&it, count, &c);
  tx_fp_leave(saved);
  return c.operations;
}

tx_muon_iteration tx_muon_chosen(const tx_muon_iteration *iteration) {
  tx_muon_iteration it = *iteration;
  if (it.panel == 0) it.panel = tx_muon_panel(it.rows < it.columns ? it.rows : it.columns, TX_F32, 1, 0);
  if (it.ns != TX_MUON_AUTO) return it;
  it.ns = count_of(it, TX_MUON_GRAM) < count_of(it, TX_MUON_STANDARD) ? TX_MUON_GRAM : TX_MUON_STANDARD;
  return it;
}

double tx_muon_count(const tx_muon_iteration *iteration) {
  if (!tx_muon_is_iteration(iteration)) return 0.0;
  const tx_muon_iteration it = tx_muon_chosen(iteration);
  return count_of(it, it.ns);
}

typedef struct written {
  tx_muon_product *products;
  int64_t capacity, n;
} written;

static int write_down(void *ctx, const tx_muon_product *product) {
  written *w = ctx;
  if (w->n < w->capacity) w->products[w->n] = *product;
  w->n++;
  return 0;
}

int64_t tx_muon_products(const tx_muon_iteration *iteration, tx_muon_product *products, int64_t capacity,
                         int32_t *result, int32_t *last_square) {
  if (!tx_muon_is_iteration(iteration) || (capacity > 0 && !products) || !result || !last_square) return 0;
  const tx_muon_iteration it = tx_muon_chosen(iteration);
  written w = {.products = products, .capacity = capacity};
  const tx_muon_made made = tx_muon_iterate(&it, write_down, &w);
  *result = made.result;
  *last_square = made.last_square;
  return w.n;
}
