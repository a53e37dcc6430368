// The code around NCCL, tested with the fake NCCL (fake_nccl.h). Ranks are threads.
#include <atomic>
#include <chrono>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "csrc/torch_ext_advanced.h"
#include "fake_nccl.h"

namespace {

std::atomic<int> sleeps;

}  // namespace

// Replaces the C library's nanosleep: counts the calls, and sleeps.
extern "C" int nanosleep(const timespec *wanted, timespec *left) {
  sleeps++;
  return clock_nanosleep(CLOCK_MONOTONIC, 0, wanted, left);
}

namespace {

struct Library {
  explicit Library(const FakeNccl &fake) {
    tx_error error = {};
    EXPECT_EQ(tx_nccl_open(fake.path.c_str(), &library, &error), TX_OK) << error.message;
  }
  ~Library() { tx_nccl_close(library); }
  tx_nccl *library = nullptr;
};

tx_nccl_comm_args arguments(const tx_nccl *library, const char *id, int rank, int n_ranks, double timeout = 20.0) {
  tx_nccl_comm_args args = TX_NCCL_COMM_ARGS_INIT;
  args.library = library;
  args.id = id;
  args.rank = rank;
  args.n_ranks = n_ranks;
  args.timeout_seconds = timeout;
  return args;
}

// Runs body(comm, rank) on n threads, each with a communicator that is freed afterwards.
void as_ranks(const tx_nccl *library, int n, const std::function<void(tx_nccl_comm *, int)> &body) {
  char id[TX_NCCL_ID_BYTES];
  ASSERT_EQ(tx_nccl_unique_id(library, id, nullptr), TX_OK);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; rank++)
    threads.emplace_back([&, rank] {
      const tx_nccl_comm_args args = arguments(library, id, rank, n);
      tx_nccl_comm *comm = nullptr;
      tx_error error = {};
      ASSERT_EQ(tx_nccl_comm_new(&args, &comm, &error), TX_OK) << error.message;
      body(comm, rank);
      tx_nccl_comm_free(comm);
    });
  for (std::thread &thread : threads)
    thread.join();
}

bool has(const tx_error &error, const std::string &text) {
  return std::strstr(error.message, text.c_str()) != nullptr;
}

class EveryVersion : public testing::TestWithParam<const char *> {};
INSTANTIATE_TEST_SUITE_P(Nccl, EveryVersion, testing::Values("fake_nccl.so", "fake_nccl_plain.so"),
                         [](const auto &info) { return std::string(info.index ? "plain" : "newest"); });

TEST_P(EveryVersion, PartsComeToTheirRanksAndSumsToAll) {
  const FakeNccl fake(GetParam());
  const Library library(fake);
  constexpr int kRanks = 3, kBytes = 5;
  as_ranks(library.library, kRanks, [&](tx_nccl_comm *comm, int rank) {
    std::vector<unsigned char> sent(kRanks * kBytes), got(kRanks * kBytes, 0xff), scales(kRanks, 0), got_scales(kRanks);
    for (int peer = 0; peer < kRanks; peer++) {
      scales[static_cast<size_t>(peer)] = static_cast<unsigned char>(100 + 10 * rank + peer);
      for (int i = 0; i < kBytes; i++)
        sent[static_cast<size_t>(peer * kBytes + i)] = static_cast<unsigned char>(50 * rank + 10 * peer + i);
    }
    const tx_nccl_message messages[] = {
        {sent.data(), got.data(), kBytes}, {scales.data(), got_scales.data(), 1}, {nullptr, nullptr, 0}};
    tx_error error = {};
    ASSERT_EQ(tx_nccl_all_to_all(comm, "bucket 0", 3, messages, nullptr, &error), TX_OK) << error.message;
    ASSERT_TRUE(fake.call<int>("fake_nccl_wait", 1));
    for (int peer = 0; peer < kRanks; peer++) {
      EXPECT_EQ(got_scales[static_cast<size_t>(peer)], 100 + 10 * peer + rank);
      for (int i = 0; i < kBytes; i++)
        EXPECT_EQ(got[static_cast<size_t>(peer * kBytes + i)], 50 * peer + 10 * rank + i);
    }
    std::vector<unsigned char> whole(kRanks * kBytes);
    unsigned char *own = whole.data() + rank * kBytes;
    std::memset(own, 7 + rank, kBytes);
    const tx_nccl_message gathered = {own, whole.data(), kBytes};  // in place
    ASSERT_EQ(tx_nccl_all_gather(comm, "bucket 0", 1, &gathered, nullptr, &error), TX_OK) << error.message;
    ASSERT_TRUE(fake.call<int>("fake_nccl_wait", 2));
    for (int i = 0; i < kRanks * kBytes; i++)
      EXPECT_EQ(whole[static_cast<size_t>(i)], 7 + i / kBytes);
    EXPECT_EQ(tx_nccl_comm_check(comm, &error), TX_OK) << error.message;
  });
  EXPECT_EQ(fake.counts().destroys, kRanks);
  EXPECT_EQ(fake.counts().finalizes, kRanks);
  EXPECT_EQ(fake.counts().aborts, 0);
  EXPECT_EQ(fake.counts().groups, 2 * kRanks) << "one group for all messages of a bucket";
}

