/* torch_ext for the author of an engine: what stands between backward and the step, where neither torch's
 * DistributedDataParallel nor torch_ext's own parallelize does it. Who only steps needs torch_ext.h alone, whose habits
 * are those of this header, too.
 *
 * How it reads:
 *   1. Planning      layout (which bucket a parameter is in), link and coalescing (which buckets are one message),
 *                    Muon's matrices that are cut over ranks (who does what when), memory (bytes per rank)
 *   2. Compression   bf16 messages in three quarters of their bytes; states and weights as small as they get
 *   3. Staging       the step of parameters that are not in host memory
 *   4. NCCL          buckets between GPUs over a communicator of our own
 *   5. Bindings      how structs lie in memory, for languages that cannot read the headers
 *
 * What happens to gradients between and during backwards is in torch_ext_cycle.h. */
#ifndef TORCH_EXT_ADVANCED_H
#define TORCH_EXT_ADVANCED_H

#include "torch_ext.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------------------------
 * 1. Planning
 * ------------------------------------------------------------------------------------------------------------- */

/* -- layout (the bucket planner) -------------------------------------------------------------------------------- */

/* Starts of parameters, and edges of shards, are multiples of this many elements: a block of scaled states, of the norm
 * and of 8-bit wire data never spans two of them. */
#define TX_LAYOUT_ALIGNMENT 128

typedef struct tx_layout_param {
  const char *name;     /* for messages and the fingerprint; may be NULL */
  const int64_t *shape; /* ndim sizes whose product is numel, for the fingerprint; may be NULL */
  int64_t ndim;
  int64_t numel;       /* >= 0 */
  int64_t tied;        /* position of the earlier parameter whose memory this one is, or -1: it is placed once */
  int64_t key;         /* parameters with different keys never share a buffer; any number */
  int32_t param_dtype; /* tx_dtype; three that differ never share a buffer either */
  int32_t grad_dtype;
  int32_t wire_dtype;
  int32_t device; /* device index, any number; likewise. Not in the fingerprint: ranks differ in it */
} tx_layout_param;

typedef struct tx_layout_args {
  uint64_t size;
  int64_t n;
  const tx_layout_param *params; /* in registration order */
  const int64_t *order;   /* NULL: reverse registration order; else a permutation of 0 ... n-1: who comes first */
  int64_t cap;            /* elements; > 0, or TX_NO_INT for the default of each buffer, below */
  int64_t world;          /* ranks that share the buckets, >= 1 */
  int32_t overlap;        /* 0: one bucket per buffer */
  int32_t high_bandwidth; /* 1: bucket ends are multiples of 2^16 too */
} tx_layout_args;
/* The default cap, in bytes on the wire: one part of 32 of the buffer, as that is what backward leaves uncovered; at
 * least 512 KiB and, since a bucket is cut into `world` messages, 3/4 MiB more for each rank past the eighth; twice
 * that for 8-bit blocks (with their scales), of which the processor makes fewer a second than the link takes; at most
 * Megatron-LM's default, the bytes of max(40e6, 1e6 * world) fp32 elements. Measured with 19 MB at 1 Gbit/s beside
 * 150 ms of computation: uncovered are 26 ms with buckets of 0.8 MB, 31 with 1.6, 35 with 2.4. Modelled for nodes of 8
 * GPUs: a reduce-scatter reaches half of the bandwidth with 51 MB at 64 ranks, 192 MB at 256, 757 MB at 1024. */
#define TX_LAYOUT_ARGS_INIT \
  { .size = sizeof(tx_layout_args), .cap = TX_NO_INT, .world = 1, .overlap = 1 }

/* Where a parameter lies: elements [start, start + numel) of buffer `buffer`, in bucket `bucket`. */
typedef struct tx_layout_place {
  int64_t buffer;
  int64_t bucket;
  int64_t start;
} tx_layout_place;

/* A bucket: elements [offset, offset + size) of its buffer, of which [offset, offset + used) hold parameters (and the
 * gaps of alignment between them). Size and offset are multiples of world * TX_LAYOUT_ALIGNMENT. */
typedef struct tx_layout_bucket {
  int64_t buffer;
  int64_t offset;
  int64_t size;
  int64_t used;
  int64_t n_params; /* placed in it; tied ones count once. Where all of them are empty, so is the bucket: size 0 */
} tx_layout_bucket;

