/* Memory of the step of Muon's matrices, in addition to states (tx_memory_plan). */
#ifndef TX_CORE_MUON_MEMORY_H
#define TX_CORE_MUON_MEMORY_H

#include "csrc/torch_ext_advanced.h"

/* tx_muon_exchange_bytes, for arguments that are known to be legal. */
int64_t tx_muon_exchange_room(const tx_muon_exchange_args *args);

tx_status tx_muon_memory(const tx_memory_args *args, int64_t *products, int64_t *stepping, tx_error *error);

#endif
