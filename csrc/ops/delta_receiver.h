/* A receiver of deltas, and the plan of the changes that some versions make to its weights. */
#ifndef TX_OPS_DELTA_RECEIVER_H
#define TX_OPS_DELTA_RECEIVER_H

#include "csrc/core/delta_part.h"
#include "csrc/core/delta_pieces.h"
#include "csrc/core/delta_segment.h"

struct tx_delta_receiver {
  int64_t n_params;
  tx_delta_param *params; /* their names point into `names` */
  char *names;
  int64_t n_pieces;
  tx_delta_piece *pieces; /* sorted by parameter and first element */
  int64_t *first_piece;   /* n_params + 1 entries: index of each parameter's first piece */
  int lacks;              /* whether there are elements that it does not hold */
  uint64_t model, id[2];
  int64_t version;
  int32_t parts;   /* 0 before the first apply */
  uint64_t *links; /* link of each part */
};

/* A run of one part, and the sums of the result, to compare with those in the run. */
typedef struct tx_delta_expected {
  const tx_delta_part *part;
  tx_delta_piece_of run;
  uint64_t touched, full;
  int partly; /* the receiver does not hold all of it */
} tx_delta_expected;

/* One segment of a version: its changes to elements [at, at + numel) of a parameter. */
typedef struct tx_delta_change {
  int64_t param, at, numel;
  int64_t order; /* number of its version, in order */
  int64_t run;   /* index in tx_delta_plan.runs */
  int64_t in_run;
  const uint8_t *bytes;
  int64_t n_bytes; /* 0: no change */
  uint64_t touched, full;
  tx_status status;
  int partly;
} tx_delta_change;

/* The plan of an apply: sorted groups of changes; a group has the changes of the same elements, in the order of
 * versions. */
typedef struct tx_delta_plan {
  tx_delta_expected *runs;
  int64_t n_runs;
  tx_delta_change *changes;
  int64_t n_changes;
  int64_t *groups; /* n_groups + 1 entries: index of each group's first change */
  int64_t n_groups;
  int64_t longest; /* most changes of a group */
} tx_delta_plan;

/* Makes a plan. all: segments without a change are included. */
tx_status tx_delta_plan_make(tx_delta_plan *plan, const tx_delta_receiver *receiver, const tx_delta_part *parts,
                             int64_t n_parts, int all, tx_error *error);
void tx_delta_plan_free(tx_delta_plan *plan);

/* Checks that these sorted parts follow the receiver's version, and are all parts of their versions. */
tx_status tx_delta_follows(const tx_delta_receiver *receiver, const tx_delta_part *parts, int64_t n, tx_error *error);

#endif
