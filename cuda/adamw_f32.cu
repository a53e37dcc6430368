/* The step, both moments in fp32. */
#include "cuda/adamw_kernel.h"

tx_status tx_step_launch_f32(const tx_cuda_scope *scope, int weight, tx_step_table &table, tx_error *error) {
  return launch_step_of<TX_MOMENTS_F32>(scope, weight, table, error);
}