typedef struct tx_layout_summary {
  int64_t n_buckets; /* numbered from 0, buffer after buffer, in the order in which they fill */
  int64_t n_buffers;
  uint64_t fingerprint; /* of names, shapes, dtypes, plan, world and library version: equal on ranks that may talk */
} tx_layout_summary;

/* Buckets for n parameters: parameters that agree in dtypes, device and key share a buffer; in it they come in `order`,
 * each start aligned, and a bucket closes after the parameter with which it reaches the cap. Pure arithmetic.
 * places: n entries, written. buckets: capacity `n_buckets` entries, n is always enough; the first summary->n_buckets
 * are written. Both NULL: only the summary. */
TX_API tx_status tx_layout_plan(const tx_layout_args *args, tx_layout_place *places, tx_layout_bucket *buckets,
                                int64_t n_buckets, tx_layout_summary *summary, tx_error *error);

/* The elements [*begin, *end) of the buffer that `rank` owns of a bucket: equal, aligned, disjoint, covering. */
TX_API tx_status tx_layout_shard(const tx_layout_bucket *bucket, int64_t world, int64_t rank, int64_t *begin,
                                 int64_t *end, tx_error *error);

/* The part of a parameter at [start, start + numel) that lies in [begin, end): its elements [*first, *first + result)
 * of the parameter, counted from the parameter's own begin. 0: none. */
TX_API int64_t tx_layout_intersect(int64_t start, int64_t numel, int64_t begin, int64_t end, int64_t *first);

/* Elements [first, first + numel) of parameter `param`, at [at, at + numel) of a buffer, a bucket, a part of one or a
 * message. */
typedef struct tx_layout_slice {
  int64_t param; /* any number */
  int64_t first;
  int64_t numel;
  int64_t at;
} tx_layout_slice;

typedef struct tx_layout_range {
  int64_t begin;
  int64_t end; /* >= begin */
} tx_layout_range;

/* What of n placed slices lies in each of n_ranges ranges of their buffer: range after range, and as `placed` in each.
 * `at` of the result is counted from the begin of the first range, the ranges lying side by side: the elements of a
 * bucket that one rank owns are one range; a message in which each rank's parts of several buckets lie together is as
 * many ranges as parts. What is empty is left out.
 *
 * slices: room for `capacity`, of which *n_slices are written; n + n_ranges is enough where neither slices nor ranges
 * overlap. TX_ERROR_INVALID_ARGUMENT for too little room, and for a range that ends before it begins. */
TX_API tx_status tx_layout_slices(const tx_layout_slice *placed, int64_t n, const tx_layout_range *ranges,
                                  int64_t n_ranges, tx_layout_slice *slices, int64_t capacity, int64_t *n_slices,
                                  tx_error *error);

/* Elements [start, stop) of a dense tensor, in memory order, as boxes: checkpoints know tensors by boxes, a rank has a
 * flat slice. Every element is in one box, the boxes are in memory order, and each is contiguous, as large as it can be
 * and of at most `limit` elements (>= 1): of k dimensions without a limit (INT64_MAX) 2k - 1 boxes at most.
 *
 * shape: ndim sizes. order: the dimensions from the greatest stride to the least; NULL: as they are. boxes: NULL, to
 * count only, or room for `capacity` boxes, each ndim offsets followed by ndim sizes: box b holds the elements with
 * offsets[d] <= index[d] < offsets[d] + sizes[d]. *n_boxes: their number. TX_ERROR_SHAPE for a shape or a slice that is
 * not legal, TX_ERROR_INVALID_ARGUMENT for an order that is none and for too little room. */
TX_API tx_status tx_layout_boxes(const int64_t *shape, const int64_t *order, int64_t ndim, int64_t start, int64_t stop,
                                 int64_t limit, int64_t *boxes, int64_t capacity, int64_t *n_boxes, tx_error *error);

/* The units of full sharding: neighbouring blocks of a model whose parameters are gathered together. Blocks follow each
 * other into a unit until it has `least` elements (> 0, or TX_NO_INT for the default, 2^20); a last unit that has fewer
 * is joined with the one before it. numels: of n blocks (>= 0 each). ends: n entries; ends[u] is the block after unit
 * u's last one. Returns the number of units. */
TX_API int64_t tx_fsdp_units(const int64_t *numels, int64_t n, int64_t least, int64_t *ends);

