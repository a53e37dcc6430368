/* Planning of communication: which bucket a parameter's gradient is in, and which buckets are sent as one message. */
#ifndef TORCH_EXT_PLAN_H
#define TORCH_EXT_PLAN_H

#include "torch_ext_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* -- layout (the bucket planner) ----------------------------------------------------------------------------------- */

/* Parameters start, and shards begin and end, at multiples of this many elements, so that no block (of scaled states,
 * of the norm, of 8-bit wire data) spans two of them. */
#define TX_LAYOUT_ALIGNMENT 128

typedef struct tx_layout_param {
  const char *name;     /* for messages and the fingerprint; may be NULL */
  const int64_t *shape; /* ndim sizes whose product is numel, for the fingerprint; may be NULL */
  int64_t ndim;
  int64_t numel;       /* >= 0 */
  int64_t tied;        /* position of the earlier parameter whose memory this one shares, or -1; placed once */
  int64_t key;         /* any number; parameters with different keys never share a buffer */
  int32_t param_dtype; /* tx_dtype, as are the next two; parameters that differ in one of them never share a buffer */
  int32_t grad_dtype;
  int32_t wire_dtype;
  int32_t device; /* device index, any number; parameters on different devices never share a buffer. Not in the
                     fingerprint, as ranks differ in it */
} tx_layout_param;

typedef struct tx_layout_args {
  uint64_t size;
  int64_t n;
  const tx_layout_param *params; /* in registration order */
  const int64_t *order; /* NULL: reverse registration order; else a permutation of 0 ... n-1: positions in the order in
                           which they are placed */
  int64_t cap;          /* bucket size in elements, > 0; or TX_NO_INT for the default of each buffer, below */
  int64_t world;        /* ranks that share the buckets, >= 1 */
  int32_t overlap;      /* 0: one bucket per buffer */
  int32_t high_bandwidth; /* 1: bucket ends are multiples of 2^16 too */
} tx_layout_args;
/* The default cap, in bytes on the wire, is 1/32 of the buffer, because the last bucket's exchange is not covered by
 * backward,
 *   - but at least 512 KiB, plus 3/4 MiB for each rank past the eighth, since a bucket is cut into `world` messages;
 *   - doubled for 8-bit blocks (with their scales), which the processor encodes more slowly than the link carries them;
 *   - and at most Megatron-LM's default, the bytes of max(40e6, 1e6 * world) fp32 elements.
 * Measured with 19 MB at 1 Gbit/s during 150 ms of computation: 26 ms are uncovered with buckets of 0.8 MB, 31 with
 * 1.6, 35 with 2.4. Modelled for nodes of 8 GPUs: a reduce-scatter reaches half of the bandwidth with 51 MB at 64
 * ranks, 192 MB at 256, 757 MB at 1024. */
#define TX_LAYOUT_ARGS_INIT \
  { .size = sizeof(tx_layout_args), .cap = TX_NO_INT, .world = 1, .overlap = 1 }

/* The place of a parameter: elements [start, start + numel) of buffer `buffer`, in bucket `bucket`. */
typedef struct tx_layout_place {
  int64_t buffer;
  int64_t bucket;
  int64_t start;
} tx_layout_place;

/* A bucket: elements [offset, offset + size) of its buffer. Of these, [offset, offset + used) hold parameters and the
 * alignment gaps between them. Size and offset are multiples of world * TX_LAYOUT_ALIGNMENT. */
typedef struct tx_layout_bucket {
  int64_t buffer;
  int64_t offset;
  int64_t size;
  int64_t used;
  int64_t n_params; /* parameters in it; tied ones count once. If all of them are empty, so is the bucket: size 0 */
} tx_layout_bucket;

typedef struct tx_layout_summary {
  int64_t n_buckets; /* numbered from 0, buffer after buffer, in the order in which they are filled */
  int64_t n_buffers;
  uint64_t fingerprint; /* hash of names, shapes, dtypes, plan, world and library version; ranks may communicate only if
                           it is equal */
} tx_layout_summary;

/* Plans the buckets for n parameters. Parameters that agree in dtypes, device and key share a buffer. In the buffer
 * they follow each other in `order`, each start aligned; a bucket ends after the parameter with which it reaches the
 * cap. Pure arithmetic. places: n entries, written. buckets: room for `n_buckets` entries (n are always enough), of
 * which the first summary->n_buckets are written. If both are NULL, only the summary is written. */
TX_API tx_status tx_layout_plan(const tx_layout_args *args, tx_layout_place *places, tx_layout_bucket *buckets,
                                int64_t n_buckets, tx_layout_summary *summary, tx_error *error);

/* The shard of a bucket that `rank` owns: elements [*begin, *end) of the buffer. The shards of all ranks are equal in
 * size, aligned and disjoint, and cover the bucket. */
TX_API tx_status tx_layout_shard(const tx_layout_bucket *bucket, int64_t world, int64_t rank, int64_t *begin,
                                 int64_t *end, tx_error *error);

/* Intersects a parameter at [start, start + numel) of a buffer with the range [begin, end) of that buffer. The common
 * elements are [*first, *first + result), counted from the parameter's first element. Returns 0 if there are none. */
