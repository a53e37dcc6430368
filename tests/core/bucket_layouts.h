// Bucket layouts for the tests of packing: where each gradient is placed in a bucket, with gaps, unused parameters,
// buckets of several work units, and many tiny gradients.
#ifndef TX_TESTS_CORE_BUCKET_LAYOUTS_H
#define TX_TESTS_CORE_BUCKET_LAYOUTS_H

#include <cstdint>
#include <vector>

struct Layout {
  const char *name;
  int64_t bucket;
  std::vector<int64_t> offsets, numels;
};

inline const std::vector<Layout> kLayouts = {
    {"empty", 0, {}, {}},
    {"only_a_gap", 300, {}, {}},
    {"one_exact", 256, {0}, {256}},
    {"one_element", 1, {0}, {1}},
    {"gap_first", 300, {128}, {172}},
    {"gap_last", 1000, {0}, {129}},
    {"gaps_between", 2048, {128, 384, 1024}, {100, 1, 513}},
    {"F4_golden", 10368, {0, 128}, {100, 10000}},
    {"E3_unused_in_the_middle", 1024, {0, 256, 512}, {200, 0, 300}},
    {"all_unused", 1024, {0, 256, 512}, {0, 0, 0}},
    {"unused_at_the_end", 256, {0, 256}, {256, 0}},
    {"many_units", 5 * 16384, {0, 16384 - 128, 3 * 16384}, {16000, 25000, 2 * 16384}},
    {"thousand_tiny", 128000, {}, {}}, /* filled in by Filled() */
};

inline Layout Filled(Layout layout) {
  for (int64_t i = 0; layout.bucket == 128000 && i < 1000; i++) {
    layout.offsets.push_back(128 * i);
    layout.numels.push_back(i % 3 == 0 ? 0 : 1 + i % 128);
  }
  return layout;
}

#endif