/* Which of n parameters have their states and masters on the host and are stepped there, so that about `fraction` (in
 * [0, 1]) of all bytes is. 0 chooses nothing, and 1 everything that has bytes. In between the largest are taken first,
 * the first of equal ones before the others, and each that still fits; at the end the smallest that was left out is
 * taken too, where that is nearer. So what is chosen is off by half of the smallest one that was left out at most. The
 * arithmetic is exact.
 *
 * bytes: of the state and the master of each, >= 0. heap: n entries, for the search. chosen: n entries, set to 0 or 1.
 * TX_ERROR_ILLEGAL_VALUE for another fraction, TX_ERROR_INVALID_ARGUMENT for bytes that are negative, or whose sum
 * overflows. */
TX_API tx_status tx_offload_choose(const int64_t *bytes, int64_t n, double fraction, int64_t *heap, int32_t *chosen,
                                   tx_error *error);

/* What no_shard gathers its sums in: the policy's grad_gather_dtype; where that is TX_NONE, bf16 beside an 8-bit wire
 * (TX_U8), else the wire's dtype. */
TX_API tx_dtype tx_gather_dtype(tx_dtype grad_gather_dtype, tx_dtype wire_dtype);

/* -- the link (how fast ranks exchange bytes) -------------------------------------------------------------------- */

/* What buckets travel together, and whether they are compressed, follows from the speed of the link of one rank, which
 * is given (link_gbps of the policy) or measured once, before the first gradient: so layout and memory are known then.
 *
 * Measured is a full exchange of TX_LINK_ROUNDS rounds: in each of them every rank sends tx_link_part_bytes to every
 * other one, one round after the other. The first one is the warm-up. A round takes as long as on its slowest rank.
 * Whatever disturbs a round makes it longer, so the quickest one counts; or, where every one was disturbed, the median
 * of what remains without the time that the rank's threads waited for processors: on starved processors messages of a
 * few milliseconds are never undisturbed. */
#define TX_LINK_ROUNDS 6

/* About 4 MiB from each rank in all, never less than 64 KiB to another; a multiple of TX_BLOCK. 0 for less than two
 * ranks. */
TX_API int64_t tx_link_part_bytes(int64_t world);

/* Gbit/s that a rank sent, and received. took: nanoseconds, world rows of TX_LINK_ROUNDS. waited: of them, ready but
 * without a processor, the sum over a rank's threads; 0 where that is not known; NULL: nowhere. 0, not known, where a
 * round took no time, and for less than two ranks or NULL. */
TX_API double tx_link_gbps(const int64_t *took, const int64_t *waited, int64_t world);

/* The rate of the link below which grad_comm_compression "auto" compresses, in Mbit/s. */
#define TX_COMPRESS_BELOW_MBPS 2500

/* Whether bf16 messages are compressed (tx_compress): always, never, or where the link is known to be slow. choice:
 * tx_grad_comm_compression. link_gbps: 0: not known. */
TX_API int32_t tx_compresses(int32_t choice, double link_gbps);

/* -- coalescing (which buckets travel together) ------------------------------------------------------------------ */

/* What joined buckets may take on the wire, at most, in bytes: a quarter of their buffer, up to TX_COALESCE_BYTES; half
 * of it as long as that is no more than TX_COALESCE_SMALL, and never less than that of a larger one.
 *
 * sharded (0 or 1): each rank owns a part of each bucket, not of the message, which is therefore made in memory of its
 * own: no more than TX_COALESCE_SMALL then. compressed (0 or 1): buffer_bytes are compressed ones, of which three
 * tenths of all that are the most, so that two messages and what they are expanded into take about as much memory as
 * buckets that are joined as they are (a fifth more with two ranks, of whose bucket a half is received). */
#define TX_COALESCE_BYTES (INT64_C(8) << 20)
#define TX_COALESCE_SMALL (INT64_C(4) << 20)
TX_API int64_t tx_coalesce_most(int64_t buffer_bytes, int32_t sharded, int32_t compressed);

/* Whether all buckets of a buffer may be one message, as they are and alone on its way: no more memory than two of half
 * of it. */
TX_API int32_t tx_coalesce_whole(int64_t buffer_bytes);