TX_API int64_t tx_layout_intersect(int64_t start, int64_t numel, int64_t begin, int64_t end, int64_t *first);

/* Elements [first, first + numel) of parameter `param`, which are at [at, at + numel) of a buffer, a bucket, a part of
 * a bucket or a message. */
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

/* Cuts n placed slices by n_ranges ranges of their buffer. The result has the parts of all slices in the first range,
 * in the order of `placed`, then those in the second range, and so on; empty parts are left out. `at` in the result
 * counts from the start of the first range, with the ranges put end to end. One range gives the elements of a bucket
 * that one rank owns; several give a message that consists of a rank's parts of several buckets.
 *
 * slices: room for `capacity`, of which *n_slices are written; n + n_ranges is enough if neither slices nor ranges
 * overlap. TX_ERROR_INVALID_ARGUMENT for too little room, and for a range that ends before it begins. */
TX_API tx_status tx_layout_slices(const tx_layout_slice *placed, int64_t n, const tx_layout_range *ranges,
                                  int64_t n_ranges, tx_layout_slice *slices, int64_t capacity, int64_t *n_slices,
                                  tx_error *error);

/* Splits elements [start, stop) of a dense tensor, in memory order, into boxes. A rank has a flat slice of a parameter,
 * but checkpoints describe parts of tensors as boxes. Every element is in exactly one box. The boxes are in memory
 * order; each is contiguous, as large as possible, and has at most `limit` elements (>= 1). For k dimensions and no
 * limit (INT64_MAX) there are at most 2k - 1 boxes.
 *
 * shape: ndim sizes. order: the dimensions from the greatest stride to the least; NULL: as they are. boxes: NULL, to
 * count only, or room for `capacity` boxes, each ndim offsets followed by ndim sizes: box b holds the elements with
 * offsets[d] <= index[d] < offsets[d] + sizes[d]. *n_boxes: their number. TX_ERROR_SHAPE for an illegal shape or slice,
 * TX_ERROR_INVALID_ARGUMENT for an order that is not a permutation and for too little room. */
TX_API tx_status tx_layout_boxes(const int64_t *shape, const int64_t *order, int64_t ndim, int64_t start, int64_t stop,
                                 int64_t limit, int64_t *boxes, int64_t capacity, int64_t *n_boxes, tx_error *error);

/* Groups the blocks of a model into FSDP units, whose parameters are gathered together. Neighbouring blocks are joined
 * until the unit has `least` elements (> 0, or TX_NO_INT for the default, 2^20); a last unit with fewer is joined with
 * the one before it. numels: elements of each of the n blocks, >= 0. ends: n entries; ends[u] is the block after the
 * last block of unit u. Returns the number of units. */
TX_API int64_t tx_fsdp_units(const int64_t *numels, int64_t n, int64_t least, int64_t *ends);

/* Chooses which of n parameters are offloaded: their states and masters are on the host, and they are stepped there.
 * About `fraction` (in [0, 1]) of all bytes is chosen; 0 chooses nothing, and 1 everything that has bytes. In between,
 * parameters are visited from the largest to the smallest (equal ones in their order), and each that still fits is
 * chosen. At the end the smallest one that was not chosen is added if that comes nearer to the fraction. So the error
 * is at most half the bytes of that smallest one. The arithmetic is exact.
 *
 * bytes: of each parameter's state and master, >= 0. heap: n entries of workspace. chosen: n entries, set to 0 or 1.
 * TX_ERROR_ILLEGAL_VALUE for a fraction outside [0, 1], TX_ERROR_INVALID_ARGUMENT for bytes that are negative or whose
 * sum overflows. */
TX_API tx_status tx_offload_choose(const int64_t *bytes, int64_t n, double fraction, int64_t *heap, int32_t *chosen,
                                   tx_error *error);

/* The dtype in which no_shard all-gathers the sums: the policy's grad_gather_dtype; if that is TX_NONE, bf16 with an
 * 8-bit wire (TX_U8), else the wire's dtype. */
TX_API tx_dtype tx_gather_dtype(tx_dtype grad_gather_dtype, tx_dtype wire_dtype);

/* -- the link (how fast ranks exchange bytes) -------------------------------------------------------------------- */

/* The speed of one rank's link decides which buckets are sent together and whether they are compressed. It is given
 * (link_gbps of the policy) or measured once, before the first gradient, so that layout and memory are known from then
 * on.
 *
 * The measurement is a full exchange of TX_LINK_ROUNDS rounds, one after the other. In each round every rank sends
 * tx_link_part_bytes to every other rank; a round's time is that of its slowest rank. The first round is a warm-up and
 * does not count. Disturbances only lengthen a round, so the quickest of the others counts. If all of them were
 * disturbed, the result is the median of their times, less the time that the rank's threads waited for a processor:
 * where processors are overloaded, a message of a few milliseconds is never undisturbed. */
#define TX_LINK_ROUNDS 6

/* Bytes that each rank sends to each other rank in a round: about 4 MiB per rank in all, at least 64 KiB to each other
 * rank, and a multiple of TX_BLOCK. 0 for fewer than two ranks. */
