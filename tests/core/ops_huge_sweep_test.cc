// A tensor with more than 2^31 elements, with 8-bit moments and remainders; skipped if there is not enough free memory.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

extern "C" {
#include "csrc/ops/parallel.h"
#include "csrc/ops/tensor.h"
}

#include "csrc/math/numeric.h"
#include "csrc/torch_ext.h"

namespace {

constexpr int64_t kHuge = (int64_t{1} << 31) + 3 * 128 + 5;
constexpr int64_t kBytes = kHuge * 8 + kHuge / 64;

int64_t BytesAvailable() {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  int64_t kib = 0;
  while (file >> key >> kib >> unit) {
    if (key == "MemAvailable:") return kib * 1024;
  }
  return 0;
}

// Zeroed memory that is allocated when it is written, in huge pages: millions of small pages would take longer than the
// rest of the test.
struct Zeros {
  void *data;
  size_t bytes;
  explicit Zeros(int64_t n) : data(nullptr), bytes(static_cast<size_t>(n)) {
    void *found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return;
    data = found;
    (void)madvise(data, bytes, MADV_HUGEPAGE); /* on a best-effort basis */
  }
  ~Zeros() {
    if (data) munmap(data, bytes);
  }
  Zeros(const Zeros &) = delete;
  Zeros &operator=(const Zeros &) = delete;
  char *at(int64_t byte) { return static_cast<char *>(data) + byte; }
};

// The tensors of n elements with 8-bit moments and remainders (TX_STATES_8BIT).
struct Streams {
  int64_t n;
  Zeros param, grad, exp_avg, exp_avg_sq, master, scales;
  float step = 0;
  explicit Streams(int64_t n)
      : n(n), param(2 * n), grad(2 * n), exp_avg(n), exp_avg_sq(n), master(2 * n), scales(2 * ((n + 127) / 128)) {}
  bool allocated() const {
    return param.data && grad.data && exp_avg.data && exp_avg_sq.data && master.data && scales.data;
  }
  // Fills the elements [begin, end) of the logical tensor. This object holds its elements [start, start + n).
  void Fill(int64_t start, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      std::minstd_rand random(static_cast<uint32_t>(i % 1000003 + 1));
      for (char *to : {param.at(2 * (i - start)), grad.at(2 * (i - start))}) {
        const uint16_t half = tx_bf16_from_f32(static_cast<float>(random()) * 0x1p-31f - 0.5f);
        std::memcpy(to, &half, 2);
      }
    }
  }
  tx_status Step(int64_t start) {
    const tx_adamw_group group = {1e-2, 0.9, 0.999, 1e-8, 0.1, 0, 1};
    const tx_tensor p = {param.data, n, TX_BF16, 0}, g = {grad.data, n, TX_BF16, 0}, m = {exp_avg.data, n, TX_U8, 0};
    const tx_tensor v = {exp_avg_sq.data, n, TX_U8, 0}, w = {master.data, n, TX_I16, 0};
    const tx_tensor s = {scales.data, 2 * ((n + 127) / 128), TX_U8, 0}, t = {&step, 1, TX_F32, 0};
    const tx_meta meta = {7, start, 0};
    tx_adamw_args args = TX_ADAMW_ARGS_INIT;
    args.n = 1;
    args.params = &p;
    args.grads = &g;
    args.exp_avgs = &m;
    args.exp_avg_sqs = &v;
    args.masters = &w;
    args.scales = &s;
    args.steps = &t;
    args.n_groups = 1;
    args.groups = &group;
    args.meta = &meta;
    return tx_adamw(&args, nullptr, nullptr);
  }
};

