/* What a machine (Note [the cycle]) knows about optimizer steps: whether gradients may be stepped, and whether the last
 * step has written all weights and their all-gathers are complete. */
#include <inttypes.h>

#include "csrc/core/cycle.h"
#include "csrc/core/text.h"

static const char kPartlyStepped[] =
    "a backward raised when some of its buckets had been stepped already (step_in_backward=True): weights are partly "
    "those of the next step. Load a checkpoint";

static const char kUnfinished[] =
    "step() was interrupted, or raised, when it had perhaps stepped some of the parameters: this rank's weights are "
    "not those of the other ranks any more. Load a checkpoint";

void tx_cycle_notice_unfinished_step(tx_cycle *c) {
  if (!c->stepping || c->args.world == 1 || tx_cycle_has_failed(c)) return;
  c->stepping = 0;
  tx_cycle_fail(c, kUnfinished);
  c->partly_stepped = 1;
}

void tx_cycle_notice_partly_stepped(tx_cycle *c) {
  if (!c->steps_in_backward || c->n_messages == 0 || tx_cycle_has_failed(c)) return;
  tx_cycle_fail(c, kPartlyStepped);
  c->partly_stepped = 1;
}

tx_cycle_answer tx_cycle_check_step(tx_cycle *c, const uint8_t *grads, const char *call) {
  if (!call) call = "step()";
  tx_cycle_notice_unfinished_step(c);
  if (tx_cycle_has_failed(c)) return tx_cycle_refuse(c, "%s after an exchange that failed: %s", call, c->failure);
  if (c->phase != TX_PHASE_IDLE) return tx_cycle_refuse(c, "%s during a backward: call it after that", call);
  if (c->n_gathered < c->n_gathers)
    return tx_cycle_refuse(c, "%s before the all-gather of the last step's weights has ended", call);
  int64_t unreduced = -1;
  int broken = 0, nonfinite = 0;
  for (int64_t i = c->args.n_params; i-- > 0;) {
    broken |= c->broken[i];
    nonfinite |= c->nonfinite[i];
    if (grads && grads[i] && (c->state[i] || c->row->every_backward)) unreduced = i;
  }
  if (broken) {
    return tx_cycle_refuse(c,
                           "%s after a backward that raised when some of its sums were added already: call "
                           "zero_grad() and repeat the micro-batches",
                           call);
  }
  if (nonfinite) {
    char names[TX_CYCLE_TEXT / 2];
    tx_text text = tx_text_in(names, sizeof names);
    tx_cycle_add_names(&text, c, c->nonfinite);
    return tx_cycle_refuse(c,
                           "%s with gradients that have NaN or Inf (%s and perhaps others), as backward said "
                           "(check_for_nan_in_grad): call zero_grad() first",
                           call, names);
  }
  if (unreduced >= 0) {
    return tx_cycle_refuse(
        c,
        "%s with gradients that no rank has reduced (parameter '%s' and perhaps others): the last backward ran "
        "under no_sync(), or raised, or `.grad` was assigned where gradients are sharded. Leave no_sync() for the last "
        "micro-batch, or call zero_grad() to drop them.",
        call, c->args.names[unreduced]);
  }
  c->n_steps++;
  return 0;
}

void tx_cycle_stepping(tx_cycle *c) {
  tx_cycle_notice_unfinished_step(c);
  c->stepping = 1;
}

int64_t tx_cycle_gathering(tx_cycle *c) {
  if (c->n_gathered == c->n_gathers) c->n_gathered = c->n_gathers = 0;
  return c->n_gathers++;
}

void tx_cycle_stepped(tx_cycle *c) {
  /* The second count of a step; tx_cycle_check_step made the first. A step that was interrupted before it wrote
   * anything does not get here and so has another count. With DistributedDataParallel (join()) a rank may make fewer
   * steps than others. */
  if (c->stepping && c->args.kind != TX_CYCLE_DDP_HOOK) c->n_steps++;
  c->stepping = 0;
}
