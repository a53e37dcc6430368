/* Checks the arguments of tx_master_encode, tx_master_decode, tx_master_resync and tx_master_checksum. */
#include <stdio.h>

#include "csrc/core/combos.h"
#include "csrc/core/dtype.h"
#include "csrc/core/status.h"
#include "csrc/ops/operator_checks.h"
#include "csrc/ops/tensor.h"

/* -- fp32 <-> weight and remainder ---------------------------------------------------------------------------- */

/* Checks that each tensor that has elements is of `dtype`. */
static tx_status check_dtype(const char *name, const tx_tensor *tensors, int64_t n, tx_dtype dtype, tx_error *error) {
  for (int64_t i = 0; i < n; i++) {
    if (tensors[i].numel == 0 || tensors[i].dtype == dtype) continue;
    return tx_fail(error, TX_ERROR_DTYPE, "%s[%lld] is %s; %s is legal", name, (long long)i,
                   tx_dtype_name(tensors[i].dtype), tx_dtype_name(dtype));
  }
  return TX_OK;
}

static tx_status check_remainders(int64_t n, const tx_tensor *masters, const tx_tensor *params,
                                  const tx_tensor *remainders, int encode, tx_error *error) {
  const tx_span spans[] = {
      {"masters", masters, n, !encode}, {"params", params, n, encode}, {"remainders", remainders, n, encode}};
  TX_FORWARD(tx_check_present("masters", masters, n, error));
  TX_FORWARD(tx_check_present("params", params, n, error));
  TX_FORWARD(tx_check_present("remainders", remainders, n, error));
  TX_FORWARD(tx_check_tensors(spans, 3, error));
  TX_FORWARD(tx_check_same_numel("params", params, "masters", masters, n, error));
  TX_FORWARD(tx_check_same_numel("remainders", remainders, "masters", masters, n, error));
  TX_FORWARD(check_dtype("masters", masters, n, TX_F32, error));
  TX_FORWARD(check_dtype("params", params, n, TX_BF16, error));
  TX_FORWARD(check_dtype("remainders", remainders, n, TX_I16, error));
  return tx_check_overlap(spans, 3, error);
}

tx_status tx_check_master_encode(int64_t n, const tx_tensor *masters, const tx_tensor *params,
                                 const tx_tensor *remainders, tx_error *error) {
  return check_remainders(n, masters, params, remainders, 1, error);
}

tx_status tx_check_master_decode(int64_t n, const tx_tensor *params, const tx_tensor *remainders,
                                 const tx_tensor *masters, tx_error *error) {
  return check_remainders(n, masters, params, remainders, 0, error);
}

/* -- resync --------------------------------------------------------------------------------------------------- */

/* Writes the legal dtypes of a master for a weight of this dtype, as text. */
static void list_masters(tx_dtype param, char *list, size_t size) {
  size_t at = 0;
#define TX_APPEND_(index, param_name, master_name, ...)                                                      \
  if (TX_##param_name == param && TX_##master_name != TX_NONE && at < size) {                                \
    at += (size_t)snprintf(list + at, size - at, "%s%s", at ? " or " : "", tx_dtype_name(TX_##master_name)); \
  }
  TX_FOR_EACH_WEIGHT(TX_APPEND_)
#undef TX_APPEND_
  if (at == 0) (void)snprintf(list, size, "none");
}

static tx_status check_masters(int64_t n, const tx_tensor *params, const tx_tensor *masters, tx_error *error) {
  for (int64_t i = 0; i < n; i++) {
    if (masters[i].numel == 0) continue;
    if (masters[i].numel != params[i].numel) {
      return tx_fail(error, TX_ERROR_SHAPE,
                     "masters[%lld] has %lld elements and params[%lld] has %lld; equal, or 0 (none), is legal",
                     (long long)i, (long long)masters[i].numel, (long long)i, (long long)params[i].numel);
    }
    if (tx_combo_weight(params[i].dtype, masters[i].dtype) >= 0) continue;
    char legal[64];
    list_masters(params[i].dtype, legal, sizeof legal);
    return tx_fail(error, TX_ERROR_DTYPE, "masters[%lld] is %s and params[%lld] is %s; legal masters: %s", (long long)i,
                   tx_dtype_name(masters[i].dtype), (long long)i, tx_dtype_name(params[i].dtype), legal);
  }
  return TX_OK;
}

tx_status tx_check_master_resync(int64_t n, const tx_tensor *params, const tx_tensor *masters, int32_t mode,
                                 tx_tensor changed, tx_error *error) {
  const tx_span spans[] = {
      {"params", params, n, 0}, {"masters", masters, n, mode != TX_RESYNC_COUNT}, {"changed", &changed, 1, 1}};
  TX_FORWARD(tx_check_present("params", params, n, error));
  TX_FORWARD(tx_check_present("masters", masters, n, error));
  if (mode < TX_RESYNC_STALE || mode > TX_RESYNC_COUNT) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "mode is %d; 0 (stale), 1 (all) and 2 (count) are legal", (int)mode);
  }
  TX_FORWARD(tx_check_tensors(spans, 3, error));
  TX_FORWARD(tx_check_fixed("changed", changed, TX_I64, n, 0, error));
  TX_FORWARD(check_masters(n, params, masters, error));
  return tx_check_overlap(spans, 3, error);
}

