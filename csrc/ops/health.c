/* tx_health_of. */
#include "csrc/math/health.h"

#include <math.h>

#include "csrc/core/fp_mode.h"
#include "csrc/core/status.h"
#include "csrc/ops/tensor.h"

_Static_assert(TX_HEALTH_LEN == TX_HEALTH_LARGEST + 1, "a row is all of these");

tx_status tx_health_of(tx_tensor health, tx_health *found, tx_error *error) {
  if (!found || found->size != sizeof *found) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_health_of: found must begin with TX_HEALTH_INIT");
  }
  TX_FORWARD(tx_check_fixed("health", health, TX_I64, TX_HEALTH_LEN, 1, error));
  int64_t row[TX_HEALTH_LEN];
  memcpy(row, health.data, sizeof row);
  *found = (tx_health){.size = sizeof *found, .elements = row[TX_HEALTH_ELEMENTS]};
  if (found->elements <= 0) return TX_OK;
  const tx_fp_mode saved = tx_fp_enter();
  const double n = (double)found->elements;
  const int not_finite = row[TX_HEALTH_NOT_FINITE] != 0;
  found->update_rms = not_finite ? (double)NAN : sqrt(tx_health_sum(row + TX_HEALTH_UPDATES) / n);
  found->weight_rms = not_finite ? (double)NAN : sqrt(tx_health_sum(row + TX_HEALTH_WEIGHTS) / n);
  found->moved = (double)row[TX_HEALTH_MOVED] / n;
  found->below = (double)row[TX_HEALTH_BELOW] / n;
  found->largest = (double)tx_f32_from_bits((uint32_t)row[TX_HEALTH_LARGEST]);
  tx_fp_leave(saved);
  return TX_OK;
}
