/* The table of loops of one instruction set. kernels_isa.c fills one per row of isa.def.
 *
 * A loop works on one piece: a run of elements that begins on a block edge of its tensor. It runs under tx_fp_enter's
 * mode, validates nothing, allocates nothing. */
#ifndef TX_CPU_KERNELS_H
#define TX_CPU_KERNELS_H

#include <stdint.h>

#include "csrc/core/combos.h"
#include "csrc/core/compressed.h"
#include "csrc/core/forms.h"
#include "csrc/math/adamw.h"
#include "csrc/math/muon.h"
#include "csrc/math/noise.h"
#include "csrc/torch_ext.h"

/* Of a piece, what tx_adamw_args asks the step to leave behind beside states; each NULL where nobody asked. */
typedef struct tx_step_extras {
  uint8_t *changed;
  uint16_t *moved; /* at any address */
  uint8_t *distance;
  void *ema;
  uint8_t *ema_low;
  tx_dtype ema_dtype; /* BF16, F32 */
  float ema_weight;   /* 1 - ema_decay */
  uint32_t ema_u;     /* dithered threshold of the piece's first element */
  int ema_begins;     /* the average is what masters are */
  int64_t *health;    /* of the task alone */
} tx_step_extras;

typedef struct tx_adamw_piece {
  int64_t n;
  const void *grad;
  void *param;
  void *master;     /* NULL without */
  void *checksums;  /* of the piece's blocks, renewed; NULL without */
  int resyncs;      /* where a checksum is another one the remainders of its block are dropped before the step */
  int whole;        /* see tx_sample_loop */
  int stream_store; /* weights beside fp32 masters are better not left in the caches */
  void *exp_avg;
  void *exp_avg_sq;
  uint8_t *exp_avg_scale;    /* one byte per block; NULL unless exp_avg is F16 or U8 */
  uint8_t *exp_avg_sq_scale; /* likewise */
  const tx_adamw_constants *constants;
  tx_noise exp_avg_noise, exp_avg_sq_noise, param_noise;
  tx_dtype grad_dtype, param_dtype, master_dtype, exp_avg_dtype, exp_avg_sq_dtype; /* legal together (combos.def) */
  int32_t moment_rounding, weight_rounding;
  const tx_step_extras *extras; /* NULL: none */
} tx_adamw_piece;

/* Returns how many weights are in blocks of remainders that were dropped. */
typedef int64_t (*tx_adamw_loop)(const tx_adamw_piece *piece);

/* Elements that a caller hands to the loops below at a time: a few blocks, so that buffers stay in the first-level
 * cache. */
#define TX_TILE ((int64_t)1024)

/* A run in some form to n <= TX_TILE floats. scales: of the run's blocks; unused where the form has none. */
typedef void (*tx_load_loop)(const void *from, const uint8_t *scales, int64_t n, float *to);
/* The other way. The run begins `at` elements into the noise's stream. */
typedef void (*tx_store_loop)(const float *from, int64_t n, void *to, uint8_t *scales, tx_noise noise, int64_t at,
                              int32_t rounding);

/* Adds block sums of squares to TX_NORM_LIMBS limbs, carried; returns the number of non-finite elements. */
typedef int64_t (*tx_stats_loop)(const void *from, int64_t n, int64_t *limbs);

/* shard = [shard +] (chunks[0] + ... + chunks[n_chunks - 1]) * scale */
typedef struct tx_reduce_piece {
  int64_t n;
  int64_t begin; /* of the piece in the chunks; a multiple of TX_BLOCK */
  int64_t n_chunks;
  const tx_tensor *chunks;
  const tx_tensor *scales; /* NULL unless the chunks are scaled */
  void *shard;             /* of the piece */
  int64_t *limbs;          /* NULL: no statistics */
  float scale;
  int32_t accumulate; /* whether the shard's own value is added */
} tx_reduce_piece;
/* Returns the number of non-finite elements that the shard then holds; 0 without limbs. */
typedef int64_t (*tx_reduce_loop)(const tx_reduce_piece *piece);

