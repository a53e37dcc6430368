/* bf16 messages in three quarters of their bytes; states and weights as small as they get. */
#ifndef TORCH_EXT_COMPRESS_H
#define TORCH_EXT_COMPRESS_H

#include "torch_ext_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* -- messages ------------------------------------------------------------------------------------------------------ */

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

#ifdef __cplusplus
}
#endif

#endif
