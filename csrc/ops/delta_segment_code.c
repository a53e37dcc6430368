/* Encodes the segments of deltas: decides which blocks are dense and how the others are coded, and writes the bytes. */
#include "csrc/ops/delta_segment_code.h"

#include <stdlib.h>

#include "csrc/core/delta_bytes.h"
#include "csrc/core/status.h"
#include "csrc/math/delta_value.h"
#include "csrc/ops/check.h"
#include "csrc/torch_ext_advanced.h"

/* The most bits of a stream per weight of the segment: a position is a gap; a value is a distance with all bits, or a
 * length and as many bits. */
#define POSITION_BITS (TX_RICE_LONGEST + TX_RICE_RAW)
#define VALUE_BITS 80

static int64_t stream_room(int32_t s, int64_t numel) {
  const int64_t bits = s == TX_DELTA_VALUES ? VALUE_BITS : POSITION_BITS;
  const int64_t each = s == TX_DELTA_BOUNDS ? numel / TX_BLOCK + 2 * TX_DELTA_BLOCKS : numel + 1;
  return (each * bits + 7) / 8 + 16;
}

/* The most bytes before the streams. */
static const int64_t kHead = 16 + TX_VARINT_MOST * (TX_DELTA_STREAMS + 2);

int tx_delta_scratch_make(tx_delta_scratch *scratch, int64_t numel) {
  const int64_t dense = 4 * numel;
  int64_t streams = 0;
  for (int32_t s = 0; s < TX_DELTA_STREAMS; s++)
    streams += stream_room(s, numel);
  scratch->out_bytes = kHead + streams + tx_planes_bound(TX_F32, numel) + tx_planes_bound(TX_BF16, numel);
  scratch->rungs[0].first = scratch->rungs[1].first = 0;
  scratch->memory = malloc((size_t)(streams + dense + scratch->out_bytes));
  uint8_t *at = scratch->memory;
  if (!at) return 0;
  for (int32_t s = 0; s < TX_DELTA_STREAMS; s++) {
    scratch->streams[s] = at;
    at += stream_room(s, numel);
  }
  scratch->dense = at;
  scratch->out = at + dense;
  return 1;
}

void tx_delta_scratch_free(tx_delta_scratch *scratch) {
  free(scratch->memory);
  scratch->memory = NULL;
}

/* The code lengths for this dtype and TX_DELTA_RETURNS; computed if `rungs` has those of another dtype. Initialise
 * rungs[].first to 0. */
static const tx_delta_rungs *rungs_of(tx_delta_rungs rungs[2], tx_dtype dtype, uint32_t flags) {
  const int returns = (flags & TX_DELTA_RETURNS) != 0;
  tx_delta_rungs *of = &rungs[returns];
  if (of->dtype != dtype || !of->first) tx_delta_rungs_make(of, dtype, returns);
  return of;
}

/* Whether a changed TX_BLOCK of the block has no known bound. */
static int is_boundless(const tx_delta_encoder *e, int64_t begin, int64_t n) {
  if (!tx_delta_any_unknown((const char *)e->moved + 2 * (begin / TX_BLOCK), (n + TX_BLOCK - 1) / TX_BLOCK)) return 0;
  for (int64_t at = begin; at < begin + n; at += TX_BLOCK) {
    const int64_t left = begin + n - at < TX_BLOCK ? begin + n - at : TX_BLOCK;
    if (tx_delta_bound_code(((const tx_mem_u16 *)e->moved)[at / TX_BLOCK]) > TX_DELTA_BOUND_MOST &&
        !tx_delta_is_zero(e->changed + at / 8, (left + 7) / 8)) {
      return 1;
    }
  }
  return 0;
}

/* Whether the block's values take more bits than the entropy code of all its weights; estimated from one of every 32
 * weights. */
