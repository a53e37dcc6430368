/* Copies tensors into their ranges of a bucket, and back; see tx_bucket_pack and tx_bucket_unpack. The host splits the
 * bucket into runs: ranges of gradients, and the gaps between them. */
#include "cuda/conversions.h"

extern "C" {
#include "csrc/ops/check.h"
#include "csrc/ops/operator_checks.h"
}

namespace {

/* The form of wire data. */
int wire_form(tx_tensor bucket, tx_tensor scales) {
  return scales.numel ? tx_form_scaled(bucket.dtype, TX_FORMAT_SIGNED) : tx_form_plain(bucket.dtype);
}

char *element(tx_tensor tensor, int form, int64_t i) {
  return (char *)tensor.data + i * tx_form_bytes(form);
}

uint8_t *scale_of(tx_tensor scales, int64_t i) {
  return scales.numel ? (uint8_t *)scales.data + i / TX_BLOCK : nullptr;
}

/* Elements [begin, end) of the bucket, without a source: zeros. */
tx_conversion into_bucket(const tx_bucket_pack_args *a, int form, int64_t begin, int64_t end) {
  tx_conversion run = {};
  run.numel = end - begin;
  run.to = element(a->bucket, form, begin);
  run.to_scales = scale_of(a->scales, begin);
  run.from_form = TX_FORM_ZEROS;
  run.to_form = (uint8_t)form;
  return run;
}

tx_status pack(const tx_cuda_scope *scope, const tx_bucket_pack_args *a, tx_error *error) {
  const char *name = "packing a bucket";
  const int form = wire_form(a->bucket, a->scales);
  const bool scaled = a->scales.numel != 0;
  int64_t at = 0; /* everything before it is done */
  tx_convert_table t;
  tx_convert_begin(&t, scaled ? a->rounding : TX_NEAREST);
  for (int64_t i = 0; i < a->n; i++) {
    const tx_tensor grad = a->grads[i];
    if (grad.numel == 0) continue;
    if (at < a->offsets[i]) {
      TX_FORWARD(tx_convert_add(scope, &t, into_bucket(a, form, at, a->offsets[i]), name, error));
    }
    /* a block in which a gradient ends is encoded together with the zeros that follow */
    const int64_t end = a->offsets[i] + grad.numel;
    const int64_t edge = scaled ? tx_blocks(end) * TX_BLOCK : end;
    at = edge < a->bucket.numel ? edge : a->bucket.numel;
    tx_conversion run = into_bucket(a, form, a->offsets[i], at);
    run.given = grad.numel;
    run.from = grad.data;
    run.from_form = (uint8_t)tx_form_plain(grad.dtype);
    run.noise = tx_noise_at(a->seed, 0, TX_LANE_WIRE, a->step, a->offsets[i]);
    TX_FORWARD(tx_convert_add(scope, &t, run, name, error));
  }
  if (at < a->bucket.numel) {
    TX_FORWARD(tx_convert_add(scope, &t, into_bucket(a, form, at, a->bucket.numel), name, error));
  }
  return tx_convert_end(scope, &t, name, error);
}

tx_status unpack(const tx_cuda_scope *scope, tx_tensor bucket, tx_tensor scales, int64_t n, const int64_t *offsets,
                 const tx_tensor *tensors, tx_error *error) {
  const char *name = "unpacking a bucket";
  const int form = wire_form(bucket, scales);
  tx_convert_table t;
  tx_convert_begin(&t, TX_NEAREST);
  for (int64_t i = 0; i < n; i++) {
    if (tensors[i].numel == 0) continue;
    tx_conversion run = {};
    run.numel = run.given = tensors[i].numel;
    run.from = element(bucket, form, offsets[i]);
    run.from_scales = scale_of(scales, offsets[i]);
    run.to = tensors[i].data;
    run.from_form = (uint8_t)form;
    run.to_form = (uint8_t)tx_form_plain(tensors[i].dtype);
    TX_FORWARD(tx_convert_add(scope, &t, run, name, error));
  }
  return tx_convert_end(scope, &t, name, error);
}

}  // namespace

tx_status tx_cuda_bucket_pack(const tx_bucket_pack_args *args, const tx_cuda_call *call, tx_error *error) {
  tx_cuda_scope scope;
  TX_FORWARD(tx_check_bucket_pack(args, error));
  TX_FORWARD(tx_cuda_enter(call, &scope, error));
  return tx_cuda_leave(&scope, pack(&scope, args, error));
}

tx_status tx_cuda_bucket_unpack(tx_tensor bucket, tx_tensor scales, int64_t n, const int64_t *offsets,
                                const tx_tensor *tensors, const tx_cuda_call *call, tx_error *error) {
  tx_cuda_scope scope;
  TX_FORWARD(tx_check_bucket_unpack(bucket, scales, n, offsets, tensors, error));
  TX_FORWARD(tx_cuda_enter(call, &scope, error));
  return tx_cuda_leave(&scope, unpack(&scope, bucket, scales, n, offsets, tensors, error));
}
