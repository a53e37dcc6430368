/* torch_ext for inference engines and for the trainers that send them weights: lossless deltas of a model's weights, in
 * the fewest bytes.
 *
 * Everything is in libtorch_ext_delta.so, which needs no torch, no Python and no CUDA and exports only the functions of
 * this header and of torch_ext_types.h; libtorch_ext.so has the same functions. The conventions (errors, structs,
 * arguments, threads) are those of torch_ext.h. All memory is host memory.
 *
 * What it costs: docs/weight_sync.md has the bytes compared with entropy, the ns per changed weight, and the commands
 * that measure them (python tests/bench --rows payload deltas).
 *
 * Contents:
 *   1. What a delta is         versions, parts, chains
 *   2. Trainer                 what a publisher keeps, tx_delta_encode, tx_delta_merge
 *   3. Messages                tx_delta_info: the content of a message
 *   4. Engine                  receivers, pieces (where weights go), tx_delta_apply
 *
 * A trainer's rank:
 *
 *   tx_delta_chain chain = TX_DELTA_CHAIN_INIT;
 *   tx_delta_chain_begin(n, params, id, rank, ranks, &chain, &error);
 *   tx_delta_renew(n_runs, runs, NULL, &error);          the current weights are version 0
 *   ...                                                  any number of steps, which update `changed` and `moved`
 *   tx_delta_encode(&args, &chain, NULL, &message, &error);
 *   send(message.data, message.bytes); tx_delta_free(&message);
 *
 * An engine:
 *
 *   tx_delta_open(n, params, n_pieces, pieces, &receiver, &error);
 *   ...                                                  one part from each rank
 *   tx_delta_apply(receiver, n_parts, parts, TX_DELTA_TOUCHED, NULL, &error);
 *   tx_delta_close(receiver); */
#ifndef TORCH_EXT_DELTA_H
#define TORCH_EXT_DELTA_H

#include "torch_ext_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------------------------
 * 1. What a delta is
 *
 * A chain is the history of a model's weights in one run of a trainer: version 0, then version n on top of n - 1 for
 * every publish. Each of the trainer's ranks has one part of every version: the elements that it holds, as runs of
 * parameters. A message is one part, or several merged parts. A delta message has what changed since the previous
 * version; a full message has all weights of a version, so that an engine can join there.
 *
 * Every part carries the checksum of its own bytes and the link of the same rank's part one version earlier. So lost,
 * repeated, reordered, damaged or foreign parts are noticed before anything is written. This protects against
 * accidents, not against attackers: messages are not authenticated, and anyone who can forge one can write any weights.
 * (But nothing else: every field is checked, and allocations are bounded by the receiver's own tensors and the bytes
 * that arrived.)
 *
 * The bytes of a message depend only on the weights, on what the publisher kept, and on how the parameters are cut into
 * runs; not on the instruction set, the number of threads or the chunk size. They are little-endian on every machine.
 * ------------------------------------------------------------------------------------------------------------- */

/* One whole parameter of the model, however it is sharded. A model is a table of parameters in ascending order of the
 * bytes of their names (strcmp), each name once. Trainer and engine have the same table. */
typedef struct tx_delta_param {
  const char *name; /* fully qualified; not empty */
  int64_t numel;    /* >= 0 */
  int32_t dtype;    /* BF16, F16, F32 */
  int32_t reserved; /* 0 */
} tx_delta_param;

/* The state of one rank's part of a chain. Plain data: keep it, and save it if the chain is to continue in another
 * process (together with what the publisher keeps, see tx_delta_run). */
typedef struct tx_delta_chain {
  uint64_t size;
  uint64_t id[2];  /* id of the chain: 128 random bits, the same on all ranks */
  int64_t version; /* version of the last part that was encoded; 0: none so far */
  uint64_t link;   /* link of that part, which the next part names as its predecessor */
  uint64_t model;  /* fingerprint of the table of parameters */
  int32_t part;    /* this rank's part, 0 <= part < parts */
  int32_t parts;   /* number of parts of every version */
} tx_delta_chain;
#define TX_DELTA_CHAIN_INIT \
  { .size = sizeof(tx_delta_chain) }

/* Begins a chain at version 0. params: the table. id: two random words, not both 0, from the operating system, the same
 * on every rank. */
