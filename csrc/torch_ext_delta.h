/* torch_ext for an inference engine, and for whoever sends it weights: what changed in the weights of a model since the
 * last time, without loss, in the fewest bytes.
 *
 * All of it is in libtorch_ext_delta.so, which needs no torch, no Python and no CUDA and exports the functions of this
 * header and of torch_ext_types.h alone; libtorch_ext.so has the same functions. The habits
 * (statuses, messages, struct sizes, tensors, threads) are those of torch_ext.h. Memory is the host's.
 *
 * What it costs: docs/weight_sync.md has bytes beside entropy and ns for each changed weight, and the commands that
 * measure them (python tests/bench --rows payload deltas).
 *
 * How it reads:
 *   1. What a delta is         versions, parts, chains
 *   2. Trainer                 what a publisher keeps, tx_delta_encode, tx_delta_merge
 *   3. Messages                tx_delta_info: what is in one
 *   4. Engine                  receivers, pieces (where weights go), tx_delta_apply
 *
 * A trainer's rank:
 *
 *   tx_delta_chain chain = TX_DELTA_CHAIN_INIT;
 *   tx_delta_chain_begin(n, params, id, rank, ranks, &chain, &error);
 *   tx_delta_renew(n_runs, runs, NULL, &error);          the weights as they are now are version 0
 *   ...                                                  any number of steps, which keep `changed` and `moved`
 *   tx_delta_encode(&args, &chain, NULL, &message, &error);
 *   send(message.data, message.bytes); tx_delta_free(&message);
 *
 * An engine:
 *
 *   tx_delta_open(n, params, n_pieces, pieces, &receiver, &error);
 *   ...                                                  one part of each rank
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
 * A chain is the history of a model's weights in one run of a trainer: version 0, and version n on top of n - 1 for
 * every publish. Each of the trainer's ranks has a part of every version: the elements that it holds, as runs of
 * parameters. A message is one part, or (merged) several of them. A delta has what changed since the version before it;
 * a full message has all weights of a version, so that somebody can join there.
 *
 * Every part carries the checksum of its own bytes and the link that the part of the same rank had one version earlier,
 * so that what is lost, repeated, reordered, damaged or from elsewhere is noticed before anything is written. That is
 * against accidents. Messages are not authenticated: who can forge one can write any weights (but nothing else: every
 * field is checked, and what is allocated is bounded by the receiver's own tensors and the bytes that came).
 *
 * The bytes depend on the weights, on what the publisher kept and on how the parameters are cut into runs; on no
 * instruction set, number of threads or chunk. They are little-endian on every machine.
 * ------------------------------------------------------------------------------------------------------------- */

/* One parameter of the model as a whole, however it is cut. A model is a table of them, in ascending order of the bytes
 * of their names (strcmp), no name twice; trainer and engine have the same. */
typedef struct tx_delta_param {
  const char *name; /* fully qualified; not empty */
  int64_t numel;    /* >= 0 */
  int32_t dtype;    /* BF16, F16, F32 */
  int32_t reserved; /* 0 */
} tx_delta_param;

/* Where a rank's part of a chain stands. Plain data: keep it, and save it where a chain is to go on in another process
 * (together with what tx_delta_run says the publisher keeps). */
typedef struct tx_delta_chain {
  uint64_t size;
  uint64_t id[2];  /* of the chain: 128 random bits, the same on all ranks */
  int64_t version; /* of the last part that was encoded; 0: none was */
  uint64_t link;   /* of that part: what the next one names as its predecessor */
  uint64_t model;  /* fingerprint of the table of parameters */
  int32_t part;    /* this rank's, 0 <= part < parts */
  int32_t parts;   /* of every version */
} tx_delta_chain;
#define TX_DELTA_CHAIN_INIT \
  { .size = sizeof(tx_delta_chain) }

/* A chain at version 0. params: the table. id: two random words, not both 0, from the operating system and the same on
 * every rank. */
TX_API tx_status tx_delta_chain_begin(int64_t n_params, const tx_delta_param *params, const uint64_t *id, int32_t part,
                                      int32_t parts, tx_delta_chain *chain, tx_error *error);

