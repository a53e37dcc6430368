/* tx_fsdp_units: which blocks of a model FSDP gathers together. */
#include "csrc/torch_ext_advanced.h"

/* A unit's two all-gathers and its reduction cost about as much processor time as sending 2 MB. Overlap wants many
 * units, but does not improve with more than these give. */
static const int64_t kLeast = INT64_C(1) << 20;

int64_t tx_fsdp_units(const int64_t *numels, int64_t n, int64_t least, int64_t *ends) {
  if (least == TX_NO_INT) least = kLeast;
  int64_t units = 0, numel = 0;
  for (int64_t i = 0; i < n; i++) {
    numel = numels[i] < least - numel ? numel + numels[i] : least; /* not beyond `least`: cannot overflow */
    if (numel < least && i + 1 < n) continue;
    if (numel < least && units > 0) units--; /* the last unit is too small: join it with its neighbour */
    ends[units++] = i + 1;
    numel = 0;
  }
  return units;
}
