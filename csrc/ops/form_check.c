/* Checks the forms of operators' tensors, and the arguments of tx_cast. */
#include <stdio.h>

#include "csrc/core/dtype.h"
#include "csrc/core/status.h"
#include "csrc/ops/operator_checks.h"
#include "csrc/ops/tensor.h"

tx_status tx_check_plain(const char *name, const tx_tensor *tensors, int64_t n, tx_error *error) {
  for (int64_t i = 0; i < n; i++) {
    if (tensors[i].numel == 0 || tx_form_plain(tensors[i].dtype) >= 0) continue;
    return tx_fail(error, TX_ERROR_DTYPE, "%s[%lld] is %s; fp32, bf16 and fp16 are legal", name, (long long)i,
                   tx_dtype_name(tensors[i].dtype));
  }
  return TX_OK;
}

/* forms: the number of legal forms, counted from the first of forms.def: TX_FORMS or TX_WIRES. */
static tx_status check_form(const char *name, const char *scales_name, int64_t index, tx_tensor tensor,
                            tx_tensor scales, tx_format format, int forms, tx_error *error) {
  if (tensor.numel == 0 && scales.numel == 0) return TX_OK;
  char at[24] = "";
  if (index >= 0) (void)snprintf(at, sizeof at, "[%lld]", (long long)index);
  const int form = tx_form_of(tensor, scales, format);
  if (form < 0 || form >= forms) {
    return tx_fail(error, TX_ERROR_DTYPE, "%s%s is %s %s scales; fp32, bf16 and fp16 are legal without, %s with %s%s",
                   name, at, tx_dtype_name(tensor.dtype), scales.numel ? "with" : "without",
                   forms == TX_FORMS ? "uint8 and fp16" : "uint8", scales_name, at);
  }
  const int64_t wanted = tx_form_is_scaled(form) ? tx_blocks(tensor.numel) : 0;
  if (scales.numel == wanted && (wanted == 0 || scales.dtype == TX_U8)) return TX_OK;
  return tx_fail(error, TX_ERROR_SHAPE,
                 "%s%s is %lld elements of %s; %lld of uint8 are legal, one for each block of %d elements of %s%s",
                 scales_name, at, (long long)scales.numel, tx_dtype_name(scales.dtype), (long long)wanted, TX_BLOCK,
                 name, at);
}

tx_status tx_check_wire(const char *name, const char *scales_name, int64_t index, tx_tensor tensor, tx_tensor scales,
                        tx_error *error) {
  return check_form(name, scales_name, index, tensor, scales, TX_FORMAT_SIGNED, TX_WIRES, error);
}

tx_status tx_check_cast(const tx_cast_args *a, tx_error *error) {
  if (!a || a->size != sizeof *a) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "args.size is %llu; %llu is legal (use TX_CAST_ARGS_INIT)",
                   (unsigned long long)(a ? a->size : 0), (unsigned long long)sizeof *a);
  }
  TX_FORWARD(tx_check_rounding("rounding", a->rounding, error));
  if (a->format < TX_FORMAT_SIGNED || a->format > TX_FORMAT_MOMENTUM) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE,
                   "format is %d; 0 (signed), 1 (square root) and 2 (momentum) are legal", (int)a->format);
  }
  const tx_span spans[] = {{"srcs", a->srcs, a->n, 0},
                           {"dsts", a->dsts, a->n, 1},
                           {"src_scales", a->src_scales, a->n, 0},
                           {"dst_scales", a->dst_scales, a->n, 1}};
  TX_FORWARD(tx_check_present("srcs", a->srcs, a->n, error));
  TX_FORWARD(tx_check_present("dsts", a->dsts, a->n, error));
  TX_FORWARD(tx_check_tensors(spans, 4, error));
  TX_FORWARD(tx_check_same_numel("srcs", a->srcs, "dsts", a->dsts, a->n, error));
  for (int64_t i = 0; i < a->n; i++) {
    const tx_format format = (tx_format)a->format;
    const tx_tensor src_scales = tx_at_or_none(a->src_scales, i), dst_scales = tx_at_or_none(a->dst_scales, i);
    TX_FORWARD(check_form("srcs", "src_scales", i, a->srcs[i], src_scales, format, TX_FORMS, error));
    TX_FORWARD(check_form("dsts", "dst_scales", i, a->dsts[i], dst_scales, format, TX_FORMS, error));
    if (tx_meta_of(a->meta, i).start < 0) {
      return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "meta[%lld] has start %lld; start >= 0 is legal", (long long)i,
                     (long long)a->meta[i].start);
    }
  }
  return tx_check_overlap(spans, 4, error);
}
