/* What the step's kernels may be built with and without, so that a machine with a GPU compares them (the libraries of
 * cuda/BUILD's `variants`; TORCH_EXT_CUDA_LIBRARY chooses one). No bit of a result hangs on any of it. */
#ifndef TX_CUDA_VARIANTS_H
#define TX_CUDA_VARIANTS_H

/* A warp asks for what it reads next to come into L2 (adamw_prefetch.h). */
#ifndef TX_CUDA_PREFETCH
#define TX_CUDA_PREFETCH 1
#endif

/* Where a stream is fp32 a lane's elements lie in two places, so that whole sectors are written at a time
 * (adamw_streams.h). */
#ifndef TX_CUDA_SECTORS
#define TX_CUDA_SECTORS 1
#endif

#endif
