/* What a task gathers about gradients, and how it reaches a stats tensor. */
#ifndef TX_OPS_STATS_H
#define TX_OPS_STATS_H

#include "csrc/torch_ext.h"

typedef struct tx_stats {
  int64_t limbs[TX_NORM_LIMBS];
  int64_t non_finite;
  int64_t first_bad; /* 1 + index of the first tensor with a non-finite element; 0: none */
} tx_stats;

void tx_stats_merge(tx_stats *to, const tx_stats *from);

/* tensor: TX_STATS_LEN int64, or none (nothing happens then). */
void tx_stats_add_to(tx_tensor tensor, const tx_stats *stats);

#endif