/* ---------------------------------------------------------------------------------------------------------------
 * 2. Trainer
 * ------------------------------------------------------------------------------------------------------------- */

/* Elements [offset, offset + weights.numel) of a parameter, which lie together in this rank's memory, and what the
 * publisher keeps beside them. Steps add to it, tx_delta_encode reads it and leaves it as tx_delta_renew does.
 *
 *   weights    BF16, F16 or F32 as in the table: as they are now
 *   changed    U8, ceil(numel / 8): bit i % 8 (the least significant is 0) of byte i / 8 is set where the bits of
 *              weight i changed since the last version. None: the run goes whole
 *   moved      BF16, ceil(numel / TX_BLOCK): for each block a bound on the sum, over the steps since the last
 *              version, of the largest |new - old| of the value that weights of the block are rounded from. Infinity,
 *              NaN: not known, and the block goes whole. None: no bound is known, and the low bits cannot be told from
 *              the high
 *   distances  U8, ceil(numel / 2), two weights a byte, the first in the low half: how far the weight is from the last
 *              version's, in steps of its ordered integer (below), 4 bits in two's complement; -8: further than 7
 *              either way. None: they are not kept. F32 weights have none
 *   checksums  I64, ceil(numel / TX_CHECKSUM), of the weights of the last version. Blocks whose checksum is another
 *              one, and which have no changed bit, or no bound and no changed bit in a TX_BLOCK, were written by
 *              somebody else, and go whole. None: such writes are not seen, and receivers cannot verify TX_DELTA_FULL
 *
 * The ordered integer of a weight: its bits as a signed integer where its sign is +, else minus the bits without the
 * sign, minus 1; so neighbouring floats differ by 1, and -0 is next to +0. */
typedef struct tx_delta_run {
  int64_t param;  /* index in the table */
  int64_t offset; /* >= 0 */
  tx_tensor weights;
  tx_tensor changed;
  tx_tensor moved;
  tx_tensor distances;
  tx_tensor checksums;
} tx_delta_run;

/* Makes the weights as they are the last version: checksums are made of them; changed, moved and distances become 0.
 * runs: n of them. */
TX_API tx_status tx_delta_renew(int64_t n_runs, const tx_delta_run *runs, const tx_parallel *parallel, tx_error *error);

/* Weights of one tensor, and what tells whether somebody else wrote to them since the last step: masters, or the
 * checksums that the step leaves beside remainders. */
typedef struct tx_delta_written {
  tx_tensor weights;   /* BF16 or F16, any numel */
  tx_tensor masters;   /* F32, as many. None: checksums are there */
  tx_tensor checksums; /* I64, ceil(numel / TX_CHECKSUM), of tx_adamw_args. None: masters are there */
  tx_tensor moved;     /* as tx_delta_run's */
  int64_t marked;      /* written: how many of moved became infinity */
  int64_t first;       /* the library's */
} tx_delta_written;

/* What a step cannot tell: somebody else wrote to weights with masters. The bounds of blocks of which a weight is not
 * its master, rounded to the nearest, or which have another checksum, become infinity, so that they go whole; to be
 * called before tx_delta_encode, and, as the next step rounds them anew, after it, too, for those of which some were
 * marked. NaNs count as alike, and so do zeros. those: n of them; everything is checked before the first bound is
 * written. */
TX_API tx_status tx_delta_mark(int64_t n, tx_delta_written *those, const tx_parallel *parallel, tx_error *error);

/* A message in memory of the library. */
typedef struct tx_delta_message {
  void *data;
  int64_t bytes;
  void *reserved;
} tx_delta_message;
/* Frees the memory; a message that is all zero has none. It is all zero afterwards. */
TX_API void tx_delta_free(tx_delta_message *message);

/* What tx_delta_encode makes. */
typedef enum tx_delta_kind {
  TX_DELTA_CHANGES = 0, /* version chain->version + 1, on top of chain->version */
  /* All weights of chain->version, for who joins there. The runs must be as the last publish left them: a changed bit,
   * or a checksum that is another one, is TX_ERROR_BAD_STATE. The chain stays where it is. */
  TX_DELTA_WHOLE = 1
} tx_delta_kind;

