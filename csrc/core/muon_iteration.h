/* The products of Muon's iterations, one after the other. */
#ifndef TX_CORE_MUON_ITERATION_H
#define TX_CORE_MUON_ITERATION_H

#include "csrc/torch_ext_advanced.h"

/* Who makes them. Not 0: stops. */
typedef int (*tx_muon_make)(void *ctx, const tx_muon_product *product);

typedef struct tx_muon_made {
  int32_t found, last; /* as tx_muon_products */
  int stopped;
} tx_muon_made;

/* Hands out each product. iteration: legal (tx_muon_is_iteration), with a panel. */
tx_muon_made tx_muon_iterate(const tx_muon_iteration *iteration, tx_muon_make make, void *ctx);

/* Whether it is legal. */
int tx_muon_is_iteration(const tx_muon_iteration *iteration);

/* With the panel, alike on every machine, and which iteration, where these are left to choose. */
tx_muon_iteration tx_muon_chosen(const tx_muon_iteration *iteration);

/* Operations of all products; 0: not legal. */
double tx_muon_count(const tx_muon_iteration *iteration);

#endif
