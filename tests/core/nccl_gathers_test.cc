// All-gathers have an NCCL communicator and a stream of their own. Both communicators are created, checked, aborted and
// destroyed together, and their operations are recorded as one sequence. The tests use the fake NCCL, which logs the
// calls on each communicator.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "csrc/torch_ext_advanced.h"
#include "fake_nccl.h"

namespace {

constexpr int kReductions = 7, kGathers = 8;  // streams

class Gathers : public testing::Test {
 protected:
  Gathers() { EXPECT_EQ(tx_nccl_open(fake.path.c_str(), &library, nullptr), TX_OK); }
  ~Gathers() override { tx_nccl_close(library); }

  // Ids are numbered in the order of creation: the first is for reductions, the second for all-gathers.
  void MakeIds() {
    EXPECT_EQ(tx_nccl_unique_id(library, id, nullptr), TX_OK);
    EXPECT_EQ(tx_nccl_unique_id(library, gather_id, nullptr), TX_OK);
    const int first = std::atoi(id + 3);
    one = std::to_string(first), two = std::to_string(first + 1);
  }
  tx_nccl_comm_args Args(int rank, int n_ranks, int multiprocessors = 132) const {
    tx_nccl_comm_args args = TX_NCCL_COMM_ARGS_INIT;
    args.library = library;
    args.id = id;
    args.gather_id = gather_id;
    args.rank = rank;
    args.n_ranks = n_ranks;
    args.timeout_seconds = 20.0;
    args.multiprocessors = multiprocessors;
    return args;
  }
  tx_nccl_comm *One(tx_error *error) const {
    const tx_nccl_comm_args args = Args(0, 1);
    tx_nccl_comm *comm = nullptr;
    EXPECT_EQ(tx_nccl_comm_new(&args, &comm, error), TX_OK) << error->message;
    return comm;
  }
  // The log of calls so far; @1 and @2 stand for the two communicators.
  std::vector<std::string> Calls() const {
    const char *text = fake.call<const char *>("fake_nccl_calls");
    std::istringstream lines(text);
    std::vector<std::string> found;
    for (std::string kind, number, rest; lines >> kind >> number && std::getline(lines, rest);)
      found.push_back(kind + (number == one ? " @1" : number == two ? " @2" : " ?") + rest);
    std::free(const_cast<char *>(text));
    return found;
  }

