/* Keeps the decoded changes of segments between verifying and writing them. */
#include "csrc/ops/delta_records.h"

#include <stdlib.h>

#include "csrc/core/delta_bytes.h"

enum { kEach = sizeof(uint16_t) + sizeof(uint32_t) };

/* The number of weights that the segment says it changes; -1 if its changes cannot be kept. */
static int64_t changed_of(const tx_delta_change *c) {
  tx_bytes b = {c->bytes, c->bytes + c->n_bytes, 0};
  const uint8_t *flags = tx_take_bytes(&b, 2);
  const int64_t changed = tx_take_varint(&b);
  return !flags || b.failed || changed > c->numel || *flags & TX_DELTA_DENSE ? -1 : changed;
}

int tx_delta_records_make(tx_delta_records *records, const tx_delta_receiver *receiver, const tx_delta_plan *plan) {
  int64_t left = 0, found = 0;
  for (int64_t p = 0; p < receiver->n_params; p++)
    left += receiver->params[p].numel * tx_delta_item((tx_dtype)receiver->params[p].dtype) / 4 / kEach;
  *records = (tx_delta_records){calloc((size_t)(plan->n_groups + 1), sizeof *records->of_group), NULL};
  int64_t *rooms = malloc((size_t)(plan->n_groups + 1) * sizeof *rooms);
  for (int64_t g = 0; records->of_group && rooms && g < plan->n_groups; g++) {
    const int64_t room = plan->groups[g + 1] - plan->groups[g] == 1 ? changed_of(&plan->changes[plan->groups[g]]) : -1;
    rooms[g] = room > 0 && room <= left - found ? room : 0;
    found += rooms[g];
  }
  if (rooms && found) records->memory = malloc((size_t)(found * kEach));
  const int there = records->of_group && rooms && (records->memory || !found);
  uint32_t *weight = records->memory;
  uint16_t *at = weight ? (uint16_t *)(weight + found) : NULL;
  for (int64_t g = 0; there && found && g < plan->n_groups; g++) {
    if (!rooms[g]) continue;
    records->of_group[g].at = at;
    records->of_group[g].weight = weight;
    at += rooms[g];
    weight += rooms[g];
  }
  free(rooms);
  return there;
}

void tx_delta_records_free(tx_delta_records *records) {
  free(records->of_group);
  free(records->memory);
}

#define AHEAD 64 /* weights to prefetch ahead */

/* The common case: 16-bit weights that are contiguous in memory. */
static void write_halves(uint16_t *to, const uint16_t *at, const uint32_t *weight, int32_t n_at) {
  const int32_t ahead = n_at < AHEAD ? n_at : AHEAD;
  for (int32_t i = 0; i < ahead; i++)
    __builtin_prefetch(to + at[i], 1, 3);
  for (int32_t i = 0; i < n_at; i++) {
    const int32_t next = i + AHEAD < n_at ? i + AHEAD : n_at - 1;
    __builtin_prefetch(to + at[next], 1, 3);
    to[at[i]] = (uint16_t)weight[i];
  }
}

void tx_delta_record_write(const tx_delta_piece *pieces, int64_t n_pieces, int64_t begin, int64_t n, int64_t item,
                           const uint16_t *at, const uint32_t *weight, int32_t n_at) {
  char *memory = tx_delta_together(pieces, n_pieces, begin, n, item);
  if (memory && item == 2 && (uintptr_t)memory % 2 == 0) {
    write_halves((uint16_t *)memory, at, weight, n_at);
    return;
  }
  for (int32_t i = 0; i < n_at; i++) {
    char *to = memory ? memory + at[i] * item : tx_delta_find_element(pieces, n_pieces, begin + at[i], item);
    if (!to) continue;
    if (item == 2) {
      const uint16_t half = (uint16_t)weight[i];
      memcpy(to, &half, sizeof half);
    } else {
      memcpy(to, &weight[i], sizeof weight[i]);
    }
  }
}
