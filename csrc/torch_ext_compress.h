/* Lossless compression: bf16 messages in three quarters of their bytes, and an entropy code for states and weights. */
#ifndef TORCH_EXT_COMPRESS_H
#define TORCH_EXT_COMPRESS_H

#include "torch_ext_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* -- messages ------------------------------------------------------------------------------------------------------ */

/* Lossless compression of BF16 data for a link that is slower than the processor: 1.52 bytes per element, whatever the
 * data, so that both ends know the length of a message. Per block it removes what the elements have in common: their
 * magnitude (csrc/math/compress_block.h). Both functions run on the calling thread, at about memory speed, and allocate
 * nothing.
 *
 * tx_compressed_bytes: bytes of the message of `numel` elements, a multiple of TX_BLOCK > 0. For any other numel 0:
 * send the elements uncompressed. */
TX_API int64_t tx_compressed_bytes(int64_t numel);

/* Compresses `values`. values: BF16. message: U8, tx_compressed_bytes(values.numel) elements, all of them written, the
 * same bytes on every machine. *rest: number of bytes at the end of `values` that did not fit into the message and must
 * be sent after it, uncompressed. It is 0 unless the data is too disordered: more than numel / 512 + 16 elements are
 * non-zero and 2^15 times smaller than the largest of their block. */
TX_API tx_status tx_compress(tx_tensor values, tx_tensor message, int64_t *rest, tx_error *error);

/* Expands a message. Writes all of `values` except their last *rest bytes, which arrive separately. Whatever the
 * message contains, only `values` is written. TX_ERROR_BAD_STATE, with nothing written, if the message contradicts
 * itself; this does not find every damage, as a checksum would. */
TX_API tx_status tx_expand(tx_tensor message, tx_tensor values, int64_t *rest, tx_error *error);

/* -- planes: an entropy code, for files and for changes of weights ------------------------------------------------- */

/* Lossless entropy code for F32, BF16, F16, I16 and U8 values; it codes their exponents: trained bf16 weights take 1.32
 * bytes of 2. The message depends on the values alone, not on the processor. It consists of blocks of TX_PLANES_BLOCK
 * elements, each with its own checksum, which can be decoded one by one. Bytes that do not compress are stored as they
 * are. Everything runs on the calling thread; to use several threads, cut the values into parts. */
#define TX_PLANES_BLOCK 65536

/* An upper bound on the bytes of a message. 0 for any other dtype, and for numel < 0 or > 2^56. */
TX_API int64_t tx_planes_bound(tx_dtype dtype, int64_t numel);

/* Encodes `values`. out: U8, at least the bound. *bytes: length of the message at the start of `out`; the bytes after
 * it may be written too. Allocates a block's planes and tables: TX_ERROR_OUT_OF_MEMORY. */
TX_API tx_status tx_planes_encode(tx_tensor values, tx_tensor out, int64_t *bytes, tx_error *error);

typedef struct tx_planes {
  uint64_t size;
  int64_t numel;
  int64_t bytes;    /* of the message */
  int64_t n_blocks; /* each has TX_PLANES_BLOCK elements, the last one may have fewer */
  int32_t dtype;
  int32_t reserved;
} tx_planes;
#define TX_PLANES_INIT \
  { .size = sizeof(tx_planes) }

/* Reads the header of a message, which has its own checksum; does not look at the blocks. message: U8, the whole
 * message. TX_ERROR_BAD_STATE, saying what is wrong, if it is damaged, truncated or not a message. */
TX_API tx_status tx_planes_read(tx_tensor message, tx_planes *planes, tx_error *error);

/* Verifies the checksums of blocks [begin, end). TX_ERROR_BAD_STATE names the first damaged block. */
TX_API tx_status tx_planes_check(tx_tensor message, int64_t begin, int64_t end, tx_error *error);

/* Decodes a message. values: as many as were encoded, of the same dtype. Whatever the message contains, only `values`
 * is written and only `message` is read. TX_ERROR_BAD_STATE, with nothing written, if a checksum is wrong. If the
 * checksums are right but tx_planes_encode did not write the message, the call may fail after writing `values`. */
TX_API tx_status tx_planes_decode(tx_tensor message, tx_tensor values, tx_error *error);

/* tx_planes_decode for values.numel elements from element `begin` on; reads only the blocks that contain them. */
TX_API tx_status tx_planes_decode_range(tx_tensor message, int64_t begin, tx_tensor values, tx_error *error);

#ifdef __cplusplus
}
#endif

#endif
