/* tx_delta_info_of and tx_delta_params_of: read the headers and tables of deltas, without decoding weights. */
#include <inttypes.h>
#include <stdlib.h>

#include "csrc/core/status.h"
#include "csrc/ops/check.h"
#include "csrc/ops/delta_parts.h"

static int64_t runs_that_change(const tx_delta_part *part) {
  tx_bytes runs = part->runs;
  int64_t found = 0;
  for (int64_t r = 0; r < part->n_runs && !runs.failed; r++) {
    const tx_delta_piece_of run = tx_delta_run_next(&runs);
    int64_t changed = 0;
    tx_bytes segments = run.segments;
    while (!segments.failed && segments.at < segments.end) {
      const int64_t bytes = tx_take_varint(&segments);
      changed |= bytes;
      (void)tx_take_bytes(&segments, bytes);
    }
    found += changed != 0;
  }
  return found;
}

tx_status tx_delta_info_of(tx_tensor message, tx_delta_info *info, tx_error *error) {
  if (!info || info->size != sizeof *info) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "info.size is %llu; legal: TX_DELTA_INFO_INIT",
                   info ? (unsigned long long)info->size : 0);
  }
  tx_delta_part *parts;
  int64_t n;
  TX_FORWARD(tx_delta_parts_read(&message, 1, &parts, &n, error));
  tx_delta_parts_sort(parts, n);
  const tx_status status = tx_delta_parts_check(parts, n, error);
  if (status == TX_OK) {
    *info = (tx_delta_info){.size = sizeof *info,
                            .id = {parts[0].id[0], parts[0].id[1]},
                            .model = parts[0].model,
                            .first_version = parts[0].version,
                            .last_version = parts[n - 1].version,
                            .n_parts = n,
                            .part = parts[0].part,
                            .parts = parts[0].parts,
                            .kind = parts[0].kind};
    for (int64_t i = 0; i < n; i++) {
      int64_t sum; /* counts of a forged message must not overflow */
      info->changed = __builtin_add_overflow(info->changed, parts[i].changed, &sum) ? INT64_MAX : sum;
      info->n_runs += runs_that_change(&parts[i]);
      if (!info->n_params) info->n_params = parts[i].n_params;
    }
  }
  free(parts);
  return status;
}

/* Reads a part's table; `params` has room for its n_params entries. */
static int read_table(const tx_delta_part *part, tx_delta_param *params) {
  tx_bytes table = part->table;
  for (int64_t i = 0; i < part->n_params; i++) {
    tx_delta_param *p = &params[i];
    *p = (tx_delta_param){.numel = tx_take_varint(&table)};
    const uint8_t *dtype = tx_take_bytes(&table, 1);
    const uint8_t *end = table.failed ? NULL : memchr(table.at, 0, (size_t)(table.end - table.at));
    if (!end || !dtype) return 0;
    p->dtype = *dtype;
    p->name = (const char *)tx_take_bytes(&table, end + 1 - table.at);
  }
  return !table.failed && table.at == table.end;
}

tx_status tx_delta_params_of(tx_tensor message, int64_t n_params, tx_delta_param *params, tx_error *error) {
  TX_FORWARD(tx_check_present("params", params, n_params, error));
  tx_delta_part *parts;
  int64_t n;
  TX_FORWARD(tx_delta_parts_read(&message, 1, &parts, &n, error));
  tx_delta_parts_sort(parts, n);
  const tx_delta_part *with = NULL;
  for (int64_t p = 0; p < n && !with; p++)
    with = parts[p].n_params ? &parts[p] : NULL;
  tx_status status = TX_OK;
  uint64_t model = 0;
  if ((with ? with->n_params : 0) != n_params) {
    status = tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                     "n_params is %" PRId64 "; the message's table has %" PRId64 " parameters", n_params,
                     with ? with->n_params : 0);
  } else if (with && (!read_table(with, params) || tx_delta_model(n_params, params, &model, NULL) != TX_OK ||
                      model != with->model)) {
    status = tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                     "the message's table of %" PRId64 " parameters is damaged, or of another model", n_params);
  }
  free(parts);
  return status;
}