typedef struct tx_coalesce_args {
  uint64_t size;
  int64_t n_buckets;
  const int64_t *bytes;  /* of each bucket, as it is sent; >= 0 */
  const int64_t *buffer; /* of each bucket; those of a buffer follow each other */
  int64_t world;         /* ranks; >= 1 */
  double link_gbps;      /* of a rank, in Gbit/s; 0: not known */
  int32_t compressed;    /* 1: they are sent compressed (tx_coalesce_most, as is the next one) */
  int32_t sharded;       /* 1: each rank owns a part of each bucket */
} tx_coalesce_args;
#define TX_COALESCE_ARGS_INIT \
  { .size = sizeof(tx_coalesce_args) }

/* Which neighbours of a buffer the ranks join into one message: ends[i] is the bucket after message i's last one.
 * n_buckets entries are always enough; *n_messages are written. Where the link is not known every bucket is a message.
 *
 * A message costs the processors about half a millisecond, whatever is in it, and several where they are busy. On a
 * slow link that hides behind the wire, and buckets that leave one by one leave the least uncovered; on a fast one it
 * is what the step waits for. So where the link carries a bucket in less than 2.5 ms, buckets are joined until a
 * message takes 10 ms; no joined one takes more than 16. A small buffer (tx_coalesce_whole) that the link carries in 5
 * ms is one message. A rank sends its parts of a bucket to the others, and where all want the sum (not sharded) the
 * sums, too. */
TX_API tx_status tx_coalesce(const tx_coalesce_args *args, int64_t *ends, int64_t *n_messages, tx_error *error);

/* How many messages a bucket is cut into that somebody else made (DistributedDataParallel's, of 25 MB), whose sum all
 * ranks want: none is longer than joined buckets may be (tx_coalesce_most, 16 ms), nor shorter than 256 KiB, so that
 * one is packed and another one added up while a third one travels. 1 where the link is not known (0), and for less
 * than two ranks.
 *
 * bytes: of the bucket, as it is sent. */
TX_API int64_t tx_coalesce_cuts(int64_t bytes, int64_t world, double link_gbps, int32_t compressed);

/* Whether the ranks of a sum that all of them want whole send each other whole buckets, which each then adds up, and
 * not their parts, and the sums of these back: two ranks, where it is fewer bytes (fp8 whose sums are bf16). For as
 * many bytes one trip in place of two gains nothing that was measured, and adding up all of a bucket costs. wire_bytes,
 * sum_bytes: of a bucket as it is sent, and as its sum would be gathered. */
TX_API int32_t tx_trades(int64_t world, int64_t wire_bytes, int64_t sum_bytes);

/* -- matrices of Muon that are cut over ranks -------------------------------------------------------------------- */

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

/* -- memory (bytes per rank) ------------------------------------------------------------------------------------ */

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

/* ---------------------------------------------------------------------------------------------------------------
 * 2. Compression
 * ------------------------------------------------------------------------------------------------------------- */

/* BF16 data in three quarters of its bytes, for a wire that is slower than the processor: 1.52 bytes for an element,
 * whatever its neighbours are, so that both ends know how long a message is. Every bit comes back. What elements have
 * in common is taken out, block by block: how large they are (csrc/math/compress_block.h). Both run on the calling
 * thread, at about the speed of memory, and allocate nothing.
 *
 * tx_compressed_bytes: the message of `numel` elements, a multiple of TX_BLOCK > 0; else 0: send them as they are. */
TX_API int64_t tx_compressed_bytes(int64_t numel);

/* values: BF16. message: U8, tx_compressed_bytes(values.numel) elements, all written, the same on every machine. *rest:
 * how many bytes at the end of values are not in the message and have to follow it as they are: 0, but for data that is
 * too disordered, which has more than numel / 512 + 16 elements that are not 0 and 2^15 times smaller than the largest
 * of their block. */
TX_API tx_status tx_compress(tx_tensor values, tx_tensor message, int64_t *rest, tx_error *error);

/* The other way: values are written but for their last *rest bytes, which come by themselves. Whatever the message is,
 * nothing but values is touched; TX_ERROR_BAD_STATE, and nothing written, where it does not hold together. It is no
 * checksum. */
TX_API tx_status tx_expand(tx_tensor message, tx_tensor values, int64_t *rest, tx_error *error);

/* -- planes: values as small as they get, for files and for what changes of weights ------------------------------- */