static int is_cheaper_dense(const tx_delta_encoder *e, const tx_delta_rungs *returning, int64_t begin, int64_t n,
                            int64_t changed) {
  if (4 * changed < n || e->flags & TX_DELTA_EXACT) return 0;
  int64_t bits = 0, seen = 0;
  for (int64_t i = begin; i < begin + n; i += 32) {
    const uint32_t weight =
        e->dtype == TX_F32 ? ((const tx_mem_u32 *)e->weights)[i] : ((const tx_mem_u16 *)e->weights)[i];
    bits += tx_delta_rung_bits(returning, weight, tx_delta_bound_code(((const tx_mem_u16 *)e->moved)[i / TX_BLOCK]),
                               e->dtype);
    seen++;
  }
  const double each = (double)bits / (double)seen;
  return each * (double)changed + (double)n > (e->dtype == TX_F32 ? 27.0 : 10.6) * (double)n;
}

/* Decides which blocks are dense; returns how many weights changed in the others. A run without changed bits or bounds
 * is dense as a whole. */
static int64_t choose_blocks(tx_delta_encoder *e, uint32_t written, const tx_delta_rungs *returning) {
  int64_t changed = 0;
  for (int64_t b = 0; b * TX_DELTA_BLOCK < e->n; b++) {
    const int64_t begin = b * TX_DELTA_BLOCK;
    const int64_t n = e->n - begin < TX_DELTA_BLOCK ? e->n - begin : TX_DELTA_BLOCK;
    const int64_t ones = e->changed ? tx_coding_kernels_selected()->delta_ones(e->changed + begin / 8, n) : n;
    const int blind = !e->changed || (ones > 0 && !(e->flags & (TX_DELTA_BOUNDED | TX_DELTA_EXACT)));
    if (blind || written >> b & 1u ||
        (ones > 0 && e->flags & TX_DELTA_BOUNDED &&
         (is_boundless(e, begin, n) || is_cheaper_dense(e, returning, begin, n, ones)))) {
      e->dense |= 1u << b;
    } else {
      changed += ones;
    }
  }
  return changed;
}

static uint32_t choose_flags(const tx_delta_encoder *e, int64_t changed, tx_delta_way way) {
  uint32_t flags = e->flags;
  const int64_t numel = e->n - tx_delta_dense_numel(e->dense, e->n);
  if (way.sliceable) flags |= TX_DELTA_SLICEABLE;
  if (way.returns) flags |= TX_DELTA_RETURNS; /* with distances: for weights further away than these can say */
  if (flags & TX_DELTA_BOUNDED && !way.sliceable && e->dtype != TX_F32) flags |= 40 * changed < numel ? 1u : 2u;
  if (flags & TX_DELTA_BOUNDED && !(flags & TX_DELTA_EXACT)) {
    flags |= 64 * changed < numel ? 0u : 28 * changed < numel ? 1u << 2 : 2u << 2;
  }
  return flags;
}

static void begin_streams(tx_delta_scratch *scratch, int64_t changed) {
  tx_delta_encoder *e = &scratch->encoder;
  for (int32_t s = 0; s < TX_DELTA_STREAMS; s++) {
    const tx_bit_writer writer = {scratch->streams[s], 0, 0};
    if (s == TX_DELTA_BOUNDS) {
      e->bounds = writer;
    } else if (s == TX_DELTA_VALUES) {
      e->values = writer;
      for (int32_t c = 0; c <= TX_DELTA_CLASSES; c++)
        e->far[c] = tx_rice_begin(32);
    } else {
      e->positions[s] = (tx_delta_stream){writer, tx_rice_begin(tx_delta_first_mean(s, e->n, changed)), 0};
    }
  }
}

/* Writes everything before the streams' sizes. */
static uint8_t *put_head(const tx_delta_encoder *e, uint8_t *to, int64_t changed, int64_t dense, int32_t bound) {
  *to++ = (uint8_t)e->flags;
  *to++ = (uint8_t)(e->flags >> 8);
  to = tx_put_varint(to, changed);
  if (e->flags & TX_DELTA_DENSE) {
    *to++ = (uint8_t)e->dense;
    *to++ = (uint8_t)(e->dense >> 8);
    to = tx_put_varint(to, dense);
  }
  if (e->flags & TX_DELTA_BOUNDED) {
    *to++ = (uint8_t)bound;
    *to++ = (uint8_t)(bound >> 8);
  }
  return to;
}