TX_API tx_status tx_delta_chain_begin(int64_t n_params, const tx_delta_param *params, const uint64_t *id, int32_t part,
                                      int32_t parts, tx_delta_chain *chain, tx_error *error);

/* ---------------------------------------------------------------------------------------------------------------
 * 2. Trainer
 * ------------------------------------------------------------------------------------------------------------- */

/* A run: elements [offset, offset + weights.numel) of a parameter, contiguous in this rank's memory, and what the
 * publisher keeps for them. Optimizer steps add to it. tx_delta_encode reads it and leaves it as tx_delta_renew does.
 *
 *   weights    BF16, F16 or F32 as in the table: the current weights
 *   changed    U8, ceil(numel / 8): bit i % 8 (the least significant is 0) of byte i / 8 is set if the bits of weight
 *              i changed since the last version. None: the whole run is sent
 *   moved      BF16, ceil(numel / TX_BLOCK): for each block an upper bound on the sum, over the steps since the last
 *              version, of the largest |new - old| of the values that the block's weights are rounded from. Infinity
 *              or NaN: not known, and the whole block is sent. None: no bound is known, and the low bits cannot be
 *              told from the high
 *   distances  U8, ceil(numel / 2), two weights per byte, the first in the low half: by how many steps of its ordered
 *              integer (below) the weight differs from the last version, 4 bits in two's complement; -8: more than 7
 *              either way. None: not kept. F32 weights have none
 *   checksums  I64, ceil(numel / TX_CHECKSUM), of the weights of the last version. They reveal writes from outside: a
 *              block whose checksum differs is sent whole if it has no changed bit, or has a TX_BLOCK without a known
 *              bound and without a changed bit. None: such writes are not noticed, and receivers cannot use
 *              TX_DELTA_FULL
 *
 * The ordered integer of a weight: its bits as a signed integer if its sign is +, else minus the bits without the sign,
 * minus 1. So neighbouring floats differ by 1, and -0 is next to +0. */
typedef struct tx_delta_run {
  int64_t param;  /* index in the table */
  int64_t offset; /* >= 0 */
  tx_tensor weights;
  tx_tensor changed;
  tx_tensor moved;
  tx_tensor distances;
  tx_tensor checksums;
} tx_delta_run;

/* Makes the current weights the last version: computes their checksums and sets changed, moved and distances to 0.
 * runs: n_runs of them. */
TX_API tx_status tx_delta_renew(int64_t n_runs, const tx_delta_run *runs, const tx_parallel *parallel, tx_error *error);

/* The weights of one tensor, and what reveals that they were written from outside since the last step: their masters,
 * or the checksums that the step leaves for weights with remainders. */
typedef struct tx_delta_written {
  tx_tensor weights;   /* BF16 or F16, any numel */
  tx_tensor masters;   /* F32, same numel. None: use checksums */
  tx_tensor checksums; /* I64, ceil(numel / TX_CHECKSUM), from tx_adamw_args. None: use masters */
  tx_tensor moved;     /* as in tx_delta_run */
  int64_t marked;      /* written: how many bounds of moved became infinity */
  int64_t first;       /* used by the library */
} tx_delta_written;

/* Finds weights with masters that were written from outside, which a step does not record. The bound (moved) of a block
 * becomes infinity, so that the block is sent whole, if one of its weights is not its master rounded to nearest, or if
 * its checksum differs. NaNs count as equal, and so do +0 and -0. Call it before tx_delta_encode; call it again after
 * tx_delta_encode for the tensors of which blocks were marked, as the next step rounds their weights again. tensors: n
 * of them. Everything is checked before the first bound is written. */
TX_API tx_status tx_delta_mark(int64_t n, tx_delta_written *tensors, const tx_parallel *parallel, tx_error *error);

/* A message, in memory allocated by the library. */
typedef struct tx_delta_message {
  void *data;
  int64_t bytes;
  void *reserved;
} tx_delta_message;
/* Frees the message's memory and sets the struct to zero. A struct that is all zero has no memory to free. */
TX_API void tx_delta_free(tx_delta_message *message);

/* What tx_delta_encode encodes. */
typedef enum tx_delta_kind {
  TX_DELTA_CHANGES = 0, /* version chain->version + 1, on top of chain->version */
  /* All weights of chain->version, for engines that join there. The runs must be as the last publish left them: a
   * changed bit, or a checksum that differs, is TX_ERROR_BAD_STATE. The chain does not advance. */
  TX_DELTA_WHOLE = 1
} tx_delta_kind;