/* Every bit of F32, BF16, F16, I16 and U8 values in as few bytes as an entropy code of their exponents takes: trained
 * bf16 weights in 1.32 bytes of 2. The message depends on the values alone, not on the processor. It consists of blocks
 * of TX_PLANES_BLOCK elements, each with its checksum, which are read one by one. Bytes in which nothing is in common
 * are stored as they are. What runs, runs on the calling thread: who has several cuts the values. */
#define TX_PLANES_BLOCK 65536

/* Bytes that always suffice for the message; 0 for another dtype, and for numel < 0 or > 2^56. */
TX_API int64_t tx_planes_bound(tx_dtype dtype, int64_t numel);

/* out: U8, of at least the bound; *bytes: how many of them are the message. The rest may be written, too. Allocates a
 * block's planes and tables: TX_ERROR_OUT_OF_MEMORY. */
TX_API tx_status tx_planes_encode(tx_tensor values, tx_tensor out, int64_t *bytes, tx_error *error);

typedef struct tx_planes {
  uint64_t size;
  int64_t numel;
  int64_t bytes;    /* of the message */
  int64_t n_blocks; /* each but the last of TX_PLANES_BLOCK elements */
  int32_t dtype;
  int32_t reserved;
} tx_planes;
#define TX_PLANES_INIT \
  { .size = sizeof(tx_planes) }

/* What a message is, by its header, which has a checksum of its own: blocks are not looked at. message: U8, and all of
 * it. TX_ERROR_BAD_STATE, saying what is wrong, where it is damaged, truncated or none. */
TX_API tx_status tx_planes_read(tx_tensor message, tx_planes *planes, tx_error *error);

/* Compares the checksums of blocks [begin, end). TX_ERROR_BAD_STATE, naming the first one that is damaged. */
TX_API tx_status tx_planes_check(tx_tensor message, int64_t begin, int64_t end, tx_error *error);

/* values: as many as were encoded, of the same dtype. Whatever the message is, nothing but values is written, and
 * nothing but message is read; TX_ERROR_BAD_STATE, and nothing written, where a checksum is another one; where all are
 * right and it is still none that was encoded, values may have been written. */
TX_API tx_status tx_planes_decode(tx_tensor message, tx_tensor values, tx_error *error);

/* The same for values.numel elements from `begin` on: only their blocks are looked at. */
TX_API tx_status tx_planes_decode_range(tx_tensor message, int64_t begin, tx_tensor values, tx_error *error);

/* ---------------------------------------------------------------------------------------------------------------
 * 3. Staging
 * ------------------------------------------------------------------------------------------------------------- */

/* How parameters and gradients that lie elsewhere come to the host and go back. Functions are called by several threads
 * at a time, each with slots of its own; they return TX_OK, or fail with a message, which ends the step. `up`: 1 to
 * where the parameters are, 0 from there; what is asked for one way is done in that order. */
typedef struct tx_copy_ops {
  uint64_t size;
  void *ctx;
  /* Starts to copy. */
  tx_status (*copy)(void *ctx, int32_t up, void *to, const void *from, int64_t bytes, tx_error *error);
  /* From here on the slot's mark of this way stands for everything that was asked for. */
  tx_status (*mark)(void *ctx, int32_t up, int64_t slot, tx_error *error);
  /* Comes back when what the slot's mark stands for is done; at once where there is no mark. */
  tx_status (*wait)(void *ctx, int32_t up, int64_t slot, tx_error *error);
  /* What is asked for on the way down from here on comes after what the slot's mark on the way up stands for. */
  tx_status (*follow)(void *ctx, int64_t slot, tx_error *error);
} tx_copy_ops;
#define TX_COPY_OPS_INIT \
  { sizeof(tx_copy_ops), NULL, NULL, NULL, NULL, NULL }

/* Where batches lie while they are stepped. */
#define TX_MAX_SLOTS 8
typedef struct tx_staging {
  uint64_t size;
  const tx_copy_ops
      *copy_ops; /* NULL: parameters and gradients are in host memory, too, and each thread copies its own */
  void *memory;  /* the host's, aligned to 64 bytes; of no particular content before and after */
  int64_t bytes; /* of it: threads * slots * batch * (bytes of a gradient + bytes of a weight), the widest */
  int64_t batch; /* elements that come at a time; a multiple of TX_SAMPLED */
  int32_t slots; /* batches that each thread has under way: 1 ... TX_MAX_SLOTS */
  int32_t reserved;
} tx_staging;
#define TX_STAGING_INIT \
  { .size = sizeof(tx_staging), .slots = 1 }

