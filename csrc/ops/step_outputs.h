/* The arguments of a step's optional outputs (changed, moved, distances, emas, ema_lows, healths), which tx_adamw and
 * tx_muon_update share. */
#ifndef TX_OPS_STEP_OUTPUTS_H
#define TX_OPS_STEP_OUTPUTS_H

#include "csrc/torch_ext.h"

typedef struct tx_step_outputs {
  int64_t n;
  const tx_tensor *params, *masters;
  const tx_tensor *changed, *moved, *distances, *emas, *ema_lows, *healths; /* each may be NULL: not requested */
  const tx_meta *meta;
  uint64_t seed;
  double ema_decay;
  int64_t ema_every;
} tx_step_outputs;
#define TX_STEP_OUTPUTS_OF(a)                                                                              \
  {                                                                                                        \
    (a)->n, (a)->params, (a)->masters, (a)->changed, (a)->moved, (a)->distances, (a)->emas, (a)->ema_lows, \
        (a)->healths, (a)->meta, (a)->seed, (a)->ema_decay, (a)->ema_every                                 \
  }

/* Check the arguments for all parameters, and for parameter i, whose weight and master must be legal. */
tx_status tx_check_step_outputs(const tx_step_outputs *outputs, tx_error *error);
tx_status tx_check_step_outputs_of(const tx_step_outputs *outputs, int64_t i, tx_error *error);

#endif
