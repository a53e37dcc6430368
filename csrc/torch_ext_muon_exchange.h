/* Muon's matrices between the two passes of torch_ext_muon.h: what ranks exchange for matrices that are sharded over
 * them, and the matrix products. */
#ifndef TORCH_EXT_MUON_EXCHANGE_H
#define TORCH_EXT_MUON_EXCHANGE_H

#include "torch_ext_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* -- matrices that are sharded over ranks -------------------------------------------------------------------------- */

typedef struct tx_muon_matrix {
  int64_t param; /* index of its parameter; the matrices of a parameter follow each other */
  int64_t begin; /* its first element in the parameter */
  int64_t rows;
  int64_t columns;
  int32_t owner;      /* the rank that orthogonalises it (tx_plan_owners) */
  int32_t wire_dtype; /* F32 or BF16: dtype in which its momentum is sent to the owner, and its update back; one dtype
                         per parameter */
  int32_t product_dtype; /* F32 or BF16: dtype of its matrix products */
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
  const tx_muon_run *runs; /* n_params * world: the elements of each parameter that each rank has */
  int64_t world;
  int64_t rank;
} tx_muon_exchange_args;
#define TX_MUON_EXCHANGE_ARGS_INIT \
  { .size = sizeof(tx_muon_exchange_args), .world = 1 }

/* What the caller does next (tx_muon_exchange_next), for a parameter or for a round. */
typedef enum tx_muon_do {
  TX_MUON_DONE = 0,
  TX_MUON_MOMENTUM = 1, /* parameter `param`: run tx_muon_momentum over this rank's part, into new memory */
  TX_MUON_GATHER = 2,   /* round: start the all-to-all that sends the ranks' parts of the momentum to the owners */
  TX_MUON_RECEIVE = 3,  /* round: wait for it; what was sent may be freed */
  TX_MUON_MULTIPLY = 4, /* round: orthogonalise this rank's matrix where it was received */
  TX_MUON_SCATTER = 5,  /* round: start the all-to-all of the updates, and tell all ranks in a byte whether it failed */
  TX_MUON_INSTALL = 6,  /* round: wait for both, report failures (tx_muon_exchange_fail), and put the parts of the
                           updates where the momentum was; what was sent and received may be freed */
  TX_MUON_UPDATE = 7,   /* parameter `param`: run tx_muon_update over its weights; its memory may be freed */
  TX_MUON_DISCARD = 8   /* parameter `param`: one of its matrices failed; its memory may be freed */
} tx_muon_do;

typedef struct tx_muon_action {
  int32_t kind; /* tx_muon_do */
  int32_t reserved;
  int64_t param;
  int64_t round;
} tx_muon_action;

typedef struct tx_muon_exchange tx_muon_exchange;

/* Steps matrices that are sharded over a group of ranks: a state machine without I/O that says what each rank does, and
 * in which order. In round k each rank orthogonalises at most one matrix: the k-th of those that it owns. One
 * all-to-all brings it the parts of the momentum from all ranks, in rank order, which is element order; a second one
 * takes the parts of the update back. While round k is multiplied, round k + 1's momentum and round k - 1's updates are
 * on their way. A parameter is stepped once all of its matrices are back, after the same round on all ranks. If one of
 * them failed, no part of the parameter is stepped.
 *
 * memory: tx_muon_exchange_bytes(args) bytes (0: args are not legal, and tx_muon_exchange_init says why), aligned to 8
 * bytes, owned by the caller. The arrays of args must outlive it. */
TX_API int64_t tx_muon_exchange_bytes(const tx_muon_exchange_args *args);
TX_API tx_status tx_muon_exchange_init(void *memory, const tx_muon_exchange_args *args, tx_muon_exchange **exchange,
                                       tx_error *error);

/* Writes the next action; call it when the last one is done. Returns 1 unless the action is TX_MUON_DONE. */
TX_API int32_t tx_muon_exchange_next(tx_muon_exchange *exchange, tx_muon_action *action);

/* The index of the matrix that a rank orthogonalises in a round; -1: none. */
TX_API int64_t tx_muon_exchange_matrix(const tx_muon_exchange *exchange, int64_t round, int64_t rank);

/* The part of a matrix that a rank has, in elements of the parameter; begin == end: none. */
TX_API tx_muon_run tx_muon_exchange_part(const tx_muon_exchange *exchange, int64_t matrix, int64_t rank);

/* Bytes of a round's first all-to-all. receive_bytes: `world` entries, bytes of this rank's matrix from each rank.
 * send_bytes: `world` entries, bytes of the other ranks' matrices to each of them. On the way back they are swapped. */
TX_API void tx_muon_exchange_sizes(const tx_muon_exchange *exchange, int64_t round, int64_t *receive_bytes,
                                   int64_t *send_bytes);

