#include "csrc/ops/convert.h"

#include <string.h>

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
