/* Prefetches the warp's next elements from memory into L2.
 *
 * A round loads, computes and stores without any overlap within the warp, so only other warps hide the memory's
 * latency, and registers limit the number of these. Here one lane prefetches the next piece of every stream while the
 * warp computes on the current one. Rounds then wait for L2 only, a third as long, and it takes neither registers nor
 * shared memory. The instruction exists from sm_90 on. Included by adamw_kernel.h. */
#ifndef TX_CUDA_ADAMW_PREFETCH_H
#define TX_CUDA_ADAMW_PREFETCH_H

#include "cuda/adamw_vector.h"
#include "cuda/variants.h"

namespace {

#if TX_CUDA_PREFETCH && (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900)
constexpr bool kPrefetches = true;
#else
constexpr bool kPrefetches = false;
#endif

/* Prefetches [from, from + bytes), as far as it consists of whole aligned 16-byte vectors. */
__device__ __forceinline__ void prefetch(const void *from, int32_t bytes) {
  if (((uintptr_t)from & 15u) != 0u || bytes < 16) return;
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  emulated::AskFor(from, bytes & ~15);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes & ~15) : "memory");
#endif
}

/* Rounds of a piece. All warps of the device are a piece ahead: that has to fit into a part of L2, and to cover the
 * latency. With fp32 streams an element has twice as many bytes. */
template <int WEIGHT, int MOMENTS>
constexpr int32_t kPieceRounds = tx_param_of_weight(WEIGHT) == TX_F32 &&MOMENTS == TX_MOMENTS_F32 ? 2 : 4;

/* Prefetches elements [begin, begin + count) of every stream that the step reads. */
template <int WEIGHT, int MOMENTS>
__device__ __forceinline__ void prefetch_piece(const tx_step_entry &e, int64_t begin, int32_t count) {
  typedef round_ops<WEIGHT, MOMENTS> round;
  const int grad = tx_bytes_of((tx_dtype)e.grad_dtype), param = tx_bytes_of(round::param_of(e));
  const int m = tx_bytes_of(round::moment(e.exp_avg_dtype)), v = tx_bytes_of(round::moment(e.exp_avg_sq_dtype));
  const tx_dtype master = round::master_of(e);
  prefetch((const char *)e.grad + grad * begin, grad * count);
  prefetch((const char *)e.exp_avg + m * begin, m * count);
  prefetch((const char *)e.exp_avg_sq + v * begin, v * count);
  if (master != TX_F32) prefetch((const char *)e.param + param * begin, param * count);
  if (master != TX_NONE) prefetch((const char *)e.master + tx_bytes_of(master) * begin, tx_bytes_of(master) * count);
}

/* Called before round `round` of a tile. At the start of a piece, prefetches the following one: in this tile, or at the
 * start of the warp's next tile, which may have no elements. */
template <int WEIGHT, int MOMENTS>
__device__ __forceinline__ void prefetch_ahead(const tx_step_table &t, const tx_tile &tile, const tx_tile &next,
                                               int32_t round) {
  constexpr int32_t kPiece = kPieceRounds<WEIGHT, MOMENTS> * TX_ROUND;
  if (!kPrefetches || round % kPieceRounds<WEIGHT, MOMENTS> != 0 || tx_lane_id() != 0) return;
  const int32_t from = round * TX_ROUND + kPiece;
  const bool here = from < tile.count;
  const int64_t begin = here ? tile.begin + from : next.begin;
  const int32_t left = here ? tile.count - from : next.count;
  prefetch_piece<WEIGHT, MOMENTS>(t.entries[here ? tile.tensor : next.tensor], begin, left < kPiece ? left : kPiece);
}

}  // namespace

#endif
