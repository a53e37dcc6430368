/* Delta chains: begins them at version 0, and checks that parts belong to one chain. */
#include <inttypes.h>

#include "csrc/core/delta_part.h"
#include "csrc/core/status.h"

tx_status tx_delta_chain_begin(int64_t n_params, const tx_delta_param *params, const uint64_t *id, int32_t part,
                               int32_t parts, tx_delta_chain *chain, tx_error *error) {
  if (!chain || chain->size != sizeof *chain || !id) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "chain.size is %llu, id is %s; legal: TX_DELTA_CHAIN_INIT and an id",
                   chain ? (unsigned long long)chain->size : 0, id ? "there" : "NULL");
  }
  if (parts < 1 || part < 0 || part >= parts || !(id[0] || id[1])) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "part %d of %d of chain %" PRIx64 "%" PRIx64 "; legal: 0 <= part < parts, and an id that is not 0",
                   part, parts, id[0], id[1]);
  }
  uint64_t model;
  TX_FORWARD(tx_delta_model(n_params, params, &model, error));
  *chain = (tx_delta_chain){.size = sizeof *chain,
                            .id = {id[0], id[1]},
                            .link = tx_delta_first_link(id, model, part, parts),
                            .model = model,
                            .part = part,
                            .parts = parts};
  return TX_OK;
}

tx_status tx_delta_parts_check(const tx_delta_part *parts, int64_t n, tx_error *error) {
  char a[17], b[17];
  for (int64_t i = 1; i < n; i++) {
    const tx_delta_part *p = &parts[i - 1], *q = &parts[i];
    if (p->id[0] != q->id[0] || p->id[1] != q->id[1] || p->model != q->model || p->parts != q->parts) {
      return tx_fail(error, TX_ERROR_MISMATCH,
                     "part %d of version %" PRId64 " is of chain %s and part %d of version %" PRId64
                     " of %s (or their models, or numbers of parts, differ); parts of one chain are legal",
                     p->part, p->version, tx_delta_id_text(p->id, a), q->part, q->version, tx_delta_id_text(q->id, b));
    }
    if (q->version - p->version > 1) {
      return tx_fail(error, TX_ERROR_BAD_STATE,
                     "version %" PRId64 " is followed by %" PRId64 "; versions without a gap are legal", p->version,
                     q->version);
    }
    if (p->version == q->version && p->kind == q->kind && p->part == q->part) {
      return tx_fail(error, TX_ERROR_BAD_STATE, "part %d of version %" PRId64 " is given twice", q->part, q->version);
    }
    if (p->kind != q->kind ? p->version == q->version || q->kind == TX_DELTA_WHOLE
                           : q->kind == TX_DELTA_WHOLE && p->version != q->version) {
      return tx_fail(error, TX_ERROR_BAD_STATE,
                     "versions %" PRId64 " and %" PRId64
                     " are mixed with full messages; legal: full messages of one version, then the changes after it",
                     p->version, q->version);
    }
  }
  return TX_OK;
}
