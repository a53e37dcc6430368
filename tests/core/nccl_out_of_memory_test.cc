// Lets each memory request of the communicator's functions fail once: the call has to return TX_ERROR_OUT_OF_MEMORY,
// and a later call has to work as if nothing had happened. tests/package/test_out_of_memory_tables.py reads the table.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "csrc/torch_ext_advanced.h"
#include "tests/core/fake_nccl.h"

#ifndef TX_SANITIZED
#include "tests/core/refuse_memory.h"

namespace {

using refuse_memory::Attempt;

// The library and the communicator of one rank.
struct World {
  FakeNccl fake;
  tx_nccl *library = nullptr;
  tx_nccl_comm *comm = nullptr;
  char id[TX_NCCL_ID_BYTES] = {};

  World() {
    EXPECT_EQ(tx_nccl_open(fake.path.c_str(), &library, nullptr), TX_OK);
    EXPECT_EQ(tx_nccl_unique_id(library, id, nullptr), TX_OK);
    const tx_nccl_comm_args args = Args();
    EXPECT_EQ(tx_nccl_comm_new(&args, &comm, nullptr), TX_OK);
  }
  ~World() {
    tx_nccl_comm_free(comm);
    tx_nccl_close(library);
  }
  tx_nccl_comm_args Args() const {
    tx_nccl_comm_args args = TX_NCCL_COMM_ARGS_INIT;
    args.library = library;
    args.id = id;
    args.n_ranks = 1;
    args.timeout_seconds = 20;
    return args;
  }
};

struct Row {
  const char *function;
  bool allocates;
  tx_status (*run)(World &world, Attempt &attempt);
};

template <typename Call>
tx_status Exchange(World &w, Attempt &a, Call call) {
  uint8_t sent[8] = {1, 2, 3}, got[8] = {};
  const tx_nccl_message message = {sent, got, 8};
  const tx_status status =
      a([&](const tx_parallel *) { return call(w.comm, "bucket 0", 1, &message, nullptr, nullptr); });
  EXPECT_TRUE(w.fake.call<int>("fake_nccl_wait", 1));
  return status;
}

const Row kRows[] = {
    {"tx_nccl_open", true,
     [](World &w, Attempt &a) {
       tx_nccl *library = nullptr;
       const tx_status status =
           a([&](const tx_parallel *) { return tx_nccl_open(w.fake.path.c_str(), &library, nullptr); });
       EXPECT_EQ(library != nullptr, status == TX_OK);
       tx_nccl_close(library);
       return status;
     }},
    {"tx_nccl_comm_new", true,
     [](World &w, Attempt &a) {
       const tx_nccl_comm_args args = w.Args();
       tx_nccl_comm *comm = nullptr;
       const tx_status status = a([&](const tx_parallel *) { return tx_nccl_comm_new(&args, &comm, nullptr); });
       EXPECT_EQ(comm != nullptr, status == TX_OK);
       tx_nccl_comm_free(comm);
       return status;
     }},
    {"tx_nccl_about_this", false,
     [](World &w, Attempt &a) {
       tx_nccl_about about = TX_NCCL_ABOUT_INIT;
       return a([&](const tx_parallel *) { return tx_nccl_about_this(w.library, &about, nullptr); });
     }},
    {"tx_nccl_unique_id", false,
     [](World &w, Attempt &a) {
       char id[TX_NCCL_ID_BYTES];
       return a([&](const tx_parallel *) { return tx_nccl_unique_id(w.library, id, nullptr); });
     }},
    {"tx_nccl_comm_check", false,
     [](World &w, Attempt &a) { return a([&](const tx_parallel *) { return tx_nccl_comm_check(w.comm, nullptr); }); }},
    {"tx_nccl_all_to_all", false, [](World &w, Attempt &a) { return Exchange(w, a, tx_nccl_all_to_all); }},
    {"tx_nccl_all_gather", false, [](World &w, Attempt &a) { return Exchange(w, a, tx_nccl_all_gather); }},
    {"tx_nccl_memory_new", false,
     [](World &w, Attempt &a) {
       tx_nccl_memory memory = TX_NCCL_MEMORY_INIT;
       memory.bytes = 4096;
       const tx_status status = a([&](const tx_parallel *) { return tx_nccl_memory_new(w.comm, &memory, nullptr); });
       if (status == TX_OK) tx_nccl_memory_free(w.comm, &memory);
       return status;
     }},
    {"tx_nccl_digest", false,
     [](World &w, Attempt &a) {
       int64_t count;
       uint64_t digest;
       return a([&](const tx_parallel *) { return tx_nccl_digest(w.comm, &count, &digest, nullptr); });
     }},
    {"tx_nccl_records", false,
     [](World &w, Attempt &a) {
       static tx_nccl_record records[TX_NCCL_RECORDS];
       return a([&](const tx_parallel *) { return tx_nccl_records(w.comm, records, nullptr); });
     }},
    {"tx_nccl_compare", false,
     [](World &w, Attempt &a) {
       static tx_nccl_record records[TX_NCCL_RECORDS];
       EXPECT_EQ(tx_nccl_records(w.comm, records, nullptr), TX_OK);
       return a([&](const tx_parallel *) { return tx_nccl_compare(1, records, nullptr); });
     }},
};

class Calls : public testing::TestWithParam<Row> {};

TEST_P(Calls, FailAndLeaveNothingWhereMemoryIsRefused) {
  World world;
  int64_t failing = 0;
  for (;; failing++) {
    ASSERT_LT(failing, 20);
    Attempt attempt(failing);
    const tx_status status = GetParam().run(world, attempt);
    if (!attempt.failed) {
      EXPECT_EQ(status, TX_OK);
      break;
    }
    EXPECT_EQ(status, TX_ERROR_OUT_OF_MEMORY);
  }
  EXPECT_EQ(failing > 0, GetParam().allocates) << failing;
}
INSTANTIATE_TEST_SUITE_P(OutOfMemory, Calls, testing::ValuesIn(kRows),
                         [](const auto &info) { return std::string(info.param.function); });

}  // namespace

#endif
