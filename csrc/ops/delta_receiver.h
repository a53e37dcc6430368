/* A receiver of deltas, and what of its weights the segments of some versions are to change. */
#ifndef TX_OPS_DELTA_RECEIVER_H
#define TX_OPS_DELTA_RECEIVER_H

#include "csrc/core/delta_part.h"
#include "csrc/core/delta_pieces.h"
#include "csrc/core/delta_segment.h"

struct tx_delta_receiver {
  int64_t n_params;
  tx_delta_param *params; /* names in `names` */
  char *names;
  int64_t n_pieces;
  tx_delta_piece *pieces; /* sorted */
  int64_t *first_piece;   /* n_params + 1 entries */
  int lacks;              /* whether it does not hold something */
  uint64_t model, id[2];
  int64_t version;
  int32_t parts;   /* 0 before the first apply */
  uint64_t *links; /* of each part */
};

/* A run of one part, and whether what came of it is what it said. */
typedef struct tx_delta_expected {
  const tx_delta_part *part;
  tx_delta_piece_of run;
  uint64_t touched, full;
  int partly; /* the receiver does not hold all of it */
} tx_delta_expected;

/* One segment of a version: what it changes of a parameter's elements [at, at + numel). */
typedef struct tx_delta_change {
  int64_t param, at, numel;
  int64_t order; /* of versions */
  int64_t run;   /* index of what is expected */
  int64_t in_run;
  const uint8_t *bytes;
  int64_t n_bytes; /* 0: nothing */
  uint64_t touched, full;
  tx_status status;
  int partly;
} tx_delta_change;

/* What is to be done for some parts, sorted: groups of changes of the same elements, in the order of versions. */
typedef struct tx_delta_plan {
  tx_delta_expected *runs;
  int64_t n_runs;
  tx_delta_change *changes;
  int64_t n_changes;
  int64_t *groups; /* n_groups + 1 */
  int64_t n_groups;
  int64_t longest; /* changes of a group, at most */
} tx_delta_plan;

/* all: changes of nothing are in the plan, too. */
tx_status tx_delta_plan_make(tx_delta_plan *plan, const tx_delta_receiver *receiver, const tx_delta_part *parts,
                             int64_t n_parts, int all, tx_error *error);
void tx_delta_plan_free(tx_delta_plan *plan);

/* Whether these parts, sorted, follow what the receiver is at, and are all of their versions. */
tx_status tx_delta_follows(const tx_delta_receiver *receiver, const tx_delta_part *parts, int64_t n, tx_error *error);

#endif
