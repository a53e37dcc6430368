/* Gradient statistics of a task, and adding them to a stats tensor. */
#ifndef TX_OPS_STATS_H
#define TX_OPS_STATS_H

#include "csrc/torch_ext.h"

typedef struct tx_stats {
  int64_t limbs[TX_NORM_LIMBS];
  int64_t non_finite;
  int64_t first_bad; /* 1 + index of the first tensor with a non-finite element; 0: none */
} tx_stats;

void tx_stats_merge(tx_stats *to, const tx_stats *from);

/* Adds statistics to a tensor of TX_STATS_LEN int64; does nothing if it is none. */
void tx_stats_add_to(tx_tensor tensor, const tx_stats *stats);

#endif
