/* A trainer and an inference engine that follows it, in one C program. After each optimizer step the trainer sends the
 * bf16 weights that changed, and the engine applies them: its weights are then the same, bit for bit. The engine has
 * another layout: each of two tensor-parallel ranks has half of the columns. The first message has all weights, the
 * others about ten bits for each weight that changed.
 *
 * The engine's half uses torch_ext_delta.h alone: a separate engine links to libtorch_ext_delta.so only.
 *
 *     bazel run //examples/c:follow
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "torch_ext.h"
#include "torch_ext_delta.h"

enum { ROWS = 256, COLUMNS = 512, NUMEL = ROWS * COLUMNS, RANKS = 2, HALF = COLUMNS / RANKS, STEPS = 5 };

static const tx_delta_param table[] = {{.name = "layer.weight", .numel = NUMEL, .dtype = TX_BF16}};

static tx_tensor tensor_of(void *data, int64_t numel, tx_dtype dtype) {
  return (tx_tensor){.data = data, .numel = numel, .dtype = dtype};
}

static int failed(tx_status status, const tx_error *error) {
  if (status != TX_OK) {
    fprintf(stderr, "%s: %s\n", tx_status_name(status), error->message);
  }
  return status != TX_OK;
}

/* -- trainer ------------------------------------------------------------------------------------------------------- */

/* Weights, AdamW's states, and a publisher's notes: which weights changed, the largest change in each block of
 * TX_BLOCK, and checksums of the last version. */
static uint16_t weights[NUMEL], exp_avg[NUMEL], exp_avg_sq[NUMEL], grads[NUMEL], moved[NUMEL / TX_BLOCK];
static float masters[NUMEL], steps[1];
static uint8_t changed[NUMEL / 8];
static int64_t checksums[(NUMEL + TX_CHECKSUM - 1) / TX_CHECKSUM];

static tx_delta_run publisher_run(void) {
  return (tx_delta_run){
      .param = 0,
      .weights = tensor_of(weights, NUMEL, TX_BF16),
      .changed = tensor_of(changed, sizeof changed, TX_U8),
      .moved = tensor_of(moved, NUMEL / TX_BLOCK, TX_BF16),
      .checksums = tensor_of(checksums, (int64_t)(sizeof checksums / sizeof *checksums), TX_I64),
  };
}

/* Uniform in [-1, 1): a 64-bit linear congruential generator (Knuth's constants), its upper 24 bits. */
static float uniform(void) {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (float)(state >> 40) * 0x1p-23f - 1.0f;
}

/* Converts to bf16, with rounding, or from it: tx_cast reads the dtypes of the tensors. */
static int cast(tx_tensor from, tx_tensor to) {
  tx_error error;
  tx_cast_args args = TX_CAST_ARGS_INIT;
  args.n = 1;
  args.srcs = &from;
  args.dsts = &to;
  return failed(tx_cast(&args, NULL, &error), &error);
}

/* Fills `to` with random bf16 numbers of about `size`: a gradient, or initial weights. */
static int fill(uint16_t *to, float size) {
  static float wide[NUMEL];
  for (int i = 0; i < NUMEL; ++i) {
    wide[i] = size * uniform();
  }
  return cast(tensor_of(wide, NUMEL, TX_F32), tensor_of(to, NUMEL, TX_BF16));
}

/* Makes version 0: random weights, and master weights with the same numbers. */
static int begin_training(tx_delta_chain *chain) {
  const uint64_t id[2] = {0x5eed, 1}; /* in real use: two random words */
  const tx_delta_run run = publisher_run();
  tx_error error;
  return fill(weights, 0.05f) || cast(run.weights, tensor_of(masters, NUMEL, TX_F32)) ||
         failed(tx_delta_chain_begin(1, table, id, 0, 1, chain, &error), &error) ||
         failed(tx_delta_renew(1, &run, NULL, &error), &error);
}

/* Takes an AdamW step with a random gradient; it notes which weights it changes. */
static int step_once(void) {
  const tx_tensor param = tensor_of(weights, NUMEL, TX_BF16), grad = tensor_of(grads, NUMEL, TX_BF16);
  const tx_tensor first = tensor_of(exp_avg, NUMEL, TX_BF16), second = tensor_of(exp_avg_sq, NUMEL, TX_BF16);
  const tx_tensor master = tensor_of(masters, NUMEL, TX_F32), counter = tensor_of(steps, 1, TX_F32);
  const tx_delta_run run = publisher_run();
  const tx_adamw_group group = {.lr = 1e-5, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .decoupled = 1.0};
  tx_adamw_args args = TX_ADAMW_ARGS_INIT;
  args.n = 1;
  args.params = &param;
  args.grads = &grad;
  args.exp_avgs = &first;
  args.exp_avg_sqs = &second;
  args.masters = &master;
  args.steps = &counter;
  args.n_groups = 1;
  args.groups = &group;
  args.changed = &run.changed;
  args.moved = &run.moved;
  tx_error error;
  return fill(grads, 1.0f) || failed(tx_adamw(&args, NULL, &error), &error);
}

