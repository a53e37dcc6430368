/* Where gradients lie and which of them travel together: buckets of parameters, and messages of buckets. */
#ifndef TORCH_EXT_PLAN_H
#define TORCH_EXT_PLAN_H

#include "torch_ext_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* -- layout (the bucket planner) ----------------------------------------------------------------------------------- */

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

#ifdef __cplusplus
}
#endif

#endif
