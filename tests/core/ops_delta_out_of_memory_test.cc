// Lets each memory request of the delta functions fail once: the call has to return TX_ERROR_OUT_OF_MEMORY and change
// no byte. tests/package/test_out_of_memory_tables.py reads the table.
#include "tests/core/delta_trainer.h"

#ifndef TX_SANITIZED
#include "tests/core/refuse_memory.h"

namespace {

using refuse_memory::Attempt;

const std::vector<Param> kModel = {{"a", 140000, TX_BF16}, {"b", 2000, TX_F32}};

// A trainer that has published two deltas and a whole message, and an engine at version 0.
struct World {
  Trainer trainer{kModel, 1, 67, true};
  Engine engine{trainer};
  std::vector<Bytes> versions, whole;
  tx_delta_message message = {};
  tx_delta_receiver *receiver = nullptr;

  World() {
    for (const float lr : {1e-5f, 1.0f}) {  // the second delta is large enough to be dense
      trainer.Step(lr);
      versions.push_back(trainer.Encode()[0]);
    }
    whole = trainer.Encode(TX_DELTA_WHOLE);
  }
  World(const World &) = delete;
  World &operator=(const World &) = delete;
  ~World() {
    tx_delta_free(&message);
    tx_delta_close(receiver);
  }

  // Everything that a call may change.
  std::vector<Bytes> State() {
    std::vector<Bytes> all = engine.weights;
    const auto add = [&](const void *data, size_t bytes) {
      const auto *from = static_cast<const uint8_t *>(data);
      all.emplace_back(from, from + bytes);
    };
    for (const Shard &s : trainer.shards()[0]) {
      all.push_back(s.weights);
      all.push_back(s.changed);
      all.push_back(s.distances);
      add(s.moved.data(), 2 * s.moved.size());
      add(s.checksums.data(), 8 * s.checksums.size());
    }
    uint64_t id[2];
    tx_delta_chain_id(engine.receiver, id);
    const int64_t version = tx_delta_version(engine.receiver);
    add(id, sizeof id);
    add(&version, sizeof version);
    add(&trainer.chain(0), sizeof(tx_delta_chain));
    add(&message, sizeof message);
    add(&receiver, sizeof(void *));
    return all;
  }
};

void Small(World &w) {
  w.trainer.shards()[0][0].Step(1e-5f, &w.trainer.gen());
}
void Large(World &w) {
  w.trainer.shards()[0][0].Step(1.0f, &w.trainer.gen());
}
void Nothing(World &) {}

struct Row {
  const char *name;
  const char *function;
  bool allocates;
  void (*before)(World &world);
  tx_status (*run)(World &world, Attempt &attempt);
};

tx_status Encode(World &w, Attempt &a, tx_delta_kind kind) {
  const std::vector<tx_delta_param> table = Table(kModel);
  const std::vector<tx_delta_run> runs = w.trainer.Runs(0);
  tx_delta_encode_args args = TX_DELTA_ENCODE_ARGS_INIT;
  args.n_params = 2;
  args.params = table.data();
  args.n_runs = 2;
  args.runs = runs.data();
  args.kind = kind;
  args.steps = 1;
  return a([&](const tx_parallel *parallel) {
    return tx_delta_encode(&args, &w.trainer.chain(0), parallel, &w.message, nullptr);
  });
}

tx_status Apply(World &w, Attempt &a, const std::vector<Bytes> &messages, tx_delta_verify verify) {
  std::vector<tx_tensor> tensors;
  for (const Bytes &m : messages)
    tensors.push_back(AsTensor(m));
  const auto n = static_cast<int64_t>(tensors.size());
  return a([&](const tx_parallel *parallel) {
    return tx_delta_apply(w.engine.receiver, n, tensors.data(), verify, parallel, nullptr);
  });
}

const Row kRows[] = {
    {"chain", "tx_delta_chain_begin", false, Nothing,
     [](World &, Attempt &a) {
       const std::vector<tx_delta_param> table = Table(kModel);
       const uint64_t id[] = {1, 2};
       tx_delta_chain chain = TX_DELTA_CHAIN_INIT;
       return a([&](const tx_parallel *) { return tx_delta_chain_begin(2, table.data(), id, 0, 1, &chain, nullptr); });
     }},
    {"renew", "tx_delta_renew", true, Small,
     [](World &w, Attempt &a) {
       const std::vector<tx_delta_run> runs = w.trainer.Runs(0);
       return a([&](const tx_parallel *parallel) { return tx_delta_renew(2, runs.data(), parallel, nullptr); });
     }},
    {"encode", "tx_delta_encode", true, Small, [](World &w, Attempt &a) { return Encode(w, a, TX_DELTA_CHANGES); }},
    {"encode_dense", "tx_delta_encode", true, Large,
     [](World &w, Attempt &a) { return Encode(w, a, TX_DELTA_CHANGES); }},
    {"encode_whole", "tx_delta_encode", true, Nothing,
     [](World &w, Attempt &a) { return Encode(w, a, TX_DELTA_WHOLE); }},
    {"merge", "tx_delta_merge", true, Nothing,
     [](World &w, Attempt &a) {
       const tx_tensor messages[] = {AsTensor(w.versions[1]), AsTensor(w.versions[0])};
       return a([&](const tx_parallel *) { return tx_delta_merge(2, messages, &w.message, nullptr); });
     }},
    {"info", "tx_delta_info_of", true, Nothing,
     [](World &w, Attempt &a) {
       tx_delta_info info = TX_DELTA_INFO_INIT;
       return a([&](const tx_parallel *) { return tx_delta_info_of(AsTensor(w.whole[0]), &info, nullptr); });
     }},
    {"params", "tx_delta_params_of", true, Nothing,
     [](World &w, Attempt &a) {
       tx_delta_param params[2];
       return a([&](const tx_parallel *) { return tx_delta_params_of(AsTensor(w.whole[0]), 2, params, nullptr); });
     }},
    {"open", "tx_delta_open", true, Nothing,
     [](World &w, Attempt &a) {
       const std::vector<tx_delta_param> table = Table(kModel);
       const tx_delta_piece pieces[] = {
           {0, 0, 10, kModel[0].numel / 10, kModel[0].numel / 10, w.engine.weights[0].data(), kModel[0].numel / 10, 1},
           {1, 0, 1, kModel[1].numel, 0, w.engine.weights[1].data(), 0, 1}};
       return a([&](const tx_parallel *) { return tx_delta_open(2, table.data(), 2, pieces, &w.receiver, nullptr); });
     }},
    {"apply", "tx_delta_apply", true, Nothing,
     [](World &w, Attempt &a) { return Apply(w, a, {w.versions[0]}, TX_DELTA_TOUCHED); }},
    {"apply_two", "tx_delta_apply", true, Nothing,
     [](World &w, Attempt &a) {
       return Apply(w, a, {w.versions[1], w.versions[0]}, TX_DELTA_FULL);
     }},
    {"apply_whole", "tx_delta_apply", true, Nothing,
     [](World &w, Attempt &a) { return Apply(w, a, w.whole, TX_DELTA_TOUCHED); }},
};

class Deltas : public testing::TestWithParam<Row> {};

TEST_P(Deltas, ChangeNothingWhereMemoryIsRefused) {
  int64_t refused = 0;
  for (const int64_t threads : {1, 3}) {
    World world; /* one for all attempts, because only the last one changes it */
    GetParam().before(world);
    const std::vector<Bytes> state = world.State();
    for (int64_t failing = 0;; failing++) {
      ASSERT_LT(failing, 30) << "it never ends, or allocates in its loop";
      Attempt attempt(failing, threads);
      const tx_status status = GetParam().run(world, attempt);
      if (!attempt.failed) {
        EXPECT_EQ(status, TX_OK);
        break;
      }
      refused++;
      ASSERT_EQ(status, TX_ERROR_OUT_OF_MEMORY) << "allocation " << failing << ", threads " << threads;
      ASSERT_TRUE(world.State() == state) << "allocation " << failing << ", threads " << threads;
    }
  }
  EXPECT_EQ(refused > 0, GetParam().allocates) << refused;
}
INSTANTIATE_TEST_SUITE_P(OutOfMemory, Deltas, testing::ValuesIn(kRows),
                         [](const auto &info) { return info.param.name; });

}  // namespace

#endif
