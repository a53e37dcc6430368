/* The sequence of matrix products of Muon's iterations. */
#ifndef TX_CORE_MUON_ITERATION_H
#define TX_CORE_MUON_ITERATION_H

#include "csrc/torch_ext_advanced.h"

/* Called for each product; a result other than 0 stops the iteration. */
typedef int (*tx_muon_make)(void *ctx, const tx_muon_product *product);

typedef struct tx_muon_made {
  int32_t result, last_square; /* as tx_muon_products */
  int stopped;
} tx_muon_made;

/* Calls `make` for each product. iteration: legal (tx_muon_is_iteration), with a panel. */
tx_muon_made tx_muon_iterate(const tx_muon_iteration *iteration, tx_muon_make make, void *ctx);

/* Whether an iteration is legal. */
int tx_muon_is_iteration(const tx_muon_iteration *iteration);

/* Fills in the panel (the same on every machine) and the kind of iteration, if these are left open. */
tx_muon_iteration tx_muon_chosen(const tx_muon_iteration *iteration);

/* The operations of all products; 0 if the iteration is not legal. */
double tx_muon_count(const tx_muon_iteration *iteration);

#endif
