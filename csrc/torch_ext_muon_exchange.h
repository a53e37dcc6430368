/* Muon's matrices between the two passes of torch_ext_muon.h: what ranks exchange of those that are cut over them, and
 * products. */
#ifndef TORCH_EXT_MUON_EXCHANGE_H
#define TORCH_EXT_MUON_EXCHANGE_H

#include "torch_ext_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* -- matrices that are cut over ranks ------------------------------------------------------------------------------ */

typedef struct tx_muon_matrix {
  int64_t param; /* its parameter's number; a parameter's matrices follow each other */
  int64_t begin; /* its first element in the parameter */
  int64_t rows;
  int64_t columns;
  int32_t owner;    /* the rank that orthogonalises it (tx_plan_owners) */
  int32_t travels;  /* F32 or BF16: of its momentum on the way to the owner, and of its update; one of a parameter */
  int32_t products; /* F32 or BF16: that it is multiplied in */
  int32_t reserved;
} tx_muon_matrix;

/* Elements [begin, end) of a parameter. */
typedef struct tx_muon_run {
  int64_t begin;
  int64_t end;
} tx_muon_run;

typedef struct tx_muon_exchange_args {
  uint64_t size;
  int64_t n;
  const tx_muon_matrix *matrices; /* n, of parameters that have elements, in the order in which they are stepped */
  int64_t n_params;
  const tx_muon_run *runs; /* n_params times world: what each rank has of each parameter */
  int64_t world;
  int64_t rank;
} tx_muon_exchange_args;
#define TX_MUON_EXCHANGE_ARGS_INIT \
  { .size = sizeof(tx_muon_exchange_args), .world = 1 }

/* What the caller is to do. */
typedef enum tx_muon_do {
  TX_MUON_DONE = 0,
  TX_MUON_MOMENTUM = 1, /* of parameter `param`: the pass over this rank's elements, into memory of its own */
  TX_MUON_GATHER = 2,   /* round: starts the way of all ranks' parts of the momentum to the owners */
  TX_MUON_RECEIVE = 3,  /* round: waits for it; what was sent may go */
  TX_MUON_MULTIPLY = 4, /* round: orthogonalises this rank's matrix where it was received */
  TX_MUON_SCATTER = 5,  /* round: starts the way back, and that of a byte of each rank to all: whether that failed */
  TX_MUON_INSTALL = 6,  /* round: waits for both, tells of what failed (tx_muon_exchange_fail), and puts the parts of
                           the updates where the momentum was; what was sent and received may go */
  TX_MUON_UPDATE = 7,   /* of parameter `param`: the pass over its weights; its memory may go */
  TX_MUON_DISCARD = 8   /* of parameter `param`, one of whose matrices failed: its memory may go */
} tx_muon_do;

typedef struct tx_muon_action {
  int32_t kind; /* tx_muon_do */
  int32_t reserved;
  int64_t param;
  int64_t round;
} tx_muon_action;

typedef struct tx_muon_exchange tx_muon_exchange;

/* The step of matrices that are cut over a group of ranks: what each rank does, in which order, as a machine without
 * I/O. Rounds: in round k each rank orthogonalises one matrix at most, the k-th of those that it owns. An all-to-all
 * brings it the ranks' parts, in their order, which is that of the elements; another one takes the parts of the updates
 * back. Round k + 1's momentum travels beside round k's products, and so do round k - 1's updates. A parameter is
 * stepped when all of its matrices came back, on the same number of rounds on all ranks, and if none of them failed:
 * as a whole, or not at all.
 *
 * memory: tx_muon_exchange_bytes(args) bytes (0: args are not legal, and tx_muon_exchange_init says why), at a multiple
 * of 8, the caller's; args' arrays must outlive it. */
TX_API int64_t tx_muon_exchange_bytes(const tx_muon_exchange_args *args);
TX_API tx_status tx_muon_exchange_init(void *memory, const tx_muon_exchange_args *args, tx_muon_exchange **exchange,
                                       tx_error *error);

/* The next action, when the last one was done. Not TX_MUON_DONE: returns 1. */
TX_API int32_t tx_muon_exchange_next(tx_muon_exchange *exchange, tx_muon_action *action);

/* The matrix that a rank orthogonalises in a round; -1: none. */
TX_API int64_t tx_muon_exchange_matrix(const tx_muon_exchange *exchange, int64_t round, int64_t rank);

/* What a rank has of a matrix, in elements of the parameter; begin == end: nothing. */
TX_API tx_muon_run tx_muon_exchange_part(const tx_muon_exchange *exchange, int64_t matrix, int64_t rank);

/* Bytes of a round's all-to-all. come: world entries, of this rank's matrix from each rank; go: of the other ranks'
 * matrices to each. The way back has them the other way round. */
TX_API void tx_muon_exchange_sizes(const tx_muon_exchange *exchange, int64_t round, int64_t *come, int64_t *go);