/* Makes the message of the next version or, with TX_DELTA_WHOLE, one with all weights of the current version. */
static int publish(tx_delta_chain *chain, int32_t kind, tx_delta_message *message) {
  const tx_delta_run run = publisher_run();
  tx_delta_encode_args args = TX_DELTA_ENCODE_ARGS_INIT;
  args.n_params = 1;
  args.params = table;
  args.n_runs = 1;
  args.runs = &run;
  args.steps = 1;
  args.kind = kind;
  args.sliceable = 1; /* each of the engine's ranks holds a part of the parameter */
  tx_error error;
  return failed(tx_delta_encode(&args, chain, NULL, message, &error), &error);
}

/* -- engine -------------------------------------------------------------------------------------------------------- */

/* The engine's ranks: rank r has columns [r * HALF, (r + 1) * HALF), contiguous in its own memory. */
static uint16_t shards[RANKS][ROWS * HALF];

static int open_rank(int rank, tx_delta_receiver **receiver) {
  tx_delta_piece pieces[RANKS];
  for (int r = 0; r < RANKS; ++r) {
    pieces[r] = (tx_delta_piece){
        .first = r * HALF,
        .rows = ROWS,
        .columns = HALF,
        .step = COLUMNS,
        .data = r == rank ? shards[rank] : NULL, /* NULL: another rank has these columns */
        .row_stride = HALF,
        .column_stride = 1,
    };
  }
  tx_error error;
  return failed(tx_delta_open(1, table, RANKS, pieces, receiver, &error), &error);
}

/* Applies the same message on every rank. */
static int receive(tx_delta_receiver **receivers, const tx_delta_message *message) {
  const tx_tensor bytes = tensor_of(message->data, message->bytes, TX_U8);
  tx_error error;
  for (int rank = 0; rank < RANKS; ++rank) {
    if (failed(tx_delta_apply(receivers[rank], 1, &bytes, TX_DELTA_TOUCHED, NULL, &error), &error)) {
      return 1;
    }
  }
  return 0;
}

/* -- both ---------------------------------------------------------------------------------------------------------- */

static int same_weights(void) {
  for (int row = 0; row < ROWS; ++row) {
    for (int rank = 0; rank < RANKS; ++rank) {
      if (memcmp(weights + row * COLUMNS + rank * HALF, shards[rank] + row * HALF, sizeof(uint16_t) * HALF) != 0) {
        return 0;
      }
    }
  }
  return 1;
}

static int send_version(tx_delta_chain *chain, int32_t kind, tx_delta_receiver **receivers) {
  tx_delta_message message = {0};
  tx_delta_info info = TX_DELTA_INFO_INIT;
  tx_error error;
  int wrong = publish(chain, kind, &message) ||
              failed(tx_delta_info_of(tensor_of(message.data, message.bytes, TX_U8), &info, &error), &error) ||
              receive(receivers, &message);
  if (!wrong) {
    printf("version %lld: %6lld of %d weights changed, %6lld bytes\n", (long long)tx_delta_version(receivers[0]),
           (long long)info.changed, NUMEL, (long long)message.bytes);
    if (!same_weights()) {
      fprintf(stderr, "the engine's weights are others\n");
      wrong = 1;
    }
  }
  tx_delta_free(&message);
  return wrong;
}

int main(void) {
  tx_delta_chain chain = TX_DELTA_CHAIN_INIT;
  tx_delta_receiver *receivers[RANKS] = {NULL, NULL};
  int wrong = begin_training(&chain);
  for (int rank = 0; rank < RANKS && !wrong; ++rank) {
    wrong = open_rank(rank, &receivers[rank]);
  }
  wrong = wrong || send_version(&chain, TX_DELTA_WHOLE, receivers);
  for (int step = 0; step < STEPS && !wrong; ++step) {
    wrong = step_once() || send_version(&chain, TX_DELTA_CHANGES, receivers);
  }
  for (int rank = 0; rank < RANKS; ++rank) {
    tx_delta_close(receivers[rank]);
  }
  return wrong;
}
