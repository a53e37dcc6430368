/* Definitions that every header of torch_ext uses: statuses, messages, dtypes, tensors, threads. The conventions of the
 * whole interface (errors, structs, arguments, threads) are in torch_ext.h. */
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
/* The version of the library that is running, as (major << 16 | minor << 8 | patch). Compare it with the macros
 * above. */
TX_API uint32_t tx_version(void);

/* Result of a call. The values never change; each group of causes has its own hundred. */
typedef enum tx_status {
  TX_OK = 0,
  /* 1xx: one argument is wrong by itself */
  TX_ERROR_INVALID_ARGUMENT = 100, /* a number, a pointer or a struct size that is never legal */
  TX_ERROR_UNKNOWN_KEY = 101,      /* an unknown configuration key; the message names the nearest known one */
  TX_ERROR_UNKNOWN_DTYPE = 102,    /* an unknown dtype name or code */
  TX_ERROR_ILLEGAL_VALUE = 103,    /* a known key with a value outside its legal set */
  /* 2xx: arguments that do not fit each other */
  TX_ERROR_SHAPE = 200,     /* list lengths or element counts that differ */
  TX_ERROR_DTYPE = 201,     /* a dtype combination that is not supported */
  TX_ERROR_OVERLAP = 202,   /* memory written twice by one call */
  TX_ERROR_CONFLICT = 203,  /* two explicit settings that contradict each other; the message names both */
  TX_ERROR_DEVICE = 204,    /* tensors on different devices, or on a device that this library cannot reach */
  TX_ERROR_BAD_STATE = 205, /* a call out of order (the message says which call must come first) */
  /* 3xx: the environment */
  TX_ERROR_OUT_OF_MEMORY = 300,
  TX_ERROR_UNAVAILABLE = 301, /* this machine or this torch lacks something */
  TX_ERROR_MISMATCH = 302     /* ranks that disagree */
} tx_status;

/* A message buffer owned by the caller. The library writes a NUL-terminated English sentence into it when a call fails
 * and leaves it unchanged when a call succeeds. The text is always valid UTF-8: invalid bytes in a name become '?', and
 * so does a character that is cut in two where a long name is shortened. */
typedef struct tx_error {
  char message[1024];
} tx_error;

/* The name of a status: "TX_ERROR_SHAPE" for TX_ERROR_SHAPE; "unknown status" for any other number. Static storage. */
TX_API const char *tx_status_name(tx_status status);

/* Element types. The values never change. Names, aliases and sizes are in csrc/core/dtypes.def. */
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

/* A contiguous run of elements in host memory (in device memory for the CUDA library). Where an argument is optional,
 * `numel == 0` means that there is no tensor, and `data` is ignored; comments call that "none". `data` need not be
 * aligned. */
typedef struct tx_tensor {
  void *data;
  int64_t numel;
  tx_dtype dtype;
  int32_t reserved; /* 0 */
} tx_tensor;

/* Threads supplied by the caller. `run` calls task(arg, i) once for each i in [0, n), in any order, on any threads, and
 * returns when all tasks are done. With a NULL tx_parallel, or num_threads <= 1, everything runs on the calling thread.
 * Results are the same to the bit for every number of threads. */
typedef struct tx_parallel {
  uint64_t size;
  int64_t num_threads;
  void *ctx;
  void (*run)(void *ctx, int64_t n, void (*task)(void *arg, int64_t i), void *arg);
} tx_parallel;
#define TX_PARALLEL_INIT \
  { sizeof(tx_parallel), 1, NULL, NULL }

/* The value that stands for None in an int64_t. */
#define TX_NO_INT INT64_MIN

/* -- dtypes (names, aliases, sizes: csrc/core/dtypes.def) ---------------------------------------------------------- */

/* Parses the name of a dtype, ignoring case and surrounding white space: fp32|float32|float, bf16|bfloat16,
 * fp16|float16|half, fp8|float8|uint8 (all three TX_U8). "auto" gives TX_NONE. Any other name is
 * TX_ERROR_UNKNOWN_DTYPE, and the message lists the legal ones. */
TX_API tx_status tx_dtype_parse(const char *text, tx_dtype *dtype, tx_error *error);

/* Parses the value of a configuration key whose name ends in "_dtype": tx_dtype_parse, then tx_dtype_check_key. The
 * message of either failure names the key, the value and the legal names. */
TX_API tx_status tx_dtype_coerce(const char *key, const char *text, tx_dtype *dtype, tx_error *error);

/* Checks that a dtype is legal for a configuration key, else TX_ERROR_ILLEGAL_VALUE. main_params_dtype may be fp32 or
 * fp16; exp_avg_dtype and exp_avg_sq_dtype may be fp32, fp16, bf16 or uint8; any other key takes any dtype. TX_NONE is
 * legal for every key. */
TX_API tx_status tx_dtype_check_key(const char *key, tx_dtype dtype, tx_error *error);

/* The name of a dtype: "fp32" for TX_F32, "none" for TX_NONE, "unknown dtype" for an unknown code. Static storage. */
TX_API const char *tx_dtype_name(tx_dtype dtype);
/* The attribute of the torch module that is this dtype: "float32" for TX_F32; NULL for TX_NONE and for unknown codes.
 * The codes are 1, 2, ... up to the first NULL. Static storage. */
TX_API const char *tx_dtype_torch_name(tx_dtype dtype);
/* Returns 1 for real floating-point types and 0 for all others, TX_U8 included (it holds codes). */
TX_API int32_t tx_dtype_is_floating(tx_dtype dtype);
/* Bytes per element. TX_NONE and unknown codes are TX_ERROR_UNKNOWN_DTYPE; there is no default. */
TX_API tx_status tx_dtype_size(tx_dtype dtype, int64_t *bytes, tx_error *error);

/* -- the processor ------------------------------------------------------------------------------------------------- */

/* Instruction sets that this library was built for and this processor has. tx_isa_name(i) is the name of the i-th,
 * slowest first, and NULL past the end. tx_isa_selected is the name of the one in use. tx_isa_select chooses one by
 * name ("base", ...) for all calls of all threads that begin afterwards; a name that is not among them is
 * TX_ERROR_UNAVAILABLE. NULL chooses what the environment variable TORCH_EXT_ISA says, else the fastest. Without a call
 * of tx_isa_select an unusable TORCH_EXT_ISA is ignored; only tx_isa_select(NULL) reports it. */
TX_API const char *tx_isa_name(int32_t i);
TX_API const char *tx_isa_selected(void);
TX_API tx_status tx_isa_select(const char *name, tx_error *error);

/* Whether the processor multiplies bf16 matrices in tiles (AMX), whichever instruction set is selected. */
TX_API int32_t tx_isa_has_tiles(void);

#ifdef __cplusplus
}
#endif

#endif