  const FakeNccl fake;
  tx_nccl *library = nullptr;
  char id[TX_NCCL_ID_BYTES], gather_id[TX_NCCL_ID_BYTES];
  std::string one, two;
  tx_error error = {};
};

void *stream_of(int number) {
  return reinterpret_cast<void *>(static_cast<uintptr_t>(number));
}

tx_status Send(tx_nccl_comm *comm, bool gathers, const char *bucket, tx_error *error) {
  unsigned char bytes[2] = {1, 2};
  const tx_nccl_message message = {bytes, bytes + 1, 1};
  return gathers ? tx_nccl_all_gather(comm, bucket, 1, &message, stream_of(kGathers), error)
                 : tx_nccl_all_to_all(comm, bucket, 1, &message, stream_of(kReductions), error);
}

using Lines = std::vector<std::string>;

TEST_F(Gathers, HaveACommunicatorAndAStreamAndAreRecordedWithTheOthers) {
  MakeIds();
  tx_nccl_comm *comm = One(&error);
  for (const bool gathers : {false, true, true, false})
    ASSERT_EQ(Send(comm, gathers, "bucket 0", &error), TX_OK) << error.message;
  int64_t count = 0;
  uint64_t digest = 0;
  EXPECT_EQ(tx_nccl_digest(comm, &count, &digest, nullptr), TX_OK);
  EXPECT_EQ(count, 4) << "one sequence";
  EXPECT_EQ(tx_nccl_comm_check(comm, &error), TX_OK) << error.message;
  tx_nccl_comm_free(comm);
  EXPECT_EQ(Calls(),
            (Lines{"init @1 ctas 33", "init @2 ctas 33", "group @1 stream 7", "group @2 stream 8", "group @2 stream 8",
                   "group @1 stream 7", "finalize @1", "finalize @2", "destroy @1", "destroy @2"}));
}

// Each communicator gets a quarter of the device's multiprocessors, so that both fit on the device. If their number is
// unknown, NCCL decides.
TEST_F(Gathers, UseAtMostAQuarterOfTheMultiprocessors) {
  const struct {
    int multiprocessors;
    const char *says;
  } rows[] = {{132, " ctas 33"}, {108, " ctas 27"}, {3, " ctas 1"}, {0, ""}};
  for (const auto &row : rows) {
    fake.call<void>("fake_nccl_reset");
    MakeIds();
    const tx_nccl_comm_args args = Args(0, 1, row.multiprocessors);
    tx_nccl_comm *comm = nullptr;
    ASSERT_EQ(tx_nccl_comm_new(&args, &comm, &error), TX_OK) << error.message;
    EXPECT_EQ(Calls(), (Lines{std::string("init @1") + row.says, std::string("init @2") + row.says}));
    tx_nccl_comm_free(comm);
  }
  fake.call<void>("fake_nccl_reset");
  MakeIds();
  tx_nccl_comm_args alone = Args(0, 1);
  alone.gather_id = nullptr;
  tx_nccl_comm *comm = nullptr;
  ASSERT_EQ(tx_nccl_comm_new(&alone, &comm, &error), TX_OK) << error.message;
  ASSERT_EQ(Send(comm, true, "bucket 0", &error), TX_OK) << error.message;
  tx_nccl_comm_free(comm);
  EXPECT_EQ(Calls(), (Lines{"init @1", "group @1 stream 8", "finalize @1", "destroy @1"})) << "one for all";
}

TEST_F(Gathers, PartsComeToEveryRankByBoth) {
  MakeIds();
  constexpr int kRanks = 3;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; rank++)
    threads.emplace_back([&, rank] {
      tx_error mine = {};
      const tx_nccl_comm_args args = Args(rank, kRanks);
      tx_nccl_comm *comm = nullptr;
      ASSERT_EQ(tx_nccl_comm_new(&args, &comm, &mine), TX_OK) << mine.message;
      unsigned char sent[kRanks], got[kRanks] = {}, whole[kRanks] = {};
      for (int peer = 0; peer < kRanks; peer++)
        sent[peer] = static_cast<unsigned char>(10 * rank + peer);
      whole[rank] = static_cast<unsigned char>(100 + rank);
      const tx_nccl_message parts = {sent, got, 1}, gathered = {whole + rank, whole, 1};
      // On one rank's device the all-gather may start first, on another's the reduction: neither waits for the other.
      ASSERT_EQ(tx_nccl_all_to_all(comm, "bucket 0", 1, &parts, stream_of(kReductions), &mine), TX_OK) << mine.message;
      ASSERT_EQ(tx_nccl_all_gather(comm, "bucket 9", 1, &gathered, stream_of(kGathers), &mine), TX_OK) << mine.message;
      ASSERT_TRUE(fake.call<int>("fake_nccl_wait_all", 1));
      for (int peer = 0; peer < kRanks; peer++) {
        EXPECT_EQ(got[peer], 10 * peer + rank);
        EXPECT_EQ(whole[peer], 100 + peer);
      }
      tx_nccl_comm_free(comm);
    });
  for (std::thread &thread : threads)
    thread.join();
  EXPECT_EQ(fake.counts().destroys, 2 * kRanks);
  EXPECT_EQ(fake.counts().aborts, 0);
}

TEST_F(Gathers, WhoseCommunicatorIsRefusedTakeTheFirstWithThem) {
  MakeIds();
  fake.call<void>("fake_nccl_init_error", 2);
  fake.call<void>("fake_nccl_errors_of", std::stoi(two));
  const tx_nccl_comm_args args = Args(0, 1);
  tx_nccl_comm *comm = reinterpret_cast<tx_nccl_comm *>(&comm);
  EXPECT_EQ(tx_nccl_comm_new(&args, &comm, &error), TX_ERROR_UNAVAILABLE);
  EXPECT_EQ(comm, nullptr);
  EXPECT_NE(std::strstr(error.message, "making the gathers' communicator on rank 0 of 1: NCCL says: unhandled system"),
            nullptr)
      << error.message;
  EXPECT_EQ(Calls(), (Lines{"init @1 ctas 33", "abort @1"})) << "nothing is left";
}

TEST_F(Gathers, WhoseCommunicatorNeverComesAreATimeoutAndAnAbortOfBoth) {
  MakeIds();
  // The other rank has created the communicator for reductions, and dies before it creates the second one.
  tx_nccl_comm_args args = Args(1, 2), other = Args(0, 2);
  args.timeout_seconds = 0.2;
  other.gather_id = nullptr;
  std::thread dies([&] {
    tx_nccl_comm *comm = nullptr;
    tx_error theirs = {};
    EXPECT_EQ(tx_nccl_comm_new(&other, &comm, &theirs), TX_OK) << theirs.message;
    tx_nccl_comm_abort(comm, "dies");
    tx_nccl_comm_free(comm);
  });
  tx_nccl_comm *comm = nullptr;
  EXPECT_EQ(tx_nccl_comm_new(&args, &comm, &error), TX_ERROR_UNAVAILABLE);
  dies.join();
  EXPECT_NE(std::strstr(error.message, "making the gathers' communicator on rank 1 of 2: not done after 0.2 s"),
            nullptr)
      << error.message;
  const Lines calls = Calls();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "abort @1 grouped"), 1);
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "abort @2 grouped"), 1);
}

