/* The step on moments of any other pair of dtypes. */
#include "cuda/adamw_kernel.h"

tx_status tx_step_launch_any(const tx_cuda_scope *scope, int weight, tx_step_table &table, tx_error *error) {
  return launch_step<TX_MOMENTS_ANY>(scope, weight, table, error);
}