/* Encodes the weights of all dense blocks together, at `to`. */
static tx_status put_dense(tx_delta_scratch *scratch, uint8_t *to, int64_t *bytes, tx_error *error) {
  tx_delta_encoder *e = &scratch->encoder;
  const int64_t size = tx_element_size(e->dtype);
  int64_t found = 0;
  for (int64_t b = 0; b * TX_DELTA_BLOCK < e->n; b++) {
    if (!(e->dense >> b & 1u)) continue;
    const int64_t begin = b * TX_DELTA_BLOCK;
    const int64_t n = e->n - begin < TX_DELTA_BLOCK ? e->n - begin : TX_DELTA_BLOCK;
    memcpy(scratch->dense + found * size, (const char *)e->weights + begin * size, (size_t)(n * size));
    found += n;
  }
  const tx_tensor out = {to, tx_planes_bound(e->dtype, found), TX_U8, 0};
  return tx_planes_encode((tx_tensor){scratch->dense, found, e->dtype, 0}, out, bytes, error);
}

static tx_status put_segment(tx_delta_scratch *scratch, int64_t changed, int32_t first_bound, int64_t *bytes,
                             tx_error *error) {
  tx_delta_encoder *e = &scratch->encoder;
  const uint8_t *ends[TX_DELTA_STREAMS];
  int64_t dense = 0;
  uint8_t *const tail = scratch->out + scratch->out_bytes - tx_planes_bound(e->dtype, e->n);
  if (e->dense) TX_FORWARD(put_dense(scratch, tail, &dense, error));
  for (int32_t s = 0; s < TX_DELTA_STREAMS; s++) {
    ends[s] = tx_bits_end(s == TX_DELTA_BOUNDS   ? &e->bounds
                          : s == TX_DELTA_VALUES ? &e->values
                                                 : &e->positions[s].writer);
  }
  uint8_t *to = put_head(e, scratch->out, changed, dense, first_bound);
  for (int32_t s = 0; s < TX_DELTA_STREAMS; s++) {
    const int has = s == TX_DELTA_BOUNDS ? (e->flags & TX_DELTA_BOUNDED) != 0
                                         : s == TX_DELTA_VALUES || tx_delta_has_stream(e->flags, s);
    if (has) to = tx_put_varint(to, ends[s] - scratch->streams[s]);
  }
  for (int32_t s = 0; s < TX_DELTA_STREAMS; s++) {
    memcpy(to, scratch->streams[s], (size_t)(ends[s] - scratch->streams[s]));
    to += ends[s] - scratch->streams[s];
  }
  memmove(to, tail, (size_t)dense);
  *bytes = to + dense - scratch->out;
  return TX_OK;
}