/* tx_adamw of parameters that lie elsewhere: the same bits. The memory of params and grads is passed to copy_ops only,
 * all other memory is the host's. Gradients come down and weights go up; weights come down where there is no master, or
 * a remainder. So on_external_write looks at checksums beside remainders; those beside F32 masters are only renewed,
 * and TX_EXTERNAL_CHECK is not legal. When the call comes back weights may be on their way up still: the same memory
 * may be given to the next call where its slots are as large and the widest dtypes the same, else when they have left.
 * Where a copy fails some elements have been stepped and others not, and no count in `steps` has changed. */
TX_API tx_status tx_adamw_offloaded(const tx_adamw_args *args, const tx_staging *staging, const tx_parallel *parallel,
                                    tx_error *error);

/* memcpy of much memory that is not in the cache, on this thread: asks for what it will write ahead of writing it,
 * which takes a quarter less time where that is not in the cache. */
TX_API void tx_copy(void *to, const void *from, int64_t bytes);

/* The same of memory whose target nobody reads soon, and which was not allocated just now: it is written past the
 * caches, which takes a ninth less time. */
TX_API void tx_copy_nontemporal(void *to, const void *from, int64_t bytes);

/* ---------------------------------------------------------------------------------------------------------------
 * 4. NCCL
 * ------------------------------------------------------------------------------------------------------------- */

/* Bytes between GPUs without torch.distributed. NCCL is looked up in the process and called through pointers; nothing
 * is linked to it. A communicator is used by one thread at a time, and all ranks make the same calls in the same order.
 * No call waits for the device, and none waits for other ranks longer than timeout_seconds: then, and where NCCL
 * reports an error, the communicator is aborted (once), the call says why (TX_ERROR_UNAVAILABLE), and later calls
 * repeat it (TX_ERROR_BAD_STATE). */
typedef struct tx_nccl tx_nccl;           /* the library, loaded */
typedef struct tx_nccl_comm tx_nccl_comm; /* of one rank */

/* The libnccl.so.2 that the process has loaded (torch's); else `path`; else, where that is NULL, what the dynamic
 * linker finds. TX_ERROR_UNAVAILABLE: none, one older than 2.19, or one without a symbol that is needed; the message
 * says what was found where, what is needed and what to do. Close it after its communicators. */
TX_API tx_status tx_nccl_open(const char *path, tx_nccl **library, tx_error *error);
TX_API void tx_nccl_close(tx_nccl *library);

typedef struct tx_nccl_about {
  uint64_t size;
  int32_t version; /* 22809 for 2.28.9 */
  int32_t windows; /* 1 where memory becomes a symmetric window (2.27 and newer) */
  char path[512];  /* of the file */
} tx_nccl_about;
#define TX_NCCL_ABOUT_INIT \
  { .size = sizeof(tx_nccl_about) }
TX_API tx_status tx_nccl_about_this(const tx_nccl *library, tx_nccl_about *about, tx_error *error);

/* What the ranks of one communicator have in common: one of them makes it (id: TX_NCCL_ID_BYTES bytes), the caller
 * brings it to the others. */
#define TX_NCCL_ID_BYTES 128
TX_API tx_status tx_nccl_unique_id(const tx_nccl *library, char *id, tx_error *error);

typedef struct tx_nccl_comm_args {
  uint64_t size;
  const tx_nccl *library;
  const char *id; /* TX_NCCL_ID_BYTES bytes */
  int32_t rank, n_ranks;
  double timeout_seconds;
  int32_t copy_engines;    /* 1: copy engines move windows, where NCCL can (2.28), so that no SM does */
  int32_t multiprocessors; /* of the device; beside gather_id each communicator's kernels use a quarter of them at most,
                              so that both always fit. 0: NCCL decides alone */
  const char *gather_id;   /* NULL, or another id: all-gathers have a communicator of their own, made, checked, aborted
                              and ended with the first one, and wait for no all-to-all that was issued before them.
                              NCCL keeps twice the memory for itself */
} tx_nccl_comm_args;
#define TX_NCCL_COMM_ARGS_INIT \
  { sizeof(tx_nccl_comm_args), NULL, NULL, 0, 0, 600.0, 0, 0, NULL }

