/* Memory planning: the bytes that each rank will hold, computed before anything is allocated. */
#ifndef TORCH_EXT_MEMORY_H
#define TORCH_EXT_MEMORY_H

#include "torch_ext_muon_exchange.h"
#include "torch_ext_plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The optimizer state per element of a parameter. */
typedef struct tx_memory_state {
  int32_t exp_avg_dtype;    /* F32, BF16; F16 and U8, each with a scale byte per TX_BLOCK elements */
  int32_t exp_avg_sq_dtype; /* as exp_avg_dtype; TX_NONE: a matrix of Muon's, whose momentum is exp_avg */
  int32_t master_dtype;     /* TX_NONE: the weights are their own masters; F32; I16: remainders */
  int32_t reserved;
} tx_memory_state;

/* An FSDP unit: parameters that optim_grads_params gathers together. */
typedef struct tx_memory_unit {
  int64_t numel;
  int64_t trained;      /* elements of it that have a gradient */
  int32_t param_dtype;  /* dtype in which parameters are gathered and used */
  int32_t reduce_dtype; /* dtype in which gradients are handed to the reduction */
  int32_t wire_dtype;   /* dtype in which gradients are sent, if narrower */
  int32_t reserved;
} tx_memory_unit;

typedef struct tx_memory_args {
  uint64_t size;
  const tx_layout_args *layout;    /* the trainable parameters, their dtypes, and the number of ranks */
  const tx_layout_place *places;   /* result of tx_layout_plan: layout->n entries */
  const tx_layout_bucket *buckets; /* result of tx_layout_plan: n_buckets entries */
  int64_t n_buckets;
  const tx_memory_state *states; /* layout->n entries; master_dtype must be the same within a buffer */
  int64_t n_units;
  const tx_memory_unit *units; /* for optim_grads_params; the two largest count */
  int64_t frozen_bytes;        /* bytes of parameters that are not trained */
  int64_t in_flight;           /* most buckets exchanged at a time; >= 1 */
  const int64_t *ends;         /* result of tx_coalesce: n_messages entries; NULL: the link speed is not known */
  int64_t n_messages;
  int32_t strategy;     /* tx_strategy */
  int32_t gather_dtype; /* grad_gather_dtype of the policy */
  int32_t slots;        /* 1: messages are sent from slots that are kept, as on GPUs */
  int32_t compressed;   /* 1: bf16 messages are compressed (tx_compress) */
  int32_t ema_dtype;    /* dtype of the moving average of each parameter: TX_NONE, F32, BF16 (tx_adamw_args.emas) */
  int32_t ema_lows;     /* 1: BF16 averages have 8 further bits (tx_adamw_args.ema_lows) */
  int32_t publishes;    /* 1: steps record what they change (changed, moved), and checksums of it are kept */
  int32_t distances;    /* 1: steps also record how far 16-bit weights move (tx_adamw_args.distances) */
  int64_t threads;      /* threads of a rank, which tx_muon_lanes depends on; 0: a GPU multiplies (tx_muon_stack) */
  int64_t n_matrices;
  const tx_muon_matrix *matrices; /* Muon's, in the order in which they are stepped; `param` is an index into layout */
  void *workspace;                /* tx_memory_workspace_bytes, aligned to 8 bytes; NULL: there are no matrices */
} tx_memory_args;
#define TX_MEMORY_ARGS_INIT \
  { .size = sizeof(tx_memory_args), .in_flight = 1, .threads = 1 }

/* Bytes of one rank. Not included: activations, module buffers, what allocators and transports keep for themselves, and
 * checksums (8 bytes per TX_CHECKSUM or TX_SAMPLED weights). If parameters with different moments share a sharded
 * buffer, the result has the mean of all ranks' moments: each bucket is cut into equal parts, so that ranks differ by
 * little. */
