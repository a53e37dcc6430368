/* Reads the parts of deltas, sorts them, and computes links and the model's fingerprint. */
#include "csrc/core/delta_part.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "csrc/core/hash.h"
#include "csrc/core/status.h"

static int64_t get_i64(const uint8_t *from) {
  return (int64_t)tx_get_u64(from);
}

const char *tx_delta_id_text(const uint64_t *id, char *text) {
  (void)snprintf(text, 17, "%08" PRIx32 "%08" PRIx32, (uint32_t)(id[0] >> 32), (uint32_t)(id[1] >> 32));
  return text;
}

static int is_plausible(const tx_delta_part *p, int64_t table) {
  return p->version >= (p->kind == TX_DELTA_WHOLE ? 0 : 1) && p->version < INT64_MAX && p->parts >= 1 && p->part >= 0 &&
         p->part < p->parts && p->changed >= 0 && table >= 0 &&
         table <= p->n_bytes - TX_DELTA_HEADER - TX_DELTA_CHECKSUM_BYTES && p->n_params <= table / 4 &&
         (p->kind == TX_DELTA_WHOLE || p->kind == TX_DELTA_CHANGES) && (p->id[0] || p->id[1]);
}

tx_status tx_delta_part_read(const char *what, const uint8_t *message, int64_t at, int64_t n, tx_delta_part *part,
                             tx_error *error) {
  const uint8_t *b = at > 0 ? message + at : message; /* message may be NULL */
  if (n - at < 16 || tx_get_u64(b) != TX_DELTA_MAGIC) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "%s has no part of a delta at byte %" PRId64 " of %" PRId64
                   " (damaged, cut off, or something else); legal: what tx_delta_encode and tx_delta_merge made",
                   what, at, n);
  }
  if (tx_get_u32(b + TX_DELTA_AT_FORMAT) != TX_DELTA_FORMAT) {
    return tx_fail(error, TX_ERROR_UNAVAILABLE,
                   "%s has format %" PRIu32 " at byte %" PRId64 "; this library reads format %d", what,
                   tx_get_u32(b + TX_DELTA_AT_FORMAT), at, TX_DELTA_FORMAT);
  }
  const int64_t bytes = n - at >= TX_DELTA_HEADER ? get_i64(b + TX_DELTA_AT_BYTES) : -1;
  if (bytes < TX_DELTA_HEADER + TX_DELTA_CHECKSUM_BYTES || bytes > n - at) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "%s is cut off or damaged: a part of %" PRId64 " bytes begins at byte %" PRId64 " of %" PRId64, what,
                   bytes, at, n);
  }
  const int64_t body = bytes - TX_DELTA_CHECKSUM_BYTES;
  *part = (tx_delta_part){.bytes = b,
                          .n_bytes = bytes,
                          .id = {tx_get_u64(b + TX_DELTA_AT_ID), tx_get_u64(b + TX_DELTA_AT_ID + 8)},
                          .model = tx_get_u64(b + TX_DELTA_AT_MODEL),
                          .link = tx_get_u64(b + TX_DELTA_AT_LINK),
                          .checksum = tx_get_u64(b + body),
                          .version = get_i64(b + TX_DELTA_AT_VERSION),
                          .changed = get_i64(b + TX_DELTA_AT_CHANGED),
                          .n_runs = tx_get_u32(b + TX_DELTA_AT_RUNS),
                          .n_params = tx_get_u32(b + TX_DELTA_AT_PARAMS),
                          .part = (int32_t)tx_get_u32(b + TX_DELTA_AT_PART),
                          .parts = (int32_t)tx_get_u32(b + TX_DELTA_AT_PARTS),
                          .kind = (int32_t)tx_get_u32(b + TX_DELTA_AT_KIND)};
  const int64_t table = get_i64(b + TX_DELTA_AT_TABLE);
  if (tx_xxh64(b, body) != part->checksum || !is_plausible(part, table)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "%s is damaged: the checksum of its part at byte %" PRId64 " is another one", what, at);
  }
  part->table = (tx_bytes){b + TX_DELTA_HEADER, b + TX_DELTA_HEADER + table, 0};
  part->runs = (tx_bytes){b + TX_DELTA_HEADER + table, b + body, 0};
  return TX_OK;
}

