/* What every header of torch_ext is written in: statuses, messages, dtypes, tensors, threads. Their habits are in
 * torch_ext.h. */
#ifndef TORCH_EXT_TYPES_H
#define TORCH_EXT_TYPES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TX_API __attribute__((visibility("default")))
#else
#define TX_API
#endif

#define TX_VERSION_MAJOR 0
#define TX_VERSION_MINOR 1
#define TX_VERSION_PATCH 0
/* (major << 16 | minor << 8 | patch) of the library that is running; compare with the macros above. */
TX_API uint32_t tx_version(void);

/* Values are pinned for ever and grouped by the hundred. */
typedef enum tx_status {
  TX_OK = 0,
  /* 1xx: an argument by itself */
  TX_ERROR_INVALID_ARGUMENT = 100, /* a number, a pointer or a struct size that is never legal */
  TX_ERROR_UNKNOWN_KEY = 101,      /* a configuration key nobody knows; the message names the nearest */
  TX_ERROR_UNKNOWN_DTYPE = 102,    /* a dtype name or code nobody knows */
  TX_ERROR_ILLEGAL_VALUE = 103,    /* a known key with a value outside its set */
  /* 2xx: arguments against each other */
  TX_ERROR_SHAPE = 200,     /* list lengths or element counts that differ */
  TX_ERROR_DTYPE = 201,     /* a dtype combination that is not in the table */
  TX_ERROR_OVERLAP = 202,   /* memory written twice by one call */
  TX_ERROR_CONFLICT = 203,  /* two explicit settings that contradict each other; the message names both */
  TX_ERROR_DEVICE = 204,    /* tensors on devices that differ, or that this library cannot reach */
  TX_ERROR_BAD_STATE = 205, /* a call that is out of order (the message says which comes first) */
  /* 3xx: the world around */
  TX_ERROR_OUT_OF_MEMORY = 300,
  TX_ERROR_UNAVAILABLE = 301, /* something this machine or this torch does not have */
  TX_ERROR_MISMATCH = 302     /* ranks that do not agree */
} tx_status;

/* A message buffer owned by the caller. The library writes a NUL-terminated English sentence into it when a call
 * fails and leaves it alone when it succeeds. It is UTF-8 whatever it names: bytes of a name that are not, and what is
 * left of a character where a long name is cut, become '?'. */
typedef struct tx_error {
  char message[1024];
} tx_error;

/* "TX_ERROR_SHAPE" for TX_ERROR_SHAPE; "unknown status" for a number that is none. Static storage. */
TX_API const char *tx_status_name(tx_status status);

/* Element types. Values are pinned; names, aliases and sizes are in csrc/core/dtypes.def. */
typedef enum tx_dtype {
  TX_NONE = 0, /* "auto": no dtype was decided */
  TX_F32 = 1,
  TX_F16 = 2,
  TX_BF16 = 3,
  TX_F64 = 4,
  TX_U8 = 5, /* 8-bit optimizer state and wire codes, torch's storage convention for fp8 */
  TX_I8 = 6,
  TX_I16 = 7,
  TX_I32 = 8,
  TX_I64 = 9,
  TX_BOOL = 10,
  TX_C32 = 11,
  TX_C64 = 12,
  TX_C128 = 13,
  TX_F8_E4M3 = 14, /* torch.float8_e4m3fn */
  TX_F8_E5M2 = 15  /* torch.float8_e5m2 */
} tx_dtype;

/* A flat run of elements in host memory (device memory for the CUDA library). `numel == 0` means "none" wherever an
 * argument is optional; `data` is then ignored. Elements need only the alignment of one byte. */
typedef struct tx_tensor {
  void *data;
  int64_t numel;
  tx_dtype dtype;
  int32_t reserved; /* 0 */
} tx_tensor;

/* Threads supplied by the caller. `run` calls task(arg, i) once for each i in [0, n), in any order, on any threads, and
 * returns when all are done. A NULL tx_parallel, or num_threads <= 1, runs on the calling thread. Results never depend
 * on it: bits are the same for every number of threads. */
typedef struct tx_parallel {
  uint64_t size;
  int64_t num_threads;
  void *ctx;
  void (*run)(void *ctx, int64_t n, void (*task)(void *arg, int64_t i), void *arg);
} tx_parallel;
#define TX_PARALLEL_INIT \
  { sizeof(tx_parallel), 1, NULL, NULL }

/* What "None" is in an int64_t. */
#define TX_NO_INT INT64_MIN

/* -- dtypes (names, aliases, sizes: csrc/core/dtypes.def) ---------------------------------------------------------- */

/* A dtype from its name: surrounding white space and case do not matter. fp32|float32|float, bf16|bfloat16,
 * fp16|float16|half, fp8|float8|uint8 (all TX_U8); "auto" gives TX_NONE. Any other name is TX_ERROR_UNKNOWN_DTYPE, and
 * the message lists the legal ones. */
TX_API tx_status tx_dtype_parse(const char *text, tx_dtype *dtype, tx_error *error);

/* The value of a configuration key whose name ends in "_dtype": tx_dtype_parse, then tx_dtype_check_key; both messages
 * name the key, the value and the legal names. */
TX_API tx_status tx_dtype_coerce(const char *key, const char *text, tx_dtype *dtype, tx_error *error);

/* main_params_dtype is fp32 or fp16; exp_avg_dtype and exp_avg_sq_dtype are fp32, fp16, bf16 or uint8; else
 * TX_ERROR_ILLEGAL_VALUE. TX_NONE is legal everywhere, and other keys take any dtype. */
TX_API tx_status tx_dtype_check_key(const char *key, tx_dtype dtype, tx_error *error);

/* "fp32" for TX_F32, "none" for TX_NONE, "unknown dtype" for a code that is none. Static storage. */
TX_API const char *tx_dtype_name(tx_dtype dtype);
/* The attribute of the torch module: "float32" for TX_F32; NULL for TX_NONE and for unknown codes. The codes are
 * 1, 2, ... up to the first NULL. Static storage. */
TX_API const char *tx_dtype_torch_name(tx_dtype dtype);
/* 1 for real floating-point types, 0 for all others (TX_U8 too: it holds codes). */
TX_API int32_t tx_dtype_is_floating(tx_dtype dtype);
/* Bytes per element. TX_NONE and unknown codes are TX_ERROR_UNKNOWN_DTYPE, never a default. */
TX_API tx_status tx_dtype_size(tx_dtype dtype, int64_t *bytes, tx_error *error);

/* -- the processor ------------------------------------------------------------------------------------------------- */

/* The instruction sets this library was built for and this processor has, slowest first; index into it with i, NULL
 * past the end. tx_isa_select picks one by name ("base", ...; NULL: the fastest, or what TORCH_EXT_ISA says) for calls
 * that begin afterwards, of all threads; TX_ERROR_UNAVAILABLE for a name that is none of them. A TORCH_EXT_ISA that is
 * none is passed over until somebody asks for NULL. */
TX_API const char *tx_isa_name(int32_t i);
TX_API const char *tx_isa_selected(void);
TX_API tx_status tx_isa_select(const char *name, tx_error *error);

/* Whether the processor multiplies matrices of bf16 in tiles (AMX), whichever loops run. */
TX_API int32_t tx_isa_has_tiles(void);

#ifdef __cplusplus
}
#endif

#endif