// In a non-blocking communicator, operations of a group may return ncclInProgress; they were accepted.
TEST_P(EveryVersion, WhatIsInProgressInsideAGroupWasTaken) {
  const FakeNccl fake(GetParam());
  const Library library(fake);
  constexpr int kRanks = 3, kMessages = 4;
  fake.call<void>("fake_nccl_issue_result", 7);
  as_ranks(library.library, kRanks, [&](tx_nccl_comm *comm, int rank) {
    std::vector<unsigned char> sent(kMessages * kRanks), got(kMessages * kRanks, 0xff), whole(kMessages * kRanks, 0xff);
    std::vector<tx_nccl_message> parts, wholes;
    for (int m = 0; m < kMessages; m++) {
      for (int peer = 0; peer < kRanks; peer++)
        sent[static_cast<size_t>(m * kRanks + peer)] = static_cast<unsigned char>(50 * m + 10 * rank + peer);
      whole[static_cast<size_t>(m * kRanks + rank)] = static_cast<unsigned char>(50 * m + rank);
      parts.push_back({&sent[static_cast<size_t>(m * kRanks)], &got[static_cast<size_t>(m * kRanks)], 1});
      unsigned char *gathered = &whole[static_cast<size_t>(m * kRanks)];
      wholes.push_back({gathered + rank, gathered, 1});
    }
    tx_error error = {};
    ASSERT_EQ(tx_nccl_all_to_all(comm, "bucket 0", kMessages, parts.data(), nullptr, &error), TX_OK) << error.message;
    ASSERT_EQ(tx_nccl_all_gather(comm, "bucket 0", kMessages, wholes.data(), nullptr, &error), TX_OK) << error.message;
    ASSERT_TRUE(fake.call<int>("fake_nccl_wait", 2));
    for (int m = 0; m < kMessages; m++)
      for (int peer = 0; peer < kRanks; peer++) {
        EXPECT_EQ(got[static_cast<size_t>(m * kRanks + peer)], 50 * m + 10 * peer + rank) << "message " << m;
        EXPECT_EQ(whole[static_cast<size_t>(m * kRanks + peer)], 50 * m + peer) << "message " << m;
      }
  });
  EXPECT_EQ(fake.counts().aborts, 0);
}

// The error of the first operation that fails is reported; results of earlier operations do not hide it.
TEST_P(EveryVersion, AnOperationThatIsRefusedInsideAGroupIsTold) {
  const FakeNccl fake(GetParam());
  const Library library(fake);
  fake.call<void>("fake_nccl_issue_result", 6);
  as_ranks(library.library, 1, [&](tx_nccl_comm *comm, int) {
    char byte = 0, to = 0;
    const tx_nccl_message messages[] = {{&byte, &to, 1}, {&byte, &to, 1}};
    tx_error error = {};
    EXPECT_EQ(tx_nccl_all_to_all(comm, "bucket 5", 2, messages, nullptr, &error), TX_ERROR_UNAVAILABLE);
    EXPECT_TRUE(has(error, "all-to-all of bucket 5") && has(error, "remote error")) << error.message;
  });
  EXPECT_EQ(fake.counts().aborts, 1);
}