/* Marks a matrix as failed, so that its parameter is not stepped. To be called at TX_MUON_INSTALL, on all ranks alike,
 * for each matrix of the round whose products were not finite or could not be computed by its owner. */
TX_API void tx_muon_exchange_fail(tx_muon_exchange *exchange, int64_t matrix);

/* A hash of a plan and its matrices, which ranks compare before the first message. plan: the fingerprint of
 * tx_plan_owners. ids: n, of the matrices' parameters (tx_param_id). */
TX_API int64_t tx_muon_fingerprint(int64_t plan, int64_t n, const tx_muon_matrix *matrices, const int64_t *ids);

/* The first matrix that failed, or -1; at TX_MUON_DONE it is the same on all ranks. */
TX_API int64_t tx_muon_exchange_failed(const tx_muon_exchange *exchange);

/* The most bytes that the caller holds at any time if it allocates and frees as tx_muon_do says. memory: as for
 * tx_muon_exchange_init. */
TX_API int64_t tx_muon_exchange_peak(const tx_muon_exchange_args *args, void *memory);

/* -- products of Muon's iterations ------------------------------------------------------------------------------- */

/* How one matrix, divided by its norm, is orthogonalised. Each of `steps` steps turns a singular value s into
 * a s + b s^3 + c s^5. */
typedef struct tx_muon_iteration {
  int64_t rows;
  int64_t columns;
  int64_t steps;
  int64_t restart; /* as for tx_muon_operations */
  int64_t panel;   /* columns per panel of symmetric products; 0: decided where they are computed or counted
                      (tx_muon_panel) */
  double a, b, c;
  int32_t ns; /* tx_muon_ns */
  int32_t reserved;
} tx_muon_iteration;

/* Operands of the products: the matrix, another one of its shape, and squares of its smaller dimension. */
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

/* Lists all products of an iteration, in order: writes at most `capacity` of them and returns how many there are; 0 if
 * an argument is not legal. result: the operand that holds the result, X or OTHER. last_square: the square that the
 * result was last multiplied by, which is finite if the result is. */
TX_API int64_t tx_muon_products(const tx_muon_iteration *iteration, tx_muon_product *products, int64_t capacity,
                                int32_t *result, int32_t *last_square);

/* How many matrices are multiplied at a time, each by one thread, on a processor with this number of threads; 0: one
 * after the other, each by all threads. dtype: of the products. A product may have other bits with another number of
 * threads, so the number returned depends only on the matrix's shape, the dtype and `threads`. */
TX_API int64_t tx_muon_lanes(int64_t rows, int64_t columns, int32_t dtype, int64_t threads);

/* How many matrices of this shape a GPU multiplies in one call of torch, a stack: as many as have TX_MUON_STACK
 * elements, and at least one. 0 if the shape is not legal. */
TX_API int64_t tx_muon_stack(int64_t rows, int64_t columns);

#define TX_MUON_STACK (INT64_C(1) << 24)

/* The most bytes of momentum that a GPU keeps at a time for matrices that no other rank shares, unless one parameter
 * has more. */
#define TX_MUON_WINDOW (INT64_C(1) << 26)

/* The most matrices that each of these threads multiplies before weights are updated, so that threads finish at about
 * the same time. */
#define TX_MUON_PER_LANE 3

typedef enum tx_muon_outcome {
  TX_MUON_ORTHOGONAL = 0,
  TX_MUON_NOT_FINITE = 1,
  TX_MUON_REFUSED = 2 /* torch could not multiply, usually for lack of memory */
} tx_muon_outcome;

/* One matrix that torch multiplies on the CPU. */
typedef struct tx_muon_job {
  const tx_muon_iteration *iteration;
  void *x;            /* rows * columns elements, aligned to a cache line; replaced by the result */
  int32_t dtype;      /* F32 or BF16 */
  int32_t one_thread; /* 1: multiplied by one thread, at the same time as other jobs; 0: by all threads, after those */
  int32_t outcome;    /* written: tx_muon_outcome */
  int32_t reserved;
} tx_muon_job;

/* Workspace for one matrix at a time, large enough for the largest; each pointer aligned to a cache line. */
typedef struct tx_muon_workspace {
  void *other;         /* as many elements as the matrix */
  void *g, *q, *p, *t; /* squares of its smaller dimension */
} tx_muon_workspace;

/* Orthogonalises the matrix of each job with torch's products. Threads take jobs in order as they become free, so put
 * the largest first. As many jobs run at a time as there are workspaces; jobs that all threads multiply use the first
 * workspace. `outcome` reports the jobs that failed; the others are completed. */
TX_API tx_status tx_torch_orthogonalise(tx_muon_job *jobs, int64_t n, const tx_muon_workspace *workspaces,
                                        int64_t n_workspaces, tx_error *error);

#ifdef __cplusplus
}
#endif

#endif