typedef struct tx_delta_encode_args {
  uint64_t size;
  int64_t n_params;
  const tx_delta_param *params; /* the table, as of tx_delta_chain_begin */
  int64_t n_runs;
  const tx_delta_run *runs; /* this rank's, in ascending order of parameter and offset, not overlapping; each time the
                               same, or versions cannot be merged */
  int64_t steps; /* of the optimizer since the last version: 1, or 0 where they may have been several (a weight that
                    changed may be as it was, which takes more bits) */
  int32_t kind;  /* tx_delta_kind */
  /* 1: values are coded so that a receiver can pass over weights which it does not hold: for engines with slices of
   * parameters (a piece without memory). More bytes. */
  int32_t sliceable;
} tx_delta_encode_args;
#define TX_DELTA_ENCODE_ARGS_INIT \
  { .size = sizeof(tx_delta_encode_args) }

/* This rank's part of the next version (or of this one, TX_DELTA_WHOLE), and moves the chain on. What the runs keep is
 * as after tx_delta_renew then (TX_DELTA_WHOLE changes nothing). message: written; the caller frees it. Local, no
 * collective: that all ranks publish after the same step is seen where parts are applied.
 *
 * TX_ERROR_INVALID_ARGUMENT: a chain that is not as tx_delta_chain_begin or the last tx_delta_encode left it.
 * TX_ERROR_MISMATCH: the table is not the chain's (a parameter was added). TX_ERROR_SHAPE, TX_ERROR_DTYPE: a run or
 * what is kept beside it. TX_ERROR_OVERLAP: runs that overlap, or are not in order; a run that keeps two things in one
 * memory. TX_ERROR_BAD_STATE: of TX_DELTA_WHOLE, runs that are not as the last publish left them.
 * TX_ERROR_OUT_OF_MEMORY: and the chain and the runs are as before, as they are after every other error. */
TX_API tx_status tx_delta_encode(const tx_delta_encode_args *args, tx_delta_chain *chain, const tx_parallel *parallel,
                                 tx_delta_message *message, tx_error *error);

/* Parts of any number of versions as one message, which is applied as one: all of it or nothing. messages: n tensors of
 * U8, each a message, in any order; the versions must follow each other without a gap (full messages may begin them),
 * and be of one chain. Parts of a version may be missing: a later merge, or tx_delta_apply, brings them together.
 * merged: written; the caller frees it. Bytes are those of all messages. */
TX_API tx_status tx_delta_merge(int64_t n, const tx_tensor *messages, tx_delta_message *merged, tx_error *error);

/* ---------------------------------------------------------------------------------------------------------------
 * 3. Messages
 * ------------------------------------------------------------------------------------------------------------- */

typedef struct tx_delta_info {
  uint64_t size;
  uint64_t id[2];        /* the chain's */
  uint64_t model;        /* fingerprint of the table of parameters */
  int64_t first_version; /* of the parts in the message */
  int64_t last_version;
  int64_t n_parts;  /* in the message */
  int64_t n_runs;   /* that have a change */
  int64_t changed;  /* weights */
  int64_t n_params; /* of the table, where the message has it (full messages and version 1); else 0 */
  int32_t part;     /* of the first part in the message */
  int32_t parts;    /* of every version */
  int32_t kind;     /* tx_delta_kind of the first version */
  int32_t reserved;
} tx_delta_info;
#define TX_DELTA_INFO_INIT \
  { .size = sizeof(tx_delta_info) }

/* What is in a message. It may be any bytes: TX_ERROR_INVALID_ARGUMENT where it is no message, is cut off or damaged;
 * TX_ERROR_UNAVAILABLE for a format that this library does not know. message: U8. */
TX_API tx_status tx_delta_info_of(tx_tensor message, tx_delta_info *info, tx_error *error);

/* A message's table of parameters: all n_params of them, as tx_delta_info has it; names point into the message. Errors
 * as tx_delta_info_of's, and TX_ERROR_INVALID_ARGUMENT for a table that is damaged; params is not to be used then. */
TX_API tx_status tx_delta_params_of(tx_tensor message, int64_t n_params, tx_delta_param *params, tx_error *error);