typedef struct tx_delta_encode_args {
  uint64_t size;
  int64_t n_params;
  const tx_delta_param *params; /* the table, as passed to tx_delta_chain_begin */
  int64_t n_runs;
  const tx_delta_run *runs; /* this rank's, in ascending order of parameter and offset, not overlapping; the same each
                               time, or versions cannot be merged */
  int64_t steps; /* optimizer steps since the last version: 1; or 0 if there may have been several (a changed weight may
                    then have its old value again, which takes more bits to encode) */
  int32_t kind;  /* tx_delta_kind */
  /* 1: values are encoded so that a receiver can skip weights which it does not hold: for engines with slices of
   * parameters (pieces without memory). Takes more bytes. */
  int32_t sliceable;
} tx_delta_encode_args;
#define TX_DELTA_ENCODE_ARGS_INIT \
  { .size = sizeof(tx_delta_encode_args) }

/* Encodes this rank's part of the next version and advances the chain (with TX_DELTA_WHOLE: of the current version, and
 * nothing changes). Afterwards the runs are as after tx_delta_renew. message: written; the caller frees it. The call is
 * local, not a collective: whether all ranks published after the same step is checked when parts are applied.
 *
 * TX_ERROR_INVALID_ARGUMENT: the chain is not as tx_delta_chain_begin or the last tx_delta_encode left it.
 * TX_ERROR_MISMATCH: the table is not the chain's (a parameter was added). TX_ERROR_SHAPE, TX_ERROR_DTYPE: of a run or
 * of what is kept for it. TX_ERROR_OVERLAP: runs overlap or are out of order, or a run keeps two things in the same
 * memory. TX_ERROR_BAD_STATE: with TX_DELTA_WHOLE, the runs are not as the last publish left them.
 * TX_ERROR_OUT_OF_MEMORY. After any error the chain and the runs are unchanged. */
TX_API tx_status tx_delta_encode(const tx_delta_encode_args *args, tx_delta_chain *chain, const tx_parallel *parallel,
                                 tx_delta_message *message, tx_error *error);

/* Merges parts of any number of versions into one message, which is applied as a whole or not at all. messages: n
 * tensors of U8, each a message, in any order. The versions must be of one chain and follow each other without a gap;
 * full messages may begin them. Parts of a version may be missing if a later merge, or tx_delta_apply, adds them.
 * merged: written; the caller frees it. Its size is the sum of the messages' sizes. */
TX_API tx_status tx_delta_merge(int64_t n, const tx_tensor *messages, tx_delta_message *merged, tx_error *error);

/* ---------------------------------------------------------------------------------------------------------------
 * 3. Messages
 * ------------------------------------------------------------------------------------------------------------- */

typedef struct tx_delta_info {
  uint64_t size;
  uint64_t id[2];        /* the chain's */
  uint64_t model;        /* fingerprint of the table of parameters */
  int64_t first_version; /* first version of the parts in the message */
  int64_t last_version;
  int64_t n_parts;  /* parts in the message */
  int64_t n_runs;   /* runs that have a change */
  int64_t changed;  /* weights that changed */
  int64_t n_params; /* parameters in the table, if the message has it (full messages and version 1); else 0 */
  int32_t part;     /* `part` of the first part in the message */
  int32_t parts;    /* number of parts of every version */
  int32_t kind;     /* tx_delta_kind of the first version */
  int32_t reserved;
} tx_delta_info;
#define TX_DELTA_INFO_INIT \
  { .size = sizeof(tx_delta_info) }

/* Describes a message, which may be arbitrary bytes, after verifying the checksums of its parts; decodes no weights.
 * TX_ERROR_INVALID_ARGUMENT if it is not a message, cut off or damaged; TX_ERROR_UNAVAILABLE for a format that this
 * library does not know. message: U8. */
TX_API tx_status tx_delta_info_of(tx_tensor message, tx_delta_info *info, tx_error *error);

/* Reads a message's table of parameters: n_params entries, as many as tx_delta_info says; names point into the message.
 * Errors as for tx_delta_info_of, and TX_ERROR_INVALID_ARGUMENT for a damaged table; params must not be used then. */
TX_API tx_status tx_delta_params_of(tx_tensor message, int64_t n_params, tx_delta_param *params, tx_error *error);