// An answer that arrives within a few microseconds must not cost a sleep, since the shortest sleep takes about 50
// microseconds. The test counts sleeps instead of measuring time, because on a busy machine everything may take long.
TEST_P(EveryVersion, AnAnswerThatComesAtOnceIsNotSleptOver) {
  const FakeNccl fake(GetParam());
  const Library library(fake);
  char id[TX_NCCL_ID_BYTES];
  ASSERT_EQ(tx_nccl_unique_id(library.library, id, nullptr), TX_OK);
  const tx_nccl_comm_args args = arguments(library.library, id, 0, 1);
  tx_nccl_comm *comm = nullptr;
  fake.call<void>("fake_nccl_slow_init", 16);
  sleeps = 0;
  ASSERT_EQ(tx_nccl_comm_new(&args, &comm, nullptr), TX_OK);
  EXPECT_EQ(sleeps, 0);
  tx_nccl_comm_free(comm);
}

// A long wait sleeps. Here rank 0 waits for rank 1, which joins only after a sleep was seen.
TEST_P(EveryVersion, ARankThatIsLateIsSleptFor) {
  const FakeNccl fake(GetParam());
  const Library library(fake);
  char id[TX_NCCL_ID_BYTES];
  ASSERT_EQ(tx_nccl_unique_id(library.library, id, nullptr), TX_OK);
  sleeps = 0;
  const auto come = [&](int rank) {
    const tx_nccl_comm_args args = arguments(library.library, id, rank, 2);
    tx_nccl_comm *comm = nullptr;
    EXPECT_EQ(tx_nccl_comm_new(&args, &comm, nullptr), TX_OK);
    tx_nccl_comm_free(comm);
  };
  std::thread early(come, 0);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(15);
  while (sleeps == 0 && std::chrono::steady_clock::now() < end)
    std::this_thread::yield();
  EXPECT_GT(sleeps, 0);
  come(1);
  early.join();
}

TEST_P(EveryVersion, MemoryBecomesAWindowWhereThereAreWindows) {
  const FakeNccl fake(GetParam());
  const Library library(fake);
  tx_nccl_about about = TX_NCCL_ABOUT_INIT;
  ASSERT_EQ(tx_nccl_about_this(library.library, &about, nullptr), TX_OK);
  EXPECT_EQ(about.windows, about.version >= 22700);
  EXPECT_STREQ(about.path, fake.path.c_str());
  as_ranks(library.library, 2, [&](tx_nccl_comm *comm, int) {
    tx_nccl_memory memory = TX_NCCL_MEMORY_INIT;
    memory.bytes = 5000;
    tx_error error = {};
    ASSERT_EQ(tx_nccl_memory_new(comm, &memory, &error), TX_OK) << error.message;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data) % 4096, 0u);
    EXPECT_EQ(memory.window != nullptr, about.windows == 1);
    tx_nccl_memory_free(comm, &memory);
    EXPECT_EQ(memory.data, nullptr);
    tx_nccl_memory_free(comm, &memory);  // nothing to free
  });
  EXPECT_EQ(fake.counts().windows, 0);
  EXPECT_EQ(fake.counts().memories, 0);
}

TEST(NcclProtocol, ARankThatInitialisesSlowlyIsWaitedFor) {
  const FakeNccl fake;
  fake.call<void>("fake_nccl_slow_init", 5);
  const Library library(fake);
  as_ranks(library.library, 2, [](tx_nccl_comm *, int) {});
  EXPECT_EQ(fake.counts().destroys, 2);
  EXPECT_EQ(fake.counts().aborts, 0);
}