/* At TX_MUON_INSTALL, of each matrix of the round whose products were not finite, or whose owner could not make them,
 * on all ranks alike: its parameter is not stepped. */
TX_API void tx_muon_exchange_fail(tx_muon_exchange *exchange, int64_t matrix);

/* A number of a plan and of what it is of, for ranks to compare before the first message. plan: of tx_plan_owners. ids:
 * n, of the matrices' parameters (tx_param_id). */
TX_API int64_t tx_muon_fingerprint(int64_t plan, int64_t n, const tx_muon_matrix *matrices, const int64_t *ids);

/* The first matrix that failed, the same on all ranks at TX_MUON_DONE; -1: none. */
TX_API int64_t tx_muon_exchange_failed(const tx_muon_exchange *exchange);

/* The most bytes that the caller holds at a time if it does what is said above. */
TX_API int64_t tx_muon_exchange_peak(const tx_muon_exchange_args *args, void *memory);

/* -- products of Muon's iterations ------------------------------------------------------------------------------- */

/* How one matrix, divided by its norm, is orthogonalised: a singular value s becomes a s + b s^3 + c s^5 in each of
 * `steps` steps. */
typedef struct tx_muon_iteration {
  int64_t rows;
  int64_t columns;
  int64_t steps;
  int64_t restart; /* as tx_muon_operations */
  int64_t panel;   /* of symmetric products; 0: left to who makes or counts them (tx_muon_panel) */
  double a, b, c;
  int32_t ns; /* tx_muon_ns */
  int32_t reserved;
} tx_muon_iteration;

/* What products are of: the matrix, another of its shape, and squares of its smaller dimension. */
typedef enum tx_muon_operand {
  TX_MUON_X = 0,
  TX_MUON_OTHER = 1,
  TX_MUON_SQUARES = 2, /* the first of four */
  TX_MUON_OPERANDS = 6
} tx_muon_operand;

typedef enum tx_muon_product_kind {
  TX_MUON_ADD_PRODUCT =
      1,                /* rows [row, row + rows) of columns [column, column + columns) of `out` become beta times
                           those of `added` and alpha times those of left * right. beta 0: nothing of added is read */
  TX_MUON_MIRRORED = 2, /* out: tx_muon_mirror */
  TX_MUON_SHIFTED = 3   /* alpha is added to the diagonal of `out` */
} tx_muon_product_kind;

typedef struct tx_muon_product {
  int32_t kind;                    /* tx_muon_product_kind */
  int32_t out, added, left, right; /* tx_muon_operand */
  int32_t left_transposed, right_transposed;
  int32_t reserved;
  int64_t row, rows, column, columns;
  double beta, alpha;
} tx_muon_product;

/* All products of an iteration, in their order: writes `room` of them at most, and returns how many there are; 0 where
 * an argument is not legal. found, last: X or OTHER, where the result is, and the square that it was multiplied by
 * last, which is finite if the result is. */
TX_API int64_t tx_muon_products(const tx_muon_iteration *iteration, tx_muon_product *products, int64_t room,
                                int32_t *found, int32_t *last);

/* How many matrices are multiplied at a time, each by one thread, on a processor with so many threads; 0: one after the
 * other, each by all threads. dtype: of the products. Other threads than one may give other bits, so that this depends
 * on nothing but a matrix and the threads. */
TX_API int64_t tx_muon_lanes(int64_t rows, int64_t columns, int32_t dtype, int64_t threads);

/* Matrices that each of these threads has, at most, before weights are updated: threads end at about the same time. */
#define TX_MUON_PER_LANE 3

typedef enum tx_muon_outcome {
  TX_MUON_ORTHOGONAL = 0,
  TX_MUON_NOT_FINITE = 1,
  TX_MUON_REFUSED = 2 /* torch could not multiply, for lack of memory as a rule */
} tx_muon_outcome;

/* One matrix that torch multiplies on the CPU. */
typedef struct tx_muon_job {
  const tx_muon_iteration *iteration;
  void *x;         /* rows * columns elements, at a cache line; become the result */
  int32_t dtype;   /* F32 or BF16 */
  int32_t alone;   /* 1: by one thread, beside others; 0: by all threads, when those are done */
  int32_t outcome; /* written: tx_muon_outcome */
  int32_t reserved;
} tx_muon_job;

/* Of one matrix at a time, for the largest, each at a cache line. */
typedef struct tx_muon_workspace {
  void *other;         /* as many elements as the matrix has */
  void *g, *q, *p, *t; /* squares of its smaller dimension */
} tx_muon_workspace;

/* Orthogonalises each, by torch's products, in the order in which threads are free: the largest are to be first. As
 * many at a time as there are workspaces; those that all threads multiply take the first of these. What fails is told
 * by `outcome`; the others are made. */
TX_API tx_status tx_torch_orthogonalise(tx_muon_job *jobs, int64_t n, const tx_muon_workspace *workspaces,
                                        int64_t n_workspaces, tx_error *error);

#ifdef __cplusplus
}
#endif

#endif