/* On the current CUDA device; returns when every rank has come. NULL in *comm where it fails. */
TX_API tx_status tx_nccl_comm_new(const tx_nccl_comm_args *args, tx_nccl_comm **comm, tx_error *error);
/* Waits for the other ranks' tx_nccl_comm_free, unless it was aborted. */
TX_API void tx_nccl_comm_free(tx_nccl_comm *comm);
/* Whether what was issued is well so far. Any thread. */
TX_API tx_status tx_nccl_comm_check(tx_nccl_comm *comm, tx_error *error);
/* Ends what is under way on this rank; once, later calls do nothing. why: what later calls say. Any thread. */
TX_API void tx_nccl_comm_abort(tx_nccl_comm *comm, const char *why);

/* all-to-all: `send` and `receive` hold n_ranks parts of `bytes` each; part r is sent to rank r, or came from it.
 * all-gather: `send` is this rank's part, `receive` holds all ranks'; send may lie in its place there. Device memory.
 */
typedef struct tx_nccl_message {
  const void *send;
  void *receive;
  int64_t bytes;
} tx_nccl_message;

/* n messages as one operation, issued to `stream` (cudaStream_t). bucket: its name, for messages and records; the same
 * on all ranks. With a gather_id each of the two kinds has a stream of its own, always the same. */
TX_API tx_status tx_nccl_all_to_all(tx_nccl_comm *comm, const char *bucket, int64_t n, const tx_nccl_message *messages,
                                    void *stream, tx_error *error);
TX_API tx_status tx_nccl_all_gather(tx_nccl_comm *comm, const char *bucket, int64_t n, const tx_nccl_message *messages,
                                    void *stream, tx_error *error);

/* Device memory that is a symmetric window where NCCL has them; all ranks make theirs in the same order, of one size.
 */
typedef struct tx_nccl_memory {
  uint64_t size;
  int64_t bytes;
  void *data;          /* aligned to 4096 bytes */
  void *window;        /* NULL: it is none */
  void *gather_window; /* of the gathers' communicator; NULL: it is none */
} tx_nccl_memory;
#define TX_NCCL_MEMORY_INIT \
  { sizeof(tx_nccl_memory), 0, NULL, NULL, NULL }
TX_API tx_status tx_nccl_memory_new(tx_nccl_comm *comm, tx_nccl_memory *memory, tx_error *error);
TX_API void tx_nccl_memory_free(tx_nccl_comm *comm, tx_nccl_memory *memory);

/* Each operation is noted, counted from 1, with a hash of its kind, its bucket's name and its sizes. Ranks compare
 * their digests now and then, by means of the caller's; where they differ, their last records say where they parted. */
typedef struct tx_nccl_record {
  int64_t operation; /* 0: none */
  uint64_t hash;
  char what[112]; /* "all-to-all of bucket 3 ..." */
} tx_nccl_record;
#define TX_NCCL_RECORDS 64
TX_API tx_status tx_nccl_digest(const tx_nccl_comm *comm, int64_t *count, uint64_t *digest, tx_error *error);
/* records: TX_NCCL_RECORDS of them. */
TX_API tx_status tx_nccl_records(const tx_nccl_comm *comm, tx_nccl_record *records, tx_error *error);
/* records: TX_NCCL_RECORDS of each rank, by rank. TX_ERROR_MISMATCH names the first operation that differs, what it is
 * on two ranks, and both hashes. */
TX_API tx_status tx_nccl_compare(int64_t n_ranks, const tx_nccl_record *records, tx_error *error);

/* ---------------------------------------------------------------------------------------------------------------
 * 5. Bindings
 * ------------------------------------------------------------------------------------------------------------- */

/* A field, as the library's compiler lays it out.
 *
 * type: int32, int64, uint64, double; "char[]" (an array of `bytes`); the name of a struct that is held; "char *",
 * "void *", "int64 *", or a struct's name with " *": a pointer; "function": a pointer to one. */
typedef struct tx_struct_field {
  const char *name;
  const char *type;
  int64_t offset;
  int64_t bytes;
} tx_struct_field;

typedef struct tx_struct {
  const char *name; /* "tx_adamw_args" */
  int64_t bytes;
  int64_t n_fields;
  const tx_struct_field *fields; /* all of them, in their order */
} tx_struct;

/* Struct i of those that the functions of the public headers take; NULL past the end. Static storage. */
TX_API const tx_struct *tx_struct_at(int32_t i);

#ifdef __cplusplus
}
#endif

#endif