typedef void (*tx_encode_master_loop)(const void *master, void *param, void *remainder, int64_t n);
typedef void (*tx_decode_master_loop)(const void *param, const void *remainder, void *master, int64_t n);
/* mode: tx_resync_mode. Returns the number of elements that change. */
typedef int64_t (*tx_resync_loop)(const void *param, void *master, int64_t n, int32_t mode);

/* Weights of a tensor, from a multiple of TX_CHECKSUM on, against the checksums of their blocks. mode:
 * tx_checksum_mode. Returns how many weights are in blocks whose checksum is another; 0 for TX_CHECKSUM_RENEW. */
typedef int64_t (*tx_checksum_loop)(const void *param, void *remainder, void *checksums, int64_t n, int32_t mode);

/* The sampled checksums of 16-bit weights beside fp32 masters, from a multiple of TX_SAMPLED on: renewed, or (any other
 * mode) compared only. whole: the tensor is so small that its sample is all of it. Returns how many are others. */
typedef int64_t (*tx_sample_loop)(const void *param, void *checksums, int64_t n, int whole, int32_t mode);

/* All blocks of a message; the number of escapes, or TX_COMPRESSED_NOT where that is more than there is space for. */
typedef int64_t (*tx_compress_loop)(const void *values, const tx_compressed *to);
/* The other way; each block's count of escapes is right. */
typedef void (*tx_expand_loop)(const tx_compressed *from, void *values);

/* The matrices of a piece. */
typedef struct tx_muon_parts {
  const tx_muon_part *first; /* that with the piece's first element */
  const tx_muon_part *end;   /* of the table */
  int64_t begin;             /* the piece's, in its tensor */
} tx_muon_parts;

typedef struct tx_muon_momentum_piece {
  int64_t n;
  const void *grad;
  void *momentum;
  uint8_t *scales; /* of momentum's blocks; NULL unless it is F16 or U8 */
  void *work;
  tx_muon_constants constants;
  tx_noise noise;
  tx_dtype grad_dtype, momentum_dtype, work_dtype;
  int32_t rounding;
  int32_t nesterov;
  int32_t stream_store; /* the work is better not left in the caches */
} tx_muon_momentum_piece;
typedef void (*tx_muon_momentum_loop)(const tx_muon_momentum_piece *piece);

typedef struct tx_muon_update_piece {
  int64_t n;
  const void *update;
  void *param;
  void *master;    /* NULL without */
  void *checksums; /* of the piece's blocks, renewed; NULL without */
  tx_muon_parts parts;
  const tx_muon_rate *rates; /* of parts.first and those after it */
  tx_noise noise;
  tx_dtype update_dtype, param_dtype, master_dtype; /* the latter legal together (combos.def) */
  int32_t rounding;
  int32_t resyncs, whole, stream_store; /* see tx_adamw_piece */
  const tx_step_extras *extras;         /* NULL: none */
} tx_muon_update_piece;
/* Returns what tx_adamw_loop returns. */
typedef int64_t (*tx_muon_update_loop)(const tx_muon_update_piece *piece);

typedef struct tx_kernels {
  tx_adamw_loop adamw;
  tx_load_loop load[TX_FORMS];
  tx_store_loop store[TX_FORMS];
  tx_stats_loop stats[TX_PLAINS];
  tx_reduce_loop reduce[TX_WIRES][TX_PLAINS];
  tx_encode_master_loop encode_master;
  tx_decode_master_loop decode_master;
  tx_resync_loop resync[TX_WEIGHTS]; /* NULL in the rows without a master */
  tx_checksum_loop checksum;
  tx_sample_loop sample;
  tx_compress_loop compress;
  tx_expand_loop expand;
  tx_muon_momentum_loop muon_momentum;
  tx_muon_update_loop muon_update;
} tx_kernels;

/* The table in use; never NULL. */
const tx_kernels *tx_kernels_selected(void);

#endif
