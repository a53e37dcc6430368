#include "csrc/torch/backend.h"

#define TX_ENTRY(entry, parameters, arguments)                                                 \
  static tx_status run_##entry(TX_LIST parameters, const tx_target *target, tx_error *error) { \
    return tx_##entry(TX_LIST arguments, target->parallel, error);                             \
  }
#define TX_ENTRY_ALONE(entry, parameters, arguments)                                           \
  static tx_status run_##entry(TX_LIST parameters, const tx_target *target, tx_error *error) { \
    (void)target;                                                                              \
    return tx_##entry(TX_LIST arguments, error);                                               \
  }
#include "csrc/torch/entries.def"

static const tx_backend kBackend = {
#define TX_ENTRY(entry, parameters, arguments) .entry = run_##entry,
#include "csrc/torch/entries.def"
};

tx_target tx_cpu_target(const tx_parallel *parallel) {
  return (tx_target){.backend = &kBackend, .parallel = parallel};
}