TX_API int64_t tx_link_part_bytes(int64_t world);

/* The measured rate of one rank's link, each way, in Gbit/s. took: nanoseconds of each round, `world` rows of
 * TX_LINK_ROUNDS. waited: nanoseconds of `took` in which the rank's threads were ready but had no processor, summed
 * over the threads; 0 where that is not known; NULL: not known anywhere. Returns 0 (not known) if a round took no time,
 * if there are fewer than two ranks, or if took is NULL. */
TX_API double tx_link_gbps(const int64_t *took, const int64_t *waited, int64_t world);

/* The link speed in Mbit/s below which grad_comm_compression "auto" compresses. */
#define TX_COMPRESS_BELOW_MBPS 2500

/* Whether bf16 messages are compressed (tx_compress): always, never, or if the link is known to be slow. choice:
 * tx_grad_comm_compression. link_gbps: 0: not known. */
TX_API int32_t tx_compresses(int32_t choice, double link_gbps);

/* -- coalescing (which buckets are sent together) ----------------------------------------------------------------- */

/* The most bytes on the wire that joined buckets may take: a quarter of their buffer, up to TX_COALESCE_BYTES; but half
 * of the buffer as long as that is no more than TX_COALESCE_SMALL, and for larger buffers never less than
 * TX_COALESCE_SMALL.
 *
 * sharded (0 or 1): each rank owns a part of each bucket, not of the message, so that the message needs memory of its
 * own: at most TX_COALESCE_SMALL then. compressed (0 or 1): buffer_bytes are compressed bytes, and the limit is
 * three tenths of the above. Two messages and what they are expanded into then take about as much memory as buckets
 * that are joined uncompressed (a fifth more with two ranks, which receive one half of the bucket). */
#define TX_COALESCE_BYTES (INT64_C(8) << 20)
#define TX_COALESCE_SMALL (INT64_C(4) << 20)
TX_API int64_t tx_coalesce_most(int64_t buffer_bytes, int32_t sharded, int32_t compressed);

/* Whether all buckets of a buffer may be one message, which is uncompressed and the only one in flight: it takes no
 * more memory than two messages of half the buffer. */
TX_API int32_t tx_coalesce_whole(int64_t buffer_bytes);

typedef struct tx_coalesce_args {
  uint64_t size;
  int64_t n_buckets;
  const int64_t *bytes;  /* of each bucket on the wire; >= 0 */
  const int64_t *buffer; /* buffer of each bucket; the buckets of a buffer are neighbours */
  int64_t world;         /* ranks; >= 1 */
  double link_gbps;      /* of one rank's link, in Gbit/s; 0: not known */
  int32_t compressed;    /* 1: buckets are sent compressed (see tx_coalesce_most) */
  int32_t sharded;       /* 1: each rank owns a part of each bucket (see tx_coalesce_most) */
} tx_coalesce_args;
#define TX_COALESCE_ARGS_INIT \
  { .size = sizeof(tx_coalesce_args) }

/* Decides which neighbouring buckets of a buffer are joined into one message. ends[i] is the bucket after the last
 * bucket of message i; n_buckets entries are always enough, and *n_messages are written. If the link speed is not
 * known, every bucket is a message of its own.
 *
 * A message costs the processors about half a millisecond, whatever its size, and several where they are busy. On a
 * slow link that time is hidden by the transfer, and separate buckets leave the least communication uncovered. On a
 * fast link it is what the step waits for. So if the link carries a bucket in less than 2.5 ms, buckets are joined
 * until a message takes 10 ms; no joined message takes more than 16 ms. A small buffer (tx_coalesce_whole) that the
 * link carries in 5 ms is one message. The time counts what a rank sends: its parts of a bucket to the other ranks and,
 * if all ranks want the sum (not sharded), the sums as well. */
TX_API tx_status tx_coalesce(const tx_coalesce_args *args, int64_t *ends, int64_t *n_messages, tx_error *error);

/* The number of messages that a bucket of DistributedDataParallel (25 MB) is cut into, whose sum all ranks want. No
 * message is longer than joined buckets may be (tx_coalesce_most, 16 ms) nor shorter than 256 KiB. With several
 * messages, one is packed and another one added up while a third is on the wire. 1 if the link speed is not known (0),
 * and for fewer than two ranks.
 *
 * bytes: of the bucket on the wire. */
TX_API int64_t tx_coalesce_cuts(int64_t bytes, int64_t world, double link_gbps, int32_t compressed);

/* Whether ranks that all want the whole sum send each other whole buckets, which each rank then adds up, instead of
 * exchanging parts and gathering their sums. That is so for two ranks where it takes fewer bytes (fp8 whose sums are
 * bf16). For equal bytes, one exchange instead of two showed no gain in measurements, and adding up the whole bucket
 * costs time. wire_bytes, sum_bytes: of a bucket as it is sent, and of its sum as it would be gathered. */
TX_API int32_t tx_trades(int64_t world, int64_t wire_bytes, int64_t sum_bytes);

#ifdef __cplusplus
}
#endif

#endif
