/* The step, both moments in 8 bits. */
#include "cuda/adamw_kernel.h"

tx_status tx_step_launch_u8(const tx_cuda_scope *scope, int weight, tx_step_table &table, tx_error *error) {
  return launch_step_of<TX_MOMENTS_U8>(scope, weight, table, error);
}