TEST(NcclProtocol, ARankThatNeverComesIsATimeoutAndOneAbort) {
  const FakeNccl fake;
  const Library library(fake);
  char id[TX_NCCL_ID_BYTES];
  ASSERT_EQ(tx_nccl_unique_id(library.library, id, nullptr), TX_OK);
  const tx_nccl_comm_args args = arguments(library.library, id, 1, 2, 0.05);
  tx_nccl_comm *comm = reinterpret_cast<tx_nccl_comm *>(&comm);
  tx_error error = {};
  EXPECT_EQ(tx_nccl_comm_new(&args, &comm, &error), TX_ERROR_UNAVAILABLE);
  EXPECT_EQ(comm, nullptr);
  EXPECT_TRUE(has(error, "making a communicator on rank 1 of 2: not done after 0.05 s")) << error.message;
  EXPECT_EQ(fake.counts().aborts, 1);
  EXPECT_EQ(fake.counts().destroys, 0);
}

TEST(NcclProtocol, AnErrorOfInitialisationIsRepeatedInItsWords) {
  const FakeNccl fake;
  fake.call<void>("fake_nccl_init_error", 2);
  const Library library(fake);
  const char id[TX_NCCL_ID_BYTES] = {};
  const tx_nccl_comm_args args = arguments(library.library, id, 0, 1);
  tx_nccl_comm *comm = nullptr;
  tx_error error = {};
  EXPECT_EQ(tx_nccl_comm_new(&args, &comm, &error), TX_ERROR_UNAVAILABLE);
  EXPECT_TRUE(has(error, "unhandled system error (the fake's last words)")) << error.message;
  EXPECT_EQ(fake.counts().aborts, 0) << "there was nothing to abort yet";
}

void is_dead(tx_nccl_comm *comm, const std::string &why) {
  unsigned char bytes[4] = {};
  const tx_nccl_message message = {bytes, bytes + 2, 2};
  tx_nccl_memory memory = TX_NCCL_MEMORY_INIT;
  memory.bytes = 8;
  tx_error error = {};
  EXPECT_EQ(tx_nccl_all_gather(comm, "bucket 1", 1, &message, nullptr, &error), TX_ERROR_BAD_STATE);
  EXPECT_TRUE(has(error, "all-gather of bucket 1")) << error.message;
  EXPECT_TRUE(has(error, why)) << error.message;
  EXPECT_EQ(tx_nccl_comm_check(comm, nullptr), TX_ERROR_BAD_STATE);
  EXPECT_EQ(tx_nccl_memory_new(comm, &memory, nullptr), TX_ERROR_BAD_STATE);
}

TEST(NcclProtocol, AnAsynchronousErrorAbortsOnceAndIsRepeated) {
  const FakeNccl fake;
  const Library library(fake);
  as_ranks(library.library, 1, [&](tx_nccl_comm *comm, int) {
    unsigned char bytes[2] = {1, 2};
    const tx_nccl_message message = {bytes, bytes + 1, 1};
    ASSERT_EQ(tx_nccl_all_to_all(comm, "bucket 0", 1, &message, nullptr, nullptr), TX_OK);
    fake.call<void>("fake_nccl_async_error", 6);
    tx_error error = {};
    EXPECT_EQ(tx_nccl_comm_check(comm, &error), TX_ERROR_UNAVAILABLE);
    EXPECT_TRUE(has(error, "remote error")) << error.message;
    is_dead(comm, "remote error");
  });
  EXPECT_EQ(fake.counts().aborts, 1);
  EXPECT_EQ(fake.counts().destroys, 0);
}

TEST(NcclProtocol, AnErrorWhereAnOperationIsIssuedNamesTheBucket) {
  const FakeNccl fake;
  const Library library(fake);
  as_ranks(library.library, 1, [&](tx_nccl_comm *comm, int) {
    fake.call<void>("fake_nccl_group_result", 2);
    unsigned char bytes[2] = {};
    const tx_nccl_message message = {bytes, bytes + 1, 1};
    tx_error error = {};
    EXPECT_EQ(tx_nccl_all_to_all(comm, "bucket 7 ('w')", 1, &message, nullptr, &error), TX_ERROR_UNAVAILABLE);
    EXPECT_TRUE(has(error, "all-to-all of bucket 7 ('w') (operation 1) on rank 0 of 1")) << error.message;
    is_dead(comm, "bucket 7");
  });
  EXPECT_EQ(fake.counts().aborts, 1);
}

