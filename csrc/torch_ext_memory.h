/* Bytes that each rank holds, before they are allocated. */
#ifndef TORCH_EXT_MEMORY_H
#define TORCH_EXT_MEMORY_H

#include "torch_ext_muon_exchange.h"
#include "torch_ext_plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the optimizer keeps per element of a parameter. */
typedef struct tx_memory_state {
  int32_t exp_avg_dtype;    /* F32, BF16; F16 and U8 with a scale byte per TX_BLOCK elements */
  int32_t exp_avg_sq_dtype; /* likewise; TX_NONE: a matrix of Muon's, whose momentum is exp_avg */
  int32_t master_dtype;     /* TX_NONE: the weights are their own masters; F32; I16: remainders */
  int32_t reserved;
} tx_memory_state;

/* Parameters that optim_grads_params gathers at a time. */
typedef struct tx_memory_unit {
  int64_t numel;
  int64_t trained;      /* of them, with a gradient */
  int32_t param_dtype;  /* that they are gathered and computed in */
  int32_t reduce_dtype; /* that their gradients are handed to the reduction in */
  int32_t wire_dtype;   /* and travel in, where that is narrower */
  int32_t reserved;
} tx_memory_unit;

typedef struct tx_memory_args {
  uint64_t size;
  const tx_layout_args *layout;    /* the trainable parameters, their dtypes and the ranks */
  const tx_layout_place *places;   /* what tx_layout_plan made of them: layout->n entries */
  const tx_layout_bucket *buckets; /* and n_buckets */
  int64_t n_buckets;
  const tx_memory_state *states; /* layout->n entries; masters are equal within a buffer */
  int64_t n_units;
  const tx_memory_unit *units; /* for optim_grads_params; the two largest count */
  int64_t frozen_bytes;        /* of parameters that are not trained */
  int64_t in_flight;           /* buckets that are exchanged at a time, at most; >= 1 */
  const int64_t *ends; /* of tx_coalesce: n_messages ends, the last one n_buckets; NULL: the link is not known */
  int64_t n_messages;
  int32_t strategy;     /* tx_strategy */
  int32_t gather_dtype; /* of the policy: grad_gather_dtype */
  int32_t slots;        /* 1: buckets travel in slots, as on GPUs */
  int32_t compressed;   /* 1: bf16 travels compressed (tx_compress) */
  int32_t ema_dtype;    /* of an average of each parameter: TX_NONE, F32, BF16 (tx_adamw_args.emas) */
  int32_t ema_lows;     /* 1: with 8 bits more beside BF16 (tx_adamw_args.ema_lows) */
  int32_t publishes;    /* 1: steps note what they change (changed, moved), beside checksums of it */
  int32_t distances;    /* 1: and how far, of weights in 16 bits (tx_adamw_args.distances) */
  int64_t threads;      /* of a rank's processor: matrices that are multiplied at a time (tx_muon_lanes); >= 1 */
  int64_t n_matrices;
  const tx_muon_matrix *matrices; /* of Muon's, in the order in which they are stepped; their params are the layout's */
  void *room;                     /* tx_memory_room_bytes, at a multiple of 8; NULL: there are no matrices */
} tx_memory_args;
#define TX_MEMORY_ARGS_INIT \
  { .size = sizeof(tx_memory_args), .in_flight = 1, .threads = 1 }

/* Bytes of one rank. Activations, buffers of modules, what allocators and transports keep for themselves, and checksums
 * (8 bytes for TX_CHECKSUM or TX_SAMPLED weights) are not in it. Where moments differ within a buffer that is cut, the
 * rank has the mean of all ranks' moments: each bucket is cut into equal parts, so that ranks differ by little. */
typedef struct tx_memory {
  int64_t params;
  int64_t grads;
  int64_t masters;
  int64_t moments;
  int64_t scales;    /* of moments in blocks */
  int64_t steps;     /* fp32, one per parameter */
  int64_t transient; /* while buckets travel, at most */
  int64_t moving;    /* what is there twice, beside params and grads, while weights move into their buffers or shards
                        (parallelize), or both are laid out in the order that the first backward showed */
  int64_t emas;      /* averages */
  int64_t changes; /* what a publisher of weights keeps: a bit for each weight, a bound for TX_BLOCK of them, a checksum
                      for TX_CHECKSUM, and where it is asked for a distance each (tx_delta_run) */
  int64_t products; /* in which Muon's matrices are multiplied, kept from the first step on */
  int64_t stepping; /* momentum and updates of Muon's on their way, in a step, at most */
  int64_t total;    /* of all but transient, stepping and moving */
  int64_t peak;     /* total + transient or stepping; or params, grads and moving, before there are states, if that is
                       more */
} tx_memory;

/* Bytes that tx_memory_plan works in, where there are matrices; 0: there are none, or an argument is not legal. */
TX_API int64_t tx_memory_room_bytes(const tx_memory_args *args);

/* The memory of a training step under a strategy. In elements, where a buffer of the layout has T of them, padding
 * included, and a rank's share of it is S = T / world:
 *
 *                       params      grads    masters,            transient
 *                                            moments, emas
 *   no_shard            their own   T        their own           per bucket: received, packed, gathered; a gradient
 *   optim               T           T        S                   per bucket: received, packed; a gradient
 *   optim_grads         T           S        S                   per bucket: received, packed; a bucket of gradients
 *   optim_grads_params  S           S        S                   two units: parameters, gradients, received, packed
 *
 * received: the other ranks' parts of a bucket, from the wire, or under no_shard the other's bucket where two ranks
 * trade (tx_trades); packed: a bucket to be sent, where it is not sent from the gradients' own buffer (optim_grads:
 * always; else where wire_dtype is not grad_dtype); gathered: the sums of all ranks, where their dtype is neither of
 * the two; and if bf16 is compressed, the messages that are sent and received of it. They count for the in_flight
 * largest buckets, and for two messages of joined ones (tx_coalesce), if that is more: those that `ends` has, or, where
 * it is NULL and the layout's cap is the default, the largest that there may be. The bucket of gradients is the one
 * that backward is filling, in grad_dtype; a gradient, the largest parameter's as backward made it. frozen_bytes are
 * whole but for optim_grads_params, which shards them.
 *
 * With slots a bucket is received whole, and what is received, packed and gathered lies in slots that are kept: for
 * each of the three and each class of sizes (512 bytes, then four in each doubling) two, or one where the class has one
 * bucket.
 *
 * Of the two largest units optim_grads_params has, while the larger one's gradients are handed over: its parameters,
 * the other's as they came and as they are used, its gradients, and of both what is reduced, packed and received.
 *
 * changes are whole where weights are, and else the mean of all ranks', as moments; of checksums every rank has its
 * part of the weights that it publishes.
 *
 * moving is the weights where they are in buffers; under no_shard and optim the gradients, where there are buckets to
 * be laid out anew, if they are more; and under optim_grads_params the rest of the weights.
 *
 * products are, of each dtype that matrices are multiplied in, the largest of them, twice where one is not multiplied
 * where its momentum lies (it travels in another dtype, or does not begin at a cache line), and four squares of the
 * largest smaller dimension, as often as matrices are multiplied at a time (tx_muon_lanes); on one rank also the
 * largest parameter as it travels, TX_MUON_PER_LANE times as often. stepping is nothing on one rank,
 * all matrices as they travel under no_shard, and else that of the rank that holds most (tx_muon_exchange_peak). */
TX_API tx_status tx_memory_plan(const tx_memory_args *args, tx_memory *memory, tx_error *error);

#ifdef __cplusplus
}
#endif

#endif