tx_status tx_delta_segment_encode(tx_delta_scratch *scratch, const tx_delta_run *run, int64_t begin, int64_t numel,
                                  uint32_t written, tx_delta_way way, tx_delta_segment_done *done, tx_error *error) {
  const int64_t size = tx_element_size(run->weights.dtype);
  tx_delta_encoder *e = &scratch->encoder;
  *e = (tx_delta_encoder){.weights = (const char *)run->weights.data + begin * size,
                          .n = numel,
                          .at = begin,
                          .dtype = run->weights.dtype,
                          .block = &scratch->block,
                          .ahead = begin + scratch->ahead < run->weights.numel ? scratch->ahead : 0};
  if (run->changed.numel) { /* else all blocks are dense, and what else is kept is not used */
    e->changed = (const uint8_t *)run->changed.data + begin / 8;
    if (run->moved.numel) e->moved = (const char *)run->moved.data + 2 * (begin / TX_BLOCK);
    if (run->distances.numel) e->distances = (const uint8_t *)run->distances.data + begin / 2;
  }
  e->flags = (e->moved ? TX_DELTA_BOUNDED : 0u) | (e->distances ? TX_DELTA_EXACT : 0u);
  const int64_t changed = choose_blocks(e, written, rungs_of(scratch->rungs, e->dtype, TX_DELTA_RETURNS));
  *done = (tx_delta_segment_done){0};
  if (changed == 0 && e->dense == 0) return TX_OK;
  e->flags = choose_flags(e, changed, way) | (e->dense ? TX_DELTA_DENSE : 0u);
  if (!(e->flags & (TX_DELTA_BOUNDED | TX_DELTA_EXACT))) e->flags |= TX_DELTA_EXACT; /* no block's values are coded */
  done->changed = changed + tx_delta_dense_numel(e->dense, numel);
  int32_t first = 0;
  if (e->flags & TX_DELTA_BOUNDED) {
    for (int64_t i = 0; i < (numel + TX_BLOCK - 1) / TX_BLOCK && first == 0; i++) {
      const int32_t code = tx_delta_bound_code(((const tx_mem_u16 *)e->moved)[i]);
      if (code <= TX_DELTA_BOUND_MOST && !(e->dense >> (i * TX_BLOCK / TX_DELTA_BLOCK) & 1u)) first = code;
    }
    first = first ? first : TX_DELTA_BOUND_LEAST;
  }
  e->bound = first;
  e->rungs = rungs_of(scratch->rungs, e->dtype, e->flags);
  begin_streams(scratch, changed);
  tx_coding_kernels_selected()->delta_encode(e);
  TX_FORWARD(put_segment(scratch, changed, first, &done->bytes, error));
  done->touched = e->touched;
  return TX_OK;
}

tx_delta_decoder tx_delta_decoder_of(const tx_delta_segment *segment, int64_t numel, tx_dtype dtype,
                                     tx_delta_rungs rungs[2], tx_delta_block *block) {
  tx_delta_decoder d = {.dtype = dtype,
                        .block = block,
                        .flags = segment->flags,
                        .dense = segment->dense,
                        .bound = segment->bound,
                        .rungs = rungs_of(rungs, dtype, segment->flags)};
  for (int32_t s = 0; s < TX_DELTA_STREAMS; s++) {
    const tx_bit_reader reader = {segment->streams[s].data, (uint64_t)segment->streams[s].bytes, 0};
    if (s == TX_DELTA_BOUNDS) {
      d.bounds = reader;
    } else if (s == TX_DELTA_VALUES) {
      d.values = reader;
      for (int32_t c = 0; c <= TX_DELTA_CLASSES; c++)
        d.far[c] = tx_rice_begin(32);
    } else {
      d.positions[s] = (tx_delta_source){reader, tx_rice_begin(tx_delta_first_mean(s, numel, segment->changed)), 0};
      if (tx_delta_has_stream(segment->flags, s)) { /* the first gap */
        tx_delta_source *p = &d.positions[s];
        p->left = tx_rice_take(&p->reader, &p->rice);
      }
    }
  }
  return d;
}

void tx_delta_sums(const void *weights, int64_t numel, tx_dtype dtype, uint64_t *sums) {
  const tx_coding_kernels *kernels = tx_coding_kernels_selected();
  if (dtype != TX_F32) {
    (void)kernels->checksum(weights, NULL, sums, numel, TX_CHECKSUM_RENEW);
    return;
  }
  for (int64_t at = 0; at < numel; at += TX_CHECKSUM) { /* checksum() takes 16-bit words: twice as many */
    const int64_t n = numel - at < TX_CHECKSUM ? numel - at : TX_CHECKSUM;
    uint64_t halves[2] = {0, 0};
    (void)kernels->checksum((const char *)weights + 4 * at, NULL, halves, 2 * n, TX_CHECKSUM_RENEW);
    sums[at / TX_CHECKSUM] = halves[0] + halves[1] * UINT64_C(0x9e3779b97f4a7c15);
  }
}

uint64_t tx_delta_sum_of(const uint64_t *sums, int64_t n, int64_t first) {
  uint64_t total = 0;
  for (int64_t i = 0; i < n; i++) {
    uint64_t x = (sums[i] ^ (uint64_t)(first + i) * UINT64_C(0x9e3779b97f4a7c15)) * UINT64_C(0xd6e8feb86659fd93);
    total += x ^ x >> 32;
  }
  return total;
}
