/* The step with extra outputs for all other pairs of moment dtypes. */
#define TX_STEP_EXTRAS 1
#include "cuda/adamw_kernel.h"

tx_status tx_step_launch_any(const tx_cuda_scope *scope, int, tx_step_table &table, tx_error *error) {
  return launch_step(scope, step<TX_WEIGHT_ANY, TX_MOMENTS_ANY>, table, error);
}
