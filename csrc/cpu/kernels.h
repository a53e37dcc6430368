/* The table of loops of one instruction set. kernels_isa.c fills in one for each row of isa.def.
 *
 * A loop works on one piece: a run of elements that begins at a block's edge in its tensor. It runs in the
 * floating-point mode of tx_fp_enter. It validates nothing and allocates nothing. */
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

/* Where the extra outputs of a piece go (changed, moved, distances, emas, healths of tx_adamw_args); NULL: not
 * requested. */
typedef struct tx_step_extras {
  uint8_t *changed;
  uint16_t *moved; /* at any address */
  uint8_t *distance;
  void *ema;
  uint8_t *ema_low;
  tx_dtype ema_dtype; /* BF16, F32 */
  float ema_weight;   /* 1 - ema_decay */
  uint32_t ema_u;     /* dithered threshold of the piece's first element */
  int ema_begins;     /* whether the average is set to the masters */
  int64_t *health;    /* a row of the task's own */
} tx_step_extras;

typedef struct tx_adamw_piece {
  int64_t n;
  const void *grad;
  void *param;
  void *master;     /* NULL: none */
  void *checksums;  /* of the piece's blocks, renewed by the step; NULL: none */
  int resyncs;      /* whether the remainders of a block with a changed checksum are dropped before the step */
  int whole;        /* see tx_sample_loop */
  int stream_store; /* whether weights with fp32 masters should bypass the caches */
  void *exp_avg;
  void *exp_avg_sq;
  uint8_t *exp_avg_scale;    /* one byte per block; NULL unless exp_avg is F16 or U8 */
  uint8_t *exp_avg_sq_scale; /* likewise */
  const tx_adamw_constants *constants;
  tx_noise exp_avg_noise, exp_avg_sq_noise, param_noise;
  tx_dtype grad_dtype, param_dtype, master_dtype, exp_avg_dtype, exp_avg_sq_dtype; /* a row of combos.def */
  int32_t moment_rounding, weight_rounding;
  const tx_step_extras *extras; /* NULL: none */
} tx_adamw_piece;

/* Returns how many weights are in blocks whose remainders were dropped. */
typedef int64_t (*tx_adamw_loop)(const tx_adamw_piece *piece);

/* Elements that the loops below get at a time: a few blocks, so that buffers stay in the L1 cache. */
#define TX_TILE ((int64_t)1024)

/* Converts a run of some form to n <= TX_TILE floats. scales: of the run's blocks; unused if the form has none. */
typedef void (*tx_load_loop)(const void *from, const uint8_t *scales, int64_t n, float *to);
/* Converts floats to a run of some form. Its first element has the threshold number `at` of noise. */
typedef void (*tx_store_loop)(const float *from, int64_t n, void *to, uint8_t *scales, tx_noise noise, int64_t at,
                              int32_t rounding);

/* Adds block sums of squares to TX_NORM_LIMBS limbs and propagates carries; returns the number of non-finite
 * elements. */
typedef int64_t (*tx_stats_loop)(const void *from, int64_t n, int64_t *limbs);

/* shard = [shard +] (chunks[0] + ... + chunks[n_chunks - 1]) * scale */
typedef struct tx_reduce_piece {
  int64_t n;
  int64_t begin; /* of the piece in the chunks; a multiple of TX_BLOCK */
  int64_t n_chunks;
  const tx_tensor *chunks;
  const tx_tensor *scales; /* NULL unless the chunks have block scales */
  void *shard;             /* of the piece */
  int64_t *limbs;          /* NULL: no statistics */
  float scale;
  int32_t accumulate; /* whether the shard's own value is added */
} tx_reduce_piece;
/* Returns the number of non-finite elements that the shard has afterwards; 0 if limbs is NULL. */
typedef int64_t (*tx_reduce_loop)(const tx_reduce_piece *piece);

typedef void (*tx_encode_master_loop)(const void *master, void *param, void *remainder, int64_t n);
typedef void (*tx_decode_master_loop)(const void *param, const void *remainder, void *master, int64_t n);
/* mode: tx_resync_mode. Returns the number of elements that change. */
typedef int64_t (*tx_resync_loop)(const void *param, void *master, int64_t n, int32_t mode);

/* Compares or renews the checksums of weights with remainders. The piece begins at a multiple of TX_CHECKSUM. mode:
 * tx_checksum_mode. Returns how many weights are in blocks with a changed checksum; 0 for TX_CHECKSUM_RENEW. */
typedef int64_t (*tx_checksum_loop)(const void *param, void *remainder, void *checksums, int64_t n, int32_t mode);

/* The same for the sampled checksums of 16-bit weights with fp32 masters, from a multiple of TX_SAMPLED on:
 * TX_CHECKSUM_RENEW renews them, any other mode only compares. whole: whether the tensor is so small that its sample
 * consists of all its weights. Returns how many checksums differ. */
typedef int64_t (*tx_sample_loop)(const void *param, void *checksums, int64_t n, int whole, int32_t mode);

/* Compresses all blocks of a message. Returns the number of escapes, or TX_COMPRESSED_NOT if there are more than
 * fit. */
typedef int64_t (*tx_compress_loop)(const void *values, const tx_compressed *to);
/* Expands a message, in which each block's count of escapes has to be right. */
typedef void (*tx_expand_loop)(const tx_compressed *from, void *values);

/* The matrices that a piece has elements of. */
typedef struct tx_muon_parts {
  const tx_muon_part *first; /* the one with the piece's first element */
  const tx_muon_part *end;   /* of the table */
  int64_t begin;             /* of the piece, in its tensor */
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
  int32_t stream_store; /* whether `work` should bypass the caches */
} tx_muon_momentum_piece;
typedef void (*tx_muon_momentum_loop)(const tx_muon_momentum_piece *piece);

typedef struct tx_muon_update_piece {
  int64_t n;
  const void *update;
  void *param;
  void *master;    /* NULL: none */
  void *checksums; /* of the piece's blocks, renewed by the step; NULL: none */
  tx_muon_parts parts;
  const tx_muon_rate *rates; /* the first one is of parts.first */
  tx_noise noise;
  tx_dtype update_dtype, param_dtype, master_dtype; /* param and master: a legal combination (combos.def) */
  int32_t rounding;
  int32_t resyncs, whole, stream_store; /* see tx_adamw_piece */
  const tx_step_extras *extras;         /* NULL: none */
} tx_muon_update_piece;
/* Returns how many weights are in blocks whose remainders were dropped. */
typedef int64_t (*tx_muon_update_loop)(const tx_muon_update_piece *piece);

typedef struct tx_kernels {
  tx_adamw_loop adamw;
  tx_load_loop load[TX_FORMS];
  tx_store_loop store[TX_FORMS];
  tx_stats_loop stats[TX_PLAINS];
  tx_reduce_loop reduce[TX_WIRES][TX_PLAINS];
  tx_encode_master_loop encode_master;
  tx_decode_master_loop decode_master;
  tx_resync_loop resync[TX_WEIGHTS]; /* NULL in rows without a master */
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