TEST(NcclProtocol, WhatNcclHasNotIssuedYetIsWaitedFor) {
  const FakeNccl fake;
  const Library library(fake);
  as_ranks(library.library, 2, [&](tx_nccl_comm *comm, int) {
    fake.call<void>("fake_nccl_group_result", 7);  // in progress
    unsigned char bytes[4] = {};
    const tx_nccl_message message = {bytes, bytes + 2, 1};
    tx_error error = {};
    EXPECT_EQ(tx_nccl_all_to_all(comm, "bucket 0", 1, &message, nullptr, &error), TX_OK) << error.message;
    ASSERT_TRUE(fake.call<int>("fake_nccl_wait", 1));
  });
}

TEST(NcclProtocol, AWatchdogAbortsFromAnotherThreadOnce) {
  const FakeNccl fake;
  const Library library(fake);
  as_ranks(library.library, 1, [&](tx_nccl_comm *comm, int) {
    std::thread busy([&] {
      while (tx_nccl_comm_check(comm, nullptr) == TX_OK)
        std::this_thread::yield();
    });
    std::vector<std::thread> dogs;
    for (int i = 0; i < 4; i++)
      dogs.emplace_back([&] { tx_nccl_comm_abort(comm, "bucket 3 hangs for 600 s"); });
    for (std::thread &dog : dogs)
      dog.join();
    busy.join();
    is_dead(comm, "bucket 3 hangs for 600 s");
  });
  EXPECT_EQ(fake.counts().aborts, 1);
  EXPECT_EQ(fake.counts().destroys, 0);
}

// The operations that one rank issues: {name, bytes}.
using Program = std::vector<std::pair<std::string, int64_t>>;

tx_status compared(const std::vector<Program> &programs, tx_error *error, bool *same_digest) {
  const FakeNccl fake;
  const Library library(fake);
  std::vector<tx_nccl_record> records;
  std::vector<uint64_t> digests;
  for (const Program &program : programs) {
    char id[TX_NCCL_ID_BYTES];
    EXPECT_EQ(tx_nccl_unique_id(library.library, id, nullptr), TX_OK);
    const tx_nccl_comm_args args = arguments(library.library, id, 0, 1);
    tx_nccl_comm *comm = nullptr;
    EXPECT_EQ(tx_nccl_comm_new(&args, &comm, nullptr), TX_OK);
    std::vector<char> from(1000), to(1000);
    for (const auto &[name, bytes] : program) {
      const tx_nccl_message message = {from.data(), to.data(), bytes};
      EXPECT_EQ(tx_nccl_all_to_all(comm, name.c_str(), 1, &message, nullptr, nullptr), TX_OK);
    }
    records.resize(records.size() + TX_NCCL_RECORDS);
    EXPECT_EQ(tx_nccl_records(comm, records.data() + records.size() - TX_NCCL_RECORDS, nullptr), TX_OK);
    int64_t count = 0;
    uint64_t digest = 0;
    EXPECT_EQ(tx_nccl_digest(comm, &count, &digest, nullptr), TX_OK);
    EXPECT_EQ(count, static_cast<int64_t>(program.size()));
    digests.push_back(digest);
    tx_nccl_comm_free(comm);
  }
  *same_digest = true;
  for (const uint64_t digest : digests)
    *same_digest &= digest == digests[0];
  return tx_nccl_compare(static_cast<int64_t>(programs.size()), records.data(), error);
}

Program steps(int n) {
  Program program;
  for (int i = 0; i < n; i++)
    program.emplace_back("bucket " + std::to_string(i % 3), 100 + i % 3);
  return program;
}