/* ---------------------------------------------------------------------------------------------------------------
 * 4. Engine
 * ------------------------------------------------------------------------------------------------------------- */

/* A rectangle of a parameter and where it lies. Row r (of `rows`) is the elements [first + r * step, first + r * step +
 * columns) of the parameter in its own (row-major) order; column c of row r is at data + (r * row_stride + c *
 * column_stride) elements.
 *
 *   where it goes                                           rows  columns  step   row_stride  column_stride
 *   a tensor of its own; a part of a fused one (qkv,        1     numel    0      0           1
 *     gate_up), whose `data` is where the part begins
 *   columns [a, b) of an R x C parameter: first = a         R     b - a    C      b - a       1
 *   an R x C parameter, transposed                          R     C        C      1           R
 *
 * data NULL: the receiver does not hold these elements (another rank of its tensor-parallel group does). All pieces of
 * a parameter together cover each element once. */
typedef struct tx_delta_piece {
  int64_t param; /* index in the table */
  int64_t first;
  int64_t rows;
  int64_t columns;
  int64_t step; /* >= columns, where there are several rows */
  void *data;   /* of the parameter's dtype; the alignment of one byte is enough */
  int64_t row_stride;
  int64_t column_stride;
} tx_delta_piece;

/* Weights of an engine and the version that they are at. One thread at a time. */
typedef struct tx_delta_receiver tx_delta_receiver;

/* A receiver of the table of parameters, whose weights are those of version 0 (or will be those of a full message).
 * pieces: n_pieces, in any order, copied; their memory must stay as long as the receiver. TX_ERROR_SHAPE: elements that
 * no piece covers, or pieces outside of their parameter. TX_ERROR_OVERLAP: elements, or memory, in two pieces, or
 * memory twice in one (strides that fold it). The message names the parameter. The receiver is closed by
 * tx_delta_close. */
TX_API tx_status tx_delta_open(int64_t n_params, const tx_delta_param *params, int64_t n_pieces,
                               const tx_delta_piece *pieces, tx_delta_receiver **receiver, tx_error *error);
/* NULL does nothing. */
TX_API void tx_delta_close(tx_delta_receiver *receiver);

/* The version that the weights are at, and the two words of the chain's id (both 0 before the first apply). */
TX_API int64_t tx_delta_version(const tx_delta_receiver *receiver);
TX_API void tx_delta_chain_id(const tx_delta_receiver *receiver, uint64_t *id);

/* How much is looked at before the first byte is written. Both find every damage to the message. */
typedef enum tx_delta_verify {
  /* The weights that change are what they should be afterwards. Reads the weights of those 131072 in a row (of a run)
   * in which one changes, once: where the changes are depends on how large the old weights are. */
  TX_DELTA_TOUCHED = 0,
  TX_DELTA_FULL = 1 /* all weights are: reads all of them. Needs a publisher that keeps checksums, and a receiver
                       that holds everything */
} tx_delta_verify;

/* Brings the weights to the last version in the messages, in place. messages: n tensors of U8, in any order: all parts
 * of one version, or of several that follow each other, single or merged. Everything is checked before the first byte
 * is written; after an error nothing has changed, and the receiver is at the version it was at. verify:
 * tx_delta_verify. Meanwhile it takes 6 bytes for each weight that changes, a quarter of the receiver's weights at most
 * (what has no room there is decoded twice), and some for each segment and thread.
 *
 * TX_ERROR_INVALID_ARGUMENT  not a message, cut off, damaged, or fields that contradict each other
 * TX_ERROR_UNAVAILABLE       a format that this library does not know
 * TX_ERROR_BAD_STATE         versions that do not follow the receiver's: lost, repeated, reordered; parts that are
 *                            missing, given twice, or of other versions
 * TX_ERROR_MISMATCH          another chain, another table of parameters, a part with another history; or weights that
 *                            are not those of the version before (somebody wrote to them): begin with a full message
 * TX_ERROR_OUT_OF_MEMORY */
TX_API tx_status tx_delta_apply(tx_delta_receiver *receiver, int64_t n, const tx_tensor *messages, int32_t verify,
                                const tx_parallel *parallel, tx_error *error);

#ifdef __cplusplus
}
#endif

#endif