/* ---------------------------------------------------------------------------------------------------------------
 * 4. Engine
 * ------------------------------------------------------------------------------------------------------------- */

/* A rectangle of a parameter, and where it is in memory. Row r (of `rows`) is the elements
 * [first + r * step, first + r * step + columns) of the parameter in its own (row-major) order; column c of row r is at
 * data + (r * row_stride + c * column_stride) elements.
 *
 *   where it goes                                           rows  columns  step   row_stride  column_stride
 *   a tensor of its own; a part of a fused one (qkv,        1     numel    0      0           1
 *     gate_up), whose `data` is where the part begins
 *   columns [a, b) of an R x C parameter: first = a         R     b - a    C      b - a       1
 *   an R x C parameter, transposed                          R     C        C      1           R
 *
 * data NULL: the receiver does not hold these elements (another rank of its tensor-parallel group does). Together the
 * pieces of a parameter must cover each element exactly once. */
typedef struct tx_delta_piece {
  int64_t param; /* index in the table */
  int64_t first;
  int64_t rows;
  int64_t columns;
  int64_t step; /* >= columns, if there are several rows */
  void *data;   /* of the parameter's dtype; need not be aligned */
  int64_t row_stride;
  int64_t column_stride;
} tx_delta_piece;

/* The weights of an engine and their version. To be used by one thread at a time. */
typedef struct tx_delta_receiver tx_delta_receiver;

/* Opens a receiver for the parameters of the table. Their weights must be those of version 0, or will be set by a full
 * message. pieces: n_pieces, in any order, copied; the memory that they point to must outlive the receiver.
 * TX_ERROR_SHAPE: elements that no piece covers, or pieces outside of their parameter. TX_ERROR_OVERLAP: elements or
 * memory in two pieces, or the same memory twice in one (overlapping strides). The message names the parameter. Close
 * the receiver with tx_delta_close. */
TX_API tx_status tx_delta_open(int64_t n_params, const tx_delta_param *params, int64_t n_pieces,
                               const tx_delta_piece *pieces, tx_delta_receiver **receiver, tx_error *error);
/* Closes a receiver; NULL does nothing. */
TX_API void tx_delta_close(tx_delta_receiver *receiver);

/* The version of the weights, and the two words of the chain's id (both 0 before the first apply). */
TX_API int64_t tx_delta_version(const tx_delta_receiver *receiver);
TX_API void tx_delta_chain_id(const tx_delta_receiver *receiver, uint64_t *id);

/* What is verified before the first byte is written. Both find any damage to the message. */
typedef enum tx_delta_verify {
  /* The weights that change will be what they should be. Reads, once, the weights of each 131072 in a row (of a run) in
   * which one changes, because the positions of the changes are encoded relative to the magnitudes of the old
   * weights. */
  TX_DELTA_TOUCHED = 0,
  TX_DELTA_FULL = 1 /* All weights will be what they should be: reads all of them. Needs a publisher that keeps
                       checksums, and a receiver that holds everything */
} tx_delta_verify;

/* Updates the weights, in place, to the last version in the messages. messages: n tensors of U8, in any order: all
 * parts of one version, or of several that follow each other, single or merged. Everything is checked before the first
 * byte is written; after an error nothing has changed, and the receiver is at its old version. verify: tx_delta_verify.
 * During the call it takes 6 bytes per weight that changes, but at most a quarter of the receiver's weights (changes
 * that do not fit are decoded twice), and a little per segment and thread.
 *
 *   TX_ERROR_INVALID_ARGUMENT  not a message, cut off, damaged, or with fields that contradict each other
 *   TX_ERROR_UNAVAILABLE       a format that this library does not know
 *   TX_ERROR_BAD_STATE         versions that do not follow the receiver's: lost, repeated, reordered; parts that are
 *                              missing, given twice, or of other versions
 *   TX_ERROR_MISMATCH          another chain, another table of parameters, a part with another history; or weights
 *                              that are not those of the previous version (written from outside): begin with a full
 *                              message
 *   TX_ERROR_OUT_OF_MEMORY */
TX_API tx_status tx_delta_apply(tx_delta_receiver *receiver, int64_t n, const tx_tensor *messages, int32_t verify,
                                const tx_parallel *parallel, tx_error *error);

#ifdef __cplusplus
}
#endif

#endif