// An abort waits for kernels on the device, possibly those of the other communicator. So both are aborted in one group,
// whichever failed.
TEST_F(Gathers, AreAbortedWithTheOthersInOneGroup) {
  for (int failing = 0; failing < 3; failing++) {
    fake.call<void>("fake_nccl_reset");
    MakeIds();
    tx_nccl_comm *comm = One(&error);
    const char *why = "remote error";
    if (failing < 2) {
      fake.call<void>("fake_nccl_errors_of", std::stoi(failing ? two : one));
      fake.call<void>("fake_nccl_async_error", 6);
      EXPECT_EQ(tx_nccl_comm_check(comm, &error), TX_ERROR_UNAVAILABLE);
    } else {
      tx_nccl_comm_abort(comm, why = "bucket 3 hangs");
      tx_nccl_comm_abort(comm, "twice");
    }
    for (const bool gathers : {false, true}) {
      EXPECT_EQ(Send(comm, gathers, "bucket 1", &error), TX_ERROR_BAD_STATE);
      EXPECT_NE(std::strstr(error.message, why), nullptr) << error.message;
    }
    EXPECT_EQ(tx_nccl_comm_check(comm, nullptr), TX_ERROR_BAD_STATE);
    tx_nccl_comm_free(comm);
    EXPECT_EQ(Calls(), (Lines{"init @1 ctas 33", "init @2 ctas 33", "abort @1 grouped", "abort @2 grouped"}));
  }
}

TEST_F(Gathers, ReadAndWriteWindowsToo) {
  MakeIds();
  tx_nccl_comm *comm = One(&error);
  tx_nccl_memory memory = TX_NCCL_MEMORY_INIT;
  memory.bytes = 5000;
  ASSERT_EQ(tx_nccl_memory_new(comm, &memory, &error), TX_OK) << error.message;
  EXPECT_NE(memory.window, nullptr);
  EXPECT_NE(memory.gather_window, nullptr);
  EXPECT_EQ(fake.counts().windows, 2);
  tx_nccl_memory_free(comm, &memory);
  EXPECT_EQ(memory.gather_window, nullptr);
  EXPECT_EQ(fake.counts().windows, 0);
  EXPECT_EQ(fake.counts().memories, 0);
  const Lines calls = Calls();
  EXPECT_EQ((Lines{calls.begin() + 2, calls.end()}), (Lines{"window @1", "window @2"}));
  tx_nccl_comm_free(comm);
}

// If the ranks issue a reduction and an all-gather in different orders, a device without space for both would deadlock.
// The records name the first difference.
TEST_F(Gathers, InAnotherOrderAreToldByTheirRecords) {
  std::vector<tx_nccl_record> records(2 * TX_NCCL_RECORDS);
  uint64_t digests[2];
  for (int rank = 0; rank < 2; rank++) {
    MakeIds();
    tx_nccl_comm *comm = One(&error);
    ASSERT_EQ(Send(comm, false, "bucket 0", &error), TX_OK);
    ASSERT_EQ(Send(comm, rank == 1, rank == 1 ? "weights of bucket 0" : "bucket 1", &error), TX_OK);
    ASSERT_EQ(Send(comm, rank == 0, rank == 0 ? "weights of bucket 0" : "bucket 1", &error), TX_OK);
    int64_t count = 0;
    EXPECT_EQ(tx_nccl_digest(comm, &count, &digests[rank], nullptr), TX_OK);
    EXPECT_EQ(tx_nccl_records(comm, &records[static_cast<size_t>(rank) * TX_NCCL_RECORDS], nullptr), TX_OK);
    tx_nccl_comm_free(comm);
  }
  EXPECT_NE(digests[0], digests[1]);
  EXPECT_EQ(tx_nccl_compare(2, records.data(), &error), TX_ERROR_MISMATCH);
  EXPECT_NE(std::strstr(error.message, "operation 2 is all-gather of weights of bucket 0"), nullptr) << error.message;
}

}  // namespace