typedef struct tx_memory {
  int64_t params;
  int64_t grads;
  int64_t masters;
  int64_t moments;
  int64_t scales;    /* scales of block-scaled moments */
  int64_t steps;     /* fp32, one per parameter */
  int64_t transient; /* most bytes needed while buckets are exchanged */
  int64_t moving; /* what exists twice, in addition to params and grads, while weights move into their buffers or shards
                     (parallelize), or while both are laid out again in the order that the first backward showed */
  int64_t emas;   /* moving averages */
  int64_t changes;  /* what a publisher of weights keeps (tx_delta_run): a bit per weight, a bound per TX_BLOCK of them,
                       a checksum per TX_CHECKSUM, and a distance per weight if asked for */
  int64_t products; /* workspace of Muon's matrix products, kept from the first step on */
  int64_t stepping; /* most bytes of Muon's momentum and updates in flight during a step */
  int64_t total;    /* all of the above except transient, stepping and moving */
  int64_t peak; /* total + the larger of transient and stepping; or params + grads + moving, before there are states, if
                   that is more */
} tx_memory;

/* Bytes of workspace for tx_memory_plan if there are matrices; 0 if there are none, or if an argument is not legal. */
TX_API int64_t tx_memory_workspace_bytes(const tx_memory_args *args);

/* Computes the memory of a training step under a strategy. In elements, for a buffer of the layout with T elements,
 * padding included, of which a rank's shard is S = T / world:
 *
 *                       params      grads    masters,            transient
 *                                            moments, emas
 *   no_shard            their own   T        their own           per bucket: received, packed, gathered; a gradient
 *   optim               T           T        S                   per bucket: received, packed; a gradient
 *   optim_grads         T           S        S                   per bucket: received, packed; a bucket of gradients
 *   optim_grads_params  S           S        S                   two units: parameters, gradients, received, packed
 *
 * The terms of `transient`:
 *   received    the other ranks' parts of a bucket, from the wire; under no_shard, where two ranks trade (tx_trades),
 *               the other rank's bucket
 *   packed      a bucket to be sent, if it is not sent from the gradients' own buffer (under optim_grads always, else
 *               if wire_dtype is not grad_dtype, and under optim for messages of joined buckets)
 *   gathered    the sums of all ranks, if their dtype is neither wire_dtype nor grad_dtype
 *   if bf16 is compressed, also the messages that are sent and received
 * These count for the in_flight largest buckets, or for two messages of joined buckets (tx_coalesce) if that is more.
 * The messages are those of `ends`; if that is NULL and the layout's cap is the default, they are the largest possible
 * ones. The bucket of gradients is the one that backward is filling, in grad_dtype. "A gradient" is that of the largest
 * parameter, as backward created it. frozen_bytes count in full, except under optim_grads_params, which shards them.
 *
 * With `slots` a whole bucket is received, and what is received, packed and gathered is in slots that are kept: for
 * each of the three and each class of sizes (512 bytes, then four classes per doubling) two slots, or one if the class
 * has one bucket.
 *
 * optim_grads_params counts the moment when the larger of the two largest units hands over its gradients: that unit's
 * parameters; the other unit's parameters as gathered and as used; the larger unit's gradients; and for both what is
 * reduced, packed and received.
 *
 * changes: counted in full where weights are whole, else as the mean of all ranks, as for moments; for checksums, a
 * rank has those of the weights that it publishes.
 *
 * moving: the weights, if they are in buffers; under no_shard and optim the gradients if these are more and there are
 * buckets to be laid out again; under optim_grads_params the rest of the weights.
 *
 * products: for each dtype of products the largest matrix, twice if one cannot be multiplied where its momentum is
 * (because it is sent in another dtype, or does not begin at a cache line); and four squares of the largest smaller
 * dimension; all of it once per matrix that is multiplied at the same time (tx_muon_lanes). On one rank also the
 * largest parameter in the dtype in which it is sent, TX_MUON_PER_LANE times as often. On a GPU, unless matrices are
 * sharded: in place of the largest matrix, and of its square, as many elements as all have together, at most
 * TX_MUON_STACK; and on one rank momentum of at most TX_MUON_WINDOW bytes, unless one parameter has more.
 *
 * stepping: 0 on one rank; under no_shard all matrices in the dtype in which they are sent; else that of the rank that
 * holds most (tx_muon_exchange_peak). */
TX_API tx_status tx_memory_plan(const tx_memory_args *args, tx_memory *memory, tx_error *error);

#ifdef __cplusplus
}
#endif

#endif