// The last elements, beyond 2^31, have to get the same bits as in a shard of their own.
TEST(Huge, ElementsBeyond2To31GetTheBitsOfAShard) {
#ifdef TX_SLOW
  GTEST_SKIP() << "a sanitizer takes more memory and minutes; indices beyond 2^31 were tested by arithmetic alone";
#endif
  const int64_t needed = kBytes + (int64_t{1} << 30);
  if (BytesAvailable() < needed) {
    GTEST_SKIP() << "needs " << (needed >> 30) << " GiB of free memory, and " << (BytesAvailable() >> 30)
                 << " GiB are; indices beyond 2^31 were tested by arithmetic alone";
  }
  const int64_t cut = kHuge - 4096 - 5, from = cut - cut % 128;
  Streams whole(kHuge), shard(kHuge - from);
  ASSERT_TRUE(whole.allocated() && shard.allocated());
  whole.Fill(0, 0, 4096); /* an index that lost its upper bits would read these elements */
  whole.Fill(0, from, kHuge);
  shard.Fill(from, from, kHuge);
  ASSERT_EQ(whole.Step(0), TX_OK);
  ASSERT_EQ(shard.Step(from), TX_OK);
  const auto bytes = [](int64_t n) { return static_cast<size_t>(n); };
  EXPECT_EQ(std::memcmp(whole.param.at(2 * from), shard.param.data, bytes(2 * shard.n)), 0);
  EXPECT_EQ(std::memcmp(whole.master.at(2 * from), shard.master.data, bytes(2 * shard.n)), 0);
  EXPECT_EQ(std::memcmp(whole.exp_avg.at(from), shard.exp_avg.data, bytes(shard.n)), 0);
  EXPECT_EQ(std::memcmp(whole.exp_avg_sq.at(from), shard.exp_avg_sq.data, bytes(shard.n)), 0);
  const int64_t blocks = (shard.n + 127) / 128, all = (kHuge + 127) / 128;
  EXPECT_EQ(std::memcmp(whole.scales.at(from / 128), shard.scales.data, bytes(blocks)), 0);
  EXPECT_EQ(std::memcmp(whole.scales.at(all + from / 128), shard.scales.at(blocks), bytes(blocks)), 0);
  uint8_t code;
  std::memcpy(&code, whole.exp_avg.at(kHuge - 1), 1);
  EXPECT_NE(code, 0);
}

// For the other combinations only the arithmetic is tested: the pieces of a huge tensor cover it once, in order, and a
// piece's pointer is that of its first element.
struct Pieces {
  int64_t next = 0, count = 0;
  bool in_order = true;
};
void Collect(void *ctx, void *, int64_t tensor, int64_t begin, int64_t count) {
  Pieces &p = *static_cast<Pieces *>(ctx);
  p.in_order = p.in_order && tensor == 0 && begin == p.next && begin % TX_BLOCK == 0 && count > 0;
  p.next = begin + count;
  p.count++;
}

TEST(Huge, PiecesCoverTensorsBeyond2To31AndPointWhereTheyBegin) {
  for (const int64_t numel : {kHuge, (int64_t{1} << 33) + 1}) {
    const tx_tensor tensor = {nullptr, numel, TX_F32, 0};
    Pieces pieces;
    const tx_parallel_work work = {1, &tensor, Collect, nullptr, 0, &pieces};
    ASSERT_EQ(tx_parallel_work_run(&work, nullptr, nullptr), TX_OK);
    EXPECT_TRUE(pieces.in_order);
    EXPECT_EQ(pieces.next, numel);
  }
  char *const base = reinterpret_cast<char *>(uintptr_t{1} << 40);
  for (const auto &[dtype, size] : {std::pair<tx_dtype, int64_t>{TX_F32, 4}, {TX_BF16, 2}, {TX_F16, 2}, {TX_U8, 1}}) {
    const tx_tensor tensor = {base, int64_t{1} << 34, dtype, 0};
    for (const int64_t begin : {int64_t{0}, kHuge / 128 * 128, (int64_t{1} << 33) + 128}) {
      EXPECT_EQ(static_cast<char *>(tx_advanced(tensor, begin)) - base, begin * size);
    }
  }
}

}  // namespace
