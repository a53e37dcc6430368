/* Features that the step's kernels can be built without, to compare them on a machine with a GPU (the libraries of
 * cuda/BUILD's `variants`; TORCH_EXT_CUDA_LIBRARY chooses one). They change no bit of a result. */
#ifndef TX_CUDA_VARIANTS_H
#define TX_CUDA_VARIANTS_H

/* Usual tiles of steps with remainders have a path of their own, which reads ahead (adamw_usual.h). */
#ifndef TX_CUDA_USUAL
#define TX_CUDA_USUAL 1
#endif

/* If a stream is fp32, a lane's elements are in two places, so that whole sectors are written at a time
 * (adamw_streams.h). */
#ifndef TX_CUDA_SECTORS
#define TX_CUDA_SECTORS 1
#endif

#endif
