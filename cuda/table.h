/* The table of a launch's tensors, passed by value: a kernel parameter of up to 32 KiB. So a launch needs no memory of
 * its own and no copy beforehand, and a captured graph owns its tables. */
#ifndef TX_CUDA_TABLE_H
#define TX_CUDA_TABLE_H

#include "cuda/grid.h"

/* The limit for a kernel's parameters from CUDA 12.1 on, on sm_70 and newer. */
#define TX_PARAMETER_BYTES 32764

/* How many entries fit into a kernel parameter. */
template <class Common, class Entry>
constexpr int32_t tx_table_room = (int32_t)((TX_PARAMETER_BYTES - sizeof(Common) - 4 * sizeof(int64_t)) /
                                            (sizeof(Entry) + sizeof(int64_t)));

/* Entry: what a kernel knows of one tensor; it has a field `int64_t numel`. Common: what it knows of the whole launch.
 * Filled in by tx_table_begin and tx_table_add. */
template <class Common, class Entry, int32_t CAPACITY = tx_table_room<Common, Entry>>
struct tx_table {
  typedef Entry entry;
  static constexpr int32_t kCapacity = CAPACITY;
  Common common;
  int64_t tile; /* elements of a full tile; a multiple of TX_ROUND */
  int32_t n;
  int32_t reserved;
  int64_t first_tile[kCapacity + 1];
  Entry entries[kCapacity];
};

template <class Common, class Entry>
static inline void tx_table_begin(tx_table<Common, Entry> *table, int64_t tile) {
  static_assert(sizeof *table <= TX_PARAMETER_BYTES, "a table is one kernel parameter");
  table->tile = tile;
  table->n = 0;
  table->reserved = 0;
  table->first_tile[0] = 0;
}

/* Returns whether there was room. An entry without elements has no tiles. */
template <class Common, class Entry>
static inline bool tx_table_append(tx_table<Common, Entry> *table, const Entry &entry) {
  if (table->n == table->kCapacity) return false;
  table->entries[table->n] = entry;
  table->first_tile[table->n + 1] = table->first_tile[table->n] + tx_tiles(entry.numel, table->tile);
  table->n++;
  return true;
}

/* tx_table_append, but entries without elements take no room. */
template <class Common, class Entry>
static inline bool tx_table_add(tx_table<Common, Entry> *table, const Entry &entry) {
  return entry.numel == 0 || tx_table_append(table, entry);
}

template <class Common, class Entry, int32_t CAPACITY>
TX_FN int64_t tx_table_tiles(const tx_table<Common, Entry, CAPACITY> &table) {
  return table.first_tile[table.n];
}

template <class Common, class Entry, int32_t CAPACITY>
TX_FN tx_tile tx_table_tile(const tx_table<Common, Entry, CAPACITY> &table, int64_t number) {
  return tx_tile_at(table.first_tile, table.n, number, table.tile, &table.entries[0].numel, sizeof(Entry));
}

/* A table for few tensors: passing 32 KiB of parameters takes host and device some microseconds, even for one
 * tensor. */
#define TX_FEW 16
template <class Common, class Entry>
using tx_small_table = tx_table<Common, Entry, TX_FEW>;

/* Copies a table of at most TX_FEW entries. */
template <class Common, class Entry>
static inline void tx_table_shrink(tx_small_table<Common, Entry> *small, const tx_table<Common, Entry> &table) {
  small->common = table.common;
  small->tile = table.tile;
  small->n = table.n;
  small->reserved = 0;
  memcpy(small->first_tile, table.first_tile, (size_t)(table.n + 1) * sizeof *table.first_tile);
  memcpy(small->entries, table.entries, (size_t)table.n * sizeof *table.entries);
}

#endif
