#include "csrc/ops/check.h"

#include "csrc/core/dtype.h"
#include "csrc/core/status.h"

#define TX_MAX_NUMEL (INT64_C(1) << 56)

int64_t tx_element_size(tx_dtype dtype) {
  switch (dtype) {
    case TX_F64:
    case TX_I64:
      return 8;
    case TX_F32:
      return 4;
    case TX_F16:
    case TX_BF16:
    case TX_I16:
      return 2;
    case TX_U8:
      return 1;
    default:
      return 0;
  }
}

tx_status tx_check_tensors(const tx_span *spans, int64_t n_spans, tx_error *error) {
  for (int64_t s = 0; s < n_spans; s++) {
    if (spans[s].n < 0) {
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s has %lld tensors; a count is never negative", spans[s].name,
                     (long long)spans[s].n);
    }
    for (int64_t i = 0; spans[s].tensors && i < spans[s].n; i++) {
      const tx_tensor *t = &spans[s].tensors[i];
      if (t->numel < 0) {
        return tx_fail(error, TX_ERROR_SHAPE, "%s[%lld] has numel %lld; a count is never negative", spans[s].name,
                       (long long)i, (long long)t->numel);
      }
      if (t->numel > TX_MAX_NUMEL) { /* limits sizes in bytes, so that none overflows */
        return tx_fail(error, TX_ERROR_SHAPE, "%s[%lld] has numel %lld; at most 2^56 is legal", spans[s].name,
                       (long long)i, (long long)t->numel);
      }
      if (t->numel == 0) continue;
      if (!t->data) {
        return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s[%lld] has %lld elements but no memory", spans[s].name,
                       (long long)i, (long long)t->numel);
      }
      if (tx_element_size(t->dtype) == 0) {
        return tx_fail(error, TX_ERROR_DTYPE,
                       "%s[%lld] is %s; operators take fp32, bf16, fp16, float64, uint8, int16 and int64",
                       spans[s].name, (long long)i, tx_dtype_name(t->dtype));
      }
    }
  }
  return TX_OK;
}

tx_status tx_check_present(const char *name, const void *list, int64_t n, tx_error *error) {
  if (n < 0) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "n is %lld; a count is never negative", (long long)n);
  }
  if (n == 0 || list) return TX_OK;
  return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s is NULL; a list of %lld is needed", name, (long long)n);
}

tx_status tx_check_fixed(const char *name, tx_tensor tensor, tx_dtype dtype, int64_t numel, int required,
                         tx_error *error) {
  if (tensor.numel == 0 && !required) return TX_OK;
  if (tensor.numel != numel || !tensor.data) {
    return tx_fail(error, TX_ERROR_SHAPE, "%s has %lld elements; %lld%s is legal", name, (long long)tensor.numel,
                   (long long)numel, required ? "" : " (or 0: none)");
  }
  if (tensor.dtype != dtype) {
    return tx_fail(error, TX_ERROR_DTYPE, "%s is %s; %s is legal", name, tx_dtype_name(tensor.dtype),
                   tx_dtype_name(dtype));
  }
  return TX_OK;
}

tx_status tx_check_same_numel(const char *a_name, const tx_tensor *a, const char *b_name, const tx_tensor *b, int64_t n,
                              tx_error *error) {
  for (int64_t i = 0; i < n; i++) {
    if (a[i].numel == b[i].numel) continue;
    return tx_fail(error, TX_ERROR_SHAPE, "%s[%lld] has %lld elements and %s[%lld] has %lld; they must be equal",
                   a_name, (long long)i, (long long)a[i].numel, b_name, (long long)i, (long long)b[i].numel);
  }
  return TX_OK;
}

tx_status tx_check_parallel(const tx_parallel *parallel, tx_error *error) {
  if (!parallel) return TX_OK;
  if (parallel->size != sizeof(tx_parallel)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "parallel.size is %llu; %llu is legal (use TX_PARALLEL_INIT)",
                   (unsigned long long)parallel->size, (unsigned long long)sizeof(tx_parallel));
  }
  if (parallel->num_threads > 1 && !parallel->run) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "parallel has %lld threads but no run function",
                   (long long)parallel->num_threads);
  }
  return TX_OK;
}

tx_status tx_check_rounding(const char *name, int32_t rounding, tx_error *error) {
  if (rounding >= TX_NEAREST && rounding <= TX_STOCHASTIC) return TX_OK;
  return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "%s is %d; 0 (nearest), 1 (dithered) and 2 (stochastic) are legal",
                 name, (int)rounding);
}