TEST(NcclRecords, EqualProgramsHaveOneDigest) {
  for (const int n : {0, 1, TX_NCCL_RECORDS, TX_NCCL_RECORDS + 5, 500}) {
    bool same = false;
    tx_error error = {};
    EXPECT_EQ(compared({steps(n), steps(n), steps(n)}, &error, &same), TX_OK) << n << error.message;
    EXPECT_TRUE(same) << n;
  }
}

TEST(NcclRecords, TheFirstDifferenceIsNamedWithBothHashes) {
  struct Case {
    const char *what;
    std::function<void(Program &)> change;
    std::vector<const char *> says;
  };
  const std::vector<Case> cases = {
      {"another size", [](Program &p) { p[17].second++; }, {"operation 18 is all-to-all of bucket 2 (hash ", "rank 2"}},
      {"another order",
       [](Program &p) { std::swap(p[4], p[5]); },
       {"operation 5 is all-to-all of bucket 2 (hash ", "on rank 2 and all-to-all of bucket 1 (hash "}},
      {"less", [](Program &p) { p.pop_back(); }, {"operation 20 is nothing on rank 2 and all-to-all of bucket 1"}},
      {"more", [](Program &p) { p.emplace_back("another", 1); }, {"operation 21 is all-to-all of another (hash "}},
  };
  for (const Case &each : cases) {
    Program changed = steps(20);
    each.change(changed);
    bool same = true;
    tx_error error = {};
    EXPECT_EQ(compared({steps(20), steps(20), changed}, &error, &same), TX_ERROR_MISMATCH) << each.what;
    EXPECT_FALSE(same) << each.what;
    for (const char *says : each.says)
      EXPECT_TRUE(has(error, says)) << each.what << ": " << error.message;
  }
}

TEST(NcclErrors, ArgumentsAreCheckedBeforeNcclIsCalled) {
  const FakeNccl fake;
  const Library library(fake);
  const char id[TX_NCCL_ID_BYTES] = {};
  tx_nccl_comm *comm = nullptr;
  tx_error error = {};
  for (const tx_nccl_comm_args &args :
       {arguments(nullptr, id, 0, 1), arguments(library.library, nullptr, 0, 1), arguments(library.library, id, 1, 1),
        arguments(library.library, id, -1, 1), arguments(library.library, id, 0, 0),
        arguments(library.library, id, 0, 1, 0.0)})
    EXPECT_EQ(tx_nccl_comm_new(&args, &comm, &error), TX_ERROR_INVALID_ARGUMENT) << error.message;
  as_ranks(library.library, 1, [&](tx_nccl_comm *one, int) {
    char bytes[2];
    for (const tx_nccl_message &message : {tx_nccl_message{bytes, bytes + 1, -1}, tx_nccl_message{nullptr, bytes, 1},
                                           tx_nccl_message{bytes, nullptr, 1}})
      EXPECT_EQ(tx_nccl_all_to_all(one, "b", 1, &message, nullptr, &error), TX_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(has(error, "all-to-all of b: message 0 has 1 bytes, or NULL for memory")) << error.message;
    int64_t count = -1;
    uint64_t digest = 1;
    EXPECT_EQ(tx_nccl_digest(one, &count, &digest, nullptr), TX_OK);
    EXPECT_EQ(count, 0) << "what is refused is not noted";
  });
}

// Records come from other ranks, so their operation numbers may have any value.
TEST(Records, OfTheLargestNumberAreCompared) {
  std::vector<tx_nccl_record> records(2 * TX_NCCL_RECORDS);
  tx_nccl_record *const theirs = &records[TX_NCCL_RECORDS + (INT64_MAX - 1) % TX_NCCL_RECORDS];
  theirs->operation = INT64_MAX;
  tx_error error = {};
  EXPECT_EQ(tx_nccl_compare(2, records.data(), &error), TX_ERROR_MISMATCH);
  EXPECT_TRUE(has(error, "operation 9223372036854775807")) << error.message;
}

}  // namespace
