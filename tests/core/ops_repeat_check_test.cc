// tx_adamw_args.notes: a call with notes is accepted and rejected, with the same message, as one without.
#include <gtest/gtest.h>

#include <functional>

extern "C" {
#include "csrc/ops/repeat_check.h"
}
#include "tests/core/adamw_call.h"

using adamw_call::Call;
using adamw_call::Combo;
using adamw_call::Param;

namespace {

const Combo kCombos[] = {{TX_BF16, TX_F32, TX_BF16, TX_BF16, TX_BF16},
                         {TX_BF16, TX_I16, TX_F32, TX_U8, TX_U8},
                         {TX_F32, TX_NONE, TX_F32, TX_F32, TX_F32},
                         {TX_F16, TX_F32, TX_F16, TX_F16, TX_BF16}};

typedef std::mt19937 Random;

tx_tensor &Any(std::vector<tx_tensor> &list, Random &random) {
  return list[random() % list.size()];
}

// What differs from one call to the next: each changes a few arguments, to legal or to illegal ones.
typedef void (*Event)(Call &, Random &);
const Event kEvents[] = {
    [](Call &c, Random &r) { std::swap(Any(c.grads, r).data, Any(c.grads, r).data); },
    [](Call &c, Random &r) { Any(c.grads, r).data = Any(c.params, r).data; },
    [](Call &c, Random &r) { Any(c.grads, r).data = static_cast<char *>(Any(c.exp_avgs, r).data) + r() % 900; },
    [](Call &c, Random &r) { Any(c.grads, r).data = static_cast<char *>(Any(c.grads, r).data) - r() % 9; },
    [](Call &c, Random &r) { Any(c.grads, r).dtype = r() % 2 ? TX_BF16 : TX_I64; },
    [](Call &c, Random &r) { Any(c.grads, r).numel -= r() % 2; },
    [](Call &c, Random &r) { Any(c.grads, r).data = nullptr; },
    [](Call &c, Random &r) { std::swap(Any(c.params, r), Any(c.params, r)); },
    [](Call &c, Random &r) { std::swap(Any(c.exp_avgs, r).data, Any(c.exp_avg_sqs, r).data); },
    [](Call &c, Random &r) { Any(c.exp_avgs, r) = Any(c.exp_avgs, r); },
    [](Call &c, Random &r) { Any(c.exp_avg_sqs, r).dtype = TX_F16; },
    [](Call &c, Random &r) { Any(c.masters, r).numel -= r() % 2; },
    [](Call &c, Random &r) { Any(c.masters, r).dtype = TX_F32; },
    [](Call &c, Random &r) { Any(c.scales, r).numel++; },
    [](Call &c, Random &r) { Any(c.steps, r).dtype = r() % 2 ? TX_F32 : TX_I16; },
    [](Call &c, Random &r) { Any(c.params, r).numel = 0; },
    [](Call &c, Random &r) { c.meta[r() % c.meta.size()].group = r() % 2; },
    [](Call &c, Random &r) { c.meta[r() % c.meta.size()].start = r() % 2 ? -1 : 128; },
    [](Call &c, Random &r) { c.group.lr = r() % 2 ? -1 : 1; },
    [](Call &c, Random &r) { c.args.clip_coef = Any(r() % 2 ? c.steps : c.grads, r); },
    [](Call &c, Random &r) {
      c.args.skipped = {Any(c.masters, r).data, 1, r() % 2 ? TX_I64 : TX_F32, 0};
    },
    [](Call &c, Random &) { c.params.resize(c.params.size() > 1 ? c.params.size() - 1 : 1); },
};

TEST(RepeatCheck, NotesChangeNoAnswer) {
  int accepted = 0, repeated = 0;
  for (uint32_t seed = 0; seed < 60; seed++) {
    Random random(seed);
    std::vector<Param> params;
    const size_t n = 1 + random() % 5;
    for (size_t i = 0; i < n; i++)
      params.emplace_back(kCombos[random() % 4], 1 + random() % 700, random() % 2);
    Call legal;
    for (Param &p : params)
      legal.Add(p);
    std::vector<int64_t> notes(random() % 4 ? 1024 : random() % 90);
    Call call = legal;
    for (int round = 0; round < 60; round++) {
      if (random() % 3 == 0) call = legal;
      for (unsigned events = random() % 3; events--;)
        kEvents[random() % (sizeof kEvents / sizeof *kEvents)](call, random);
      tx_error plain = {}, noted = {};
      tx_adamw_args args = *call.Args();
      const tx_status expected = tx_adamw_check(&args, &plain);
      repeated += !notes.empty() && notes[0];
      args.notes = notes.empty() ? nullptr : notes.data();
      args.notes_bytes = static_cast<int64_t>(notes.size() * sizeof(int64_t));
      ASSERT_EQ(tx_adamw_check(&args, &noted), expected) << seed << "/" << round << ": " << plain.message;
      ASSERT_STREQ(noted.message, plain.message);
      accepted += expected == TX_OK;
    }
  }
  EXPECT_GT(accepted, 600);
  EXPECT_LT(accepted, 3000);
  EXPECT_GT(repeated, 1000);
}

TEST(RepeatCheck, NotesWhatIsWrittenWhereThereIsRoom) {
  char memory[64] = {};
  const tx_tensor outs[] = {{memory + 40, 8, TX_U8, 0}, {memory + 32, 8, TX_U8, 0}, {memory, 4, TX_U8, 0}};
  const tx_tensor read = {memory + 8, 8, TX_U8, 0}, across = {memory + 2, 8, TX_U8, 0};
  const auto spans = [&outs](const tx_tensor *in) {
    return std::vector<tx_span>{{"outs", outs, 3, 1}, {"ins", in, 1, 0}, {"absent", nullptr, 3, 1}};
  };
  const int64_t needed = 256 + 24 * 3 + 4 * 2 + 16 * 2; /* two ranges: neighbours are one */
  int64_t room[64] = {};
  for (const int64_t bytes : {int64_t{0}, int64_t{100}, needed - 48, needed}) {
    const tx_notes notes = {room, bytes};
    tx_notes_take(&notes, spans(&read).data(), 3);
    EXPECT_EQ(tx_notes_repeat(&notes, spans(&read).data(), 3), bytes == needed) << bytes;
  }
  const tx_notes notes = {room, needed}, unaligned = {reinterpret_cast<char *>(room) + 1, needed};
  EXPECT_TRUE(tx_notes_reads_are_apart(&notes, spans(&read).data(), 3));
  EXPECT_FALSE(tx_notes_reads_are_apart(&notes, spans(&across).data(), 3));
  EXPECT_FALSE(tx_notes_repeat(&unaligned, spans(&read).data(), 3));
  auto longer = spans(&read);
  longer[0].n = 2;
  EXPECT_FALSE(tx_notes_repeat(&notes, longer.data(), 3)) << "fewer tensors";
  longer = spans(&read);
  longer[2] = {"absent", outs, 0, 1};
  EXPECT_FALSE(tx_notes_repeat(&notes, longer.data(), 3)) << "an absent list is not an empty one";
  for (const int64_t n : {int64_t{-1}, INT64_MIN, INT64_MAX, INT64_MAX / 24, int64_t{INT32_MAX}}) {
    for (const size_t span : {size_t{0}, size_t{1}}) {
      auto absurd = spans(&read);
      absurd[span].n = n; /* which is checked after this */
      EXPECT_FALSE(tx_notes_repeat(&notes, absurd.data(), 3)) << n;
    }
    auto absurd = spans(&read);
    absurd[0].n = absurd[1].n = n;
    const tx_notes endless = {room, INT64_MAX};
    EXPECT_FALSE(tx_notes_repeat(&endless, absurd.data(), 3)) << n;
  }
  tx_notes_drop(&notes);
  EXPECT_FALSE(tx_notes_repeat(&notes, spans(&read).data(), 3));
}

}  // namespace
