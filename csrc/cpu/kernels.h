/* The table of loops of one instruction set. kernels_isa.c fills one per row of isa.def; dispatch.c picks one.
 *
 * A loop works on one piece: a run of elements that begins on a block edge of its tensor. It runs under tx_fp_enter's
 * mode, validates nothing, allocates nothing. */
#ifndef TX_CPU_KERNELS_H
#define TX_CPU_KERNELS_H

#include <stdint.h>

#include "csrc/cpu/combos.h"
#include "csrc/math/adamw.h"
#include "csrc/torch_ext.h"

/* Thresholds of a rounded stream: element i of the piece has ramp-or-hash threshold of (base, i). */
typedef struct tx_noise {
  uint32_t base; /* lattice: threshold of the piece's first element; stochastic: the stream's key for this step */
  uint32_t start; /* stochastic: low 32 bits of the logical index of the piece's first element */
} tx_noise;

typedef struct tx_adamw_piece {
  int64_t n;
  const void *grad;
  void *param;
  void *exp_avg;
  void *exp_avg_sq;
  void *master;              /* NULL without */
  uint8_t *exp_avg_scale;    /* one byte per block; NULL unless exp_avg is F16 or U8 */
  uint8_t *exp_avg_sq_scale; /* likewise */
  const tx_adamw_constants *constants;
  tx_noise exp_avg_noise, exp_avg_sq_noise, param_noise;
  int32_t moment_rounding; /* dithered or stochastic; the nearest kernels ignore it */
  int32_t weight_rounding;
} tx_adamw_piece;

typedef void (*tx_adamw_loop)(const tx_adamw_piece *piece);

/* What the families of loops below need beside these is in their own headers. */
typedef struct tx_kernels {
  const char *name;
  tx_adamw_loop adamw[TX_ADAMW_COMBOS][2]; /* [combination][0: thresholds, 1: nearest moments] */
} tx_kernels;

/* The table in use; never NULL. */
const tx_kernels *tx_kernels_selected(void);

#endif