/* -- checksums ------------------------------------------------------------------------------------------------ */

static int64_t checksums_of(tx_tensor master) {
  const int64_t weights = master.dtype == TX_I16 ? TX_CHECKSUM : TX_SAMPLED;
  return master.dtype == TX_I16 || master.dtype == TX_F32 ? (master.numel + weights - 1) / weights : 0;
}

tx_status tx_check_checksums(const tx_tensor *masters, const tx_tensor *checksums, int64_t i, tx_error *error) {
  const tx_tensor checksum = tx_at_or_none(checksums, i), master = tx_at_or_none(masters, i);
  if (checksum.numel == 0) return TX_OK;
  const int64_t wanted = checksums_of(master);
  if (checksum.dtype == TX_I64 && checksum.numel == wanted) return TX_OK;
  return tx_fail(error, TX_ERROR_SHAPE,
                 "checksums[%lld] is %lld elements of %s for %lld masters in %s; none, or %lld of int64 are legal "
                 "(one for %d weights with int16 masters, for %d with fp32)",
                 (long long)i, (long long)checksum.numel, tx_dtype_name(checksum.dtype), (long long)master.numel,
                 master.numel ? tx_dtype_name(master.dtype) : "none", (long long)wanted, (int)TX_CHECKSUM,
                 (int)TX_SAMPLED);
}

static tx_status check_pair(const tx_tensor *params, const tx_tensor *masters, int64_t i, tx_error *error) {
  if (masters[i].numel == 0 || tx_combo_weight(params[i].dtype, masters[i].dtype) >= 0) return TX_OK;
  return tx_fail(error, TX_ERROR_DTYPE,
                 "params[%lld] is %s and masters[%lld] is %s; bf16 with fp32 or int16, and fp16 with fp32 are legal",
                 (long long)i, tx_dtype_name(params[i].dtype), (long long)i, tx_dtype_name(masters[i].dtype));
}

tx_status tx_check_master_checksum(int64_t n, const tx_tensor *params, const tx_tensor *masters,
                                   const tx_tensor *checksums, int32_t mode, tx_tensor stale, tx_error *error) {
  const tx_span spans[] = {{"params", params, n, 0},
                           {"masters", masters, n, mode == TX_CHECKSUM_RESYNC},
                           {"checksums", checksums, n, mode != TX_CHECKSUM_CHECK},
                           {"stale", &stale, 1, 1}};
  TX_FORWARD(tx_check_present("params", params, n, error));
  TX_FORWARD(tx_check_present("masters", masters, n, error));
  TX_FORWARD(tx_check_present("checksums", checksums, n, error));
  if (mode < TX_CHECKSUM_CHECK || mode > TX_CHECKSUM_RENEW) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "mode is %d; 0 (check), 1 (resync) and 2 (renew) are legal",
                   (int)mode);
  }
  TX_FORWARD(tx_check_tensors(spans, 4, error));
  TX_FORWARD(tx_check_fixed("stale", stale, TX_I64, n, 0, error));
  TX_FORWARD(tx_check_same_numel("masters", masters, "params", params, n, error));
  for (int64_t i = 0; i < n; i++) {
    TX_FORWARD(check_pair(params, masters, i, error));
    TX_FORWARD(tx_check_checksums(masters, checksums, i, error));
  }
  return tx_check_overlap(spans, 4, error);
}

tx_status tx_fail_written(int64_t i, int64_t stale, tx_error *error) {
  return tx_fail(error, TX_ERROR_BAD_STATE,
                 "params[%lld]: %lld elements are not what their masters round to: they were written outside the "
                 "optimizer since the last step; resync the masters first",
                 (long long)i, (long long)stale);
}