tx_delta_piece_of tx_delta_run_next(tx_bytes *runs) {
  tx_delta_piece_of run = {0};
  run.param = tx_take_varint(runs);
  run.offset = tx_take_varint(runs);
  run.numel = tx_take_varint(runs);
  const uint8_t *flags = tx_take_bytes(runs, 1);
  run.flags = flags ? *flags : 0;
  if (run.flags > TX_DELTA_RUN_FULL) runs->failed = 1;
  run.touched = tx_take_u32(runs);
  run.full = run.flags & TX_DELTA_RUN_FULL ? tx_take_u32(runs) : 0;
  const int64_t bytes = tx_take_varint(runs);
  const uint8_t *from = tx_take_bytes(runs, bytes);
  run.segments = (tx_bytes){from, from ? from + bytes : NULL, runs->failed};
  return run;
}

static int by_version(const void *a, const void *b) {
  const tx_delta_part *x = a, *y = b;
  if (x->version != y->version) return x->version < y->version ? -1 : 1;
  if (x->kind != y->kind) return x->kind > y->kind ? -1 : 1;
  return x->part < y->part ? -1 : x->part > y->part;
}

void tx_delta_parts_sort(tx_delta_part *parts, int64_t n) {
  qsort(parts, (size_t)n, sizeof *parts, by_version);
}

uint64_t tx_delta_link(const tx_delta_part *part) {
  if (part->kind == TX_DELTA_WHOLE) return part->link;
  return tx_hash_end(tx_hash_int(tx_hash_int(tx_hash_begin(), (int64_t)part->link), (int64_t)part->checksum));
}

uint64_t tx_delta_first_link(const uint64_t *id, uint64_t model, int32_t part, int32_t parts) {
  uint64_t hash = tx_hash_begin();
  const int64_t words[] = {(int64_t)id[0], (int64_t)id[1], (int64_t)model, part, parts};
  for (int32_t i = 0; i < 5; i++)
    hash = tx_hash_int(hash, words[i]);
  return tx_hash_end(hash);
}

tx_status tx_delta_model(int64_t n, const tx_delta_param *params, uint64_t *model, tx_error *error) {
  uint64_t hash = tx_hash_begin();
  if (n < 0 || n > INT32_MAX || (n > 0 && !params)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "n_params is %" PRId64 "; 0 to 2^31 - 1 is legal", n);
  }
  for (int64_t i = 0; i < n; i++) {
    const tx_delta_param *p = &params[i];
    if (!p->name || !*p->name || (i > 0 && strcmp(params[i - 1].name, p->name) >= 0)) {
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                     "params[%" PRId64 "] is \"%s\"; legal: names in ascending order of their bytes, none twice", i,
                     p->name ? p->name : "");
    }
    if (p->numel < 0 || p->numel > INT64_C(1) << 56) {
      return tx_fail(error, TX_ERROR_SHAPE, "\"%s\" has numel %" PRId64 "; 0 to 2^56 is legal", p->name, p->numel);
    }
    if (p->dtype != TX_BF16 && p->dtype != TX_F16 && p->dtype != TX_F32) {
      return tx_fail(error, TX_ERROR_DTYPE, "\"%s\" is %s; bf16, fp16 and fp32 are legal", p->name,
                     tx_dtype_name((tx_dtype)p->dtype));
    }
    hash = tx_hash_int(tx_hash_int(tx_hash_text(hash, p->name), p->numel), p->dtype);
  }
  *model = tx_hash_end(hash);
  return TX_OK;
}
