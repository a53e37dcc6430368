#include "csrc/ops/convert.h"

#include <stdio.h>
#include <string.h>

#include "csrc/core/dtype.h"
#include "csrc/core/status.h"
#include "csrc/ops/tensor.h"

#define TX_FORM_SIZE_(index, name, ...) \
  case index:                           \
    return tx_element_size(TX_##name);
static int64_t form_size(int form) {
  switch (form) {
    TX_FOR_EACH_PLAIN(TX_FORM_SIZE_)
    TX_FOR_EACH_SCALED(TX_FORM_SIZE_)
  }
  return 0;
}
#undef TX_FORM_SIZE_

static tx_run advance(tx_run run, int64_t by) {
  return (tx_run){run.form, (char *)run.data + by * form_size(run.form),
                  run.scales ? run.scales + by / TX_BLOCK : NULL};
}

tx_run tx_run_at(int form, tx_tensor tensor, tx_tensor scales, int64_t begin) {
  return advance((tx_run){form, tensor.data, tx_form_is_scaled(form) ? scales.data : NULL}, begin);
}

void tx_convert(const tx_kernels *kernels, tx_run from, tx_run to, int64_t n, tx_noise noise, int32_t rounding) {
  if (from.form == to.form) {
    memcpy(to.data, from.data, (size_t)(n * form_size(to.form)));
    if (to.scales) memcpy(to.scales, from.scales, (size_t)tx_blocks(n));
    return;
  }
  float tile[TX_TILE];
  for (int64_t at = 0; at < n; at += TX_TILE) {
    const int64_t count = n - at < TX_TILE ? n - at : TX_TILE;
    const tx_run source = advance(from, at), target = advance(to, at);
    kernels->load[source.form](source.data, source.scales, count, tile);
    kernels->store[target.form](tile, count, target.data, target.scales, noise, at, rounding);
  }
}

void tx_convert_zeros(const tx_kernels *kernels, tx_run to, int64_t n) {
  if (!tx_form_is_scaled(to.form)) {
    memset(to.data, 0, (size_t)(n * form_size(to.form)));
    return;
  }
  const float zeros[TX_TILE] = {0};
  const tx_noise noise = {0};
  for (int64_t at = 0; at < n; at += TX_TILE) {
    const int64_t count = n - at < TX_TILE ? n - at : TX_TILE;
    const tx_run target = advance(to, at);
    kernels->store[target.form](zeros, count, target.data, target.scales, noise, at, TX_NEAREST);
  }
}

/* -- checks --------------------------------------------------------------------------------------------------- */

tx_status tx_check_present(const char *name, const void *list, int64_t n, tx_error *error) {
  if (n < 0) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "n is %lld; a count is never negative", (long long)n);
  }
  if (n == 0 || list) return TX_OK;
  return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s is NULL; a list of %lld is needed", name, (long long)n);
}

tx_status tx_check_plain(const char *name, const tx_tensor *tensors, int64_t n, tx_error *error) {
  for (int64_t i = 0; i < n; i++) {
    if (tensors[i].numel == 0 || tx_form_plain(tensors[i].dtype) >= 0) continue;
    return tx_fail(error, TX_ERROR_DTYPE, "%s[%lld] is %s; fp32, bf16 and fp16 are legal", name, (long long)i,
                   tx_dtype_name(tensors[i].dtype));
  }
  return TX_OK;
}

/* forms: how many of forms.def's are legal, from the first; scaled_names: the scaled ones among them, for the message.
 */
static tx_status check_form(const char *name, const char *scales_name, int64_t index, tx_tensor tensor,
                            tx_tensor scales, tx_format format, int forms, const char *scaled_names, tx_error *error) {
  if (tensor.numel == 0 && scales.numel == 0) return TX_OK;
  char at[24] = "";
  if (index >= 0) (void)snprintf(at, sizeof at, "[%lld]", (long long)index);
  const int form = tx_form_of(tensor, scales, format);
  if (form < 0 || form >= forms) {
    return tx_fail(error, TX_ERROR_DTYPE, "%s%s is %s %s scales; fp32, bf16 and fp16 are legal without, %s with %s%s",
                   name, at, tx_dtype_name(tensor.dtype), scales.numel ? "with" : "without", scaled_names, scales_name,
                   at);
  }
  const int64_t wanted = tx_form_is_scaled(form) ? tx_blocks(tensor.numel) : 0;
  if (scales.numel == wanted && (wanted == 0 || scales.dtype == TX_U8)) return TX_OK;
  return tx_fail(error, TX_ERROR_SHAPE,
                 "%s%s is %lld elements of %s; %lld of uint8 are legal, one for each block of %d elements of %s%s",
                 scales_name, at, (long long)scales.numel, tx_dtype_name(scales.dtype), (long long)wanted, TX_BLOCK,
                 name, at);
}

tx_status tx_check_form(const char *name, const char *scales_name, int64_t index, tx_tensor tensor, tx_tensor scales,
                        tx_format format, tx_error *error) {
  return check_form(name, scales_name, index, tensor, scales, format, TX_FORMS, "uint8 and fp16", error);
}

tx_status tx_check_wire(const char *name, const char *scales_name, int64_t index, tx_tensor tensor, tx_tensor scales,
                        tx_error *error) {
  return check_form(name, scales_name, index, tensor, scales, TX_FORMAT_SIGNED, TX_WIRES, "uint8", error);
}
