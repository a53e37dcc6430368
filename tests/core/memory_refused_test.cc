// What tx_memory_plan refuses.
#include <gtest/gtest.h>

#include <string>

#include "csrc/torch_ext_advanced.h"
#include "tests/core/memory_question.h"

namespace {

struct Bad {
  const char *id;
  tx_status status;
  const char *says;
  void (*change)(Question &);
};

void PrintTo(const Bad &c, std::ostream *out) {
  *out << c.id;
}

class MemoryBadTest : public testing::TestWithParam<Bad> {};

TEST_P(MemoryBadTest, is_refused_and_nothing_is_written) {
  Case c = kNoShard;
  c.units = {Unit(5)};
  Question question(c);
  GetParam().change(question);
  tx_memory memory = {};
  memory.peak = -7;
  tx_error error;
  ASSERT_EQ(tx_memory_plan(&question.args, &memory, &error), GetParam().status);
  EXPECT_NE(std::string(error.message).find(GetParam().says), std::string::npos) << error.message;
  EXPECT_EQ(memory.peak, -7);
}

const Bad kBad[] = {
    {"size_unset", TX_ERROR_INVALID_ARGUMENT, "TX_MEMORY_ARGS_INIT", [](Question &q) { q.args.size = 0; }},
    {"averages_in_8_bits", TX_ERROR_DTYPE, "ema_dtype is uint8; legal: none, fp32, bf16, and bf16 with ema_lows",
     [](Question &q) { q.args.ema_dtype = TX_U8; }},
    {"averages_of_40_bits", TX_ERROR_DTYPE, "ema_dtype is fp32 with ema_lows",
     [](Question &q) {
       q.args.ema_dtype = TX_F32;
       q.args.ema_lows = 1;
     }},
    {"layout_null", TX_ERROR_INVALID_ARGUMENT, "layout", [](Question &q) { q.args.layout = nullptr; }},
    {"places_null", TX_ERROR_INVALID_ARGUMENT, "places", [](Question &q) { q.args.places = nullptr; }},
    {"buckets_null", TX_ERROR_INVALID_ARGUMENT, "buckets", [](Question &q) { q.args.buckets = nullptr; }},
    {"states_null", TX_ERROR_INVALID_ARGUMENT, "states", [](Question &q) { q.args.states = nullptr; }},
    {"units_null", TX_ERROR_INVALID_ARGUMENT, "units", [](Question &q) { q.args.units = nullptr; }},
    {"units_negative", TX_ERROR_INVALID_ARGUMENT, "n_units", [](Question &q) { q.args.n_units = -1; }},
    {"unit_negative", TX_ERROR_INVALID_ARGUMENT, "units[0] has -5", [](Question &q) { q.units[0].numel = -5; }},
    {"unit_of_no_dtype", TX_ERROR_INVALID_ARGUMENT, "none", [](Question &q) { q.units[0].param_dtype = TX_NONE; }},
    {"unit_on_a_wire_of_no_dtype", TX_ERROR_INVALID_ARGUMENT, "in none on the wire",
     [](Question &q) { q.units[0].wire_dtype = TX_NONE; }},
    {"unit_more_trained_than_there_are", TX_ERROR_INVALID_ARGUMENT, "6 of them trained",
     [](Question &q) { q.units[0].trained = 6; }},
    {"strategy_unknown", TX_ERROR_ILLEGAL_VALUE, "optim_grads_params", [](Question &q) { q.args.strategy = 4; }},
    {"strategy_negative", TX_ERROR_ILLEGAL_VALUE, "-1", [](Question &q) { q.args.strategy = -1; }},
    {"gather_dtype_unknown", TX_ERROR_UNKNOWN_DTYPE, "99", [](Question &q) { q.args.gather_dtype = 99; }},
    {"in_flight_zero", TX_ERROR_INVALID_ARGUMENT, "in_flight 0", [](Question &q) { q.args.in_flight = 0; }},
    {"frozen_negative", TX_ERROR_INVALID_ARGUMENT, "frozen_bytes -1", [](Question &q) { q.args.frozen_bytes = -1; }},
    {"moment_of_no_dtype", TX_ERROR_DTYPE, "states[1] has moments in none",
     [](Question &q) { q.states[1].exp_avg_dtype = TX_NONE; }},
    {"moment_of_another_dtype", TX_ERROR_DTYPE, "int64", [](Question &q) { q.states[1].exp_avg_sq_dtype = TX_I64; }},
    {"master_of_another_dtype", TX_ERROR_DTYPE, "master in fp16",
     [](Question &q) { q.states[0].master_dtype = TX_F16; }},
    {"masters_that_differ_in_a_buffer", TX_ERROR_CONFLICT, "the masters of states[0] and states[1] differ",
     [](Question &q) { q.states[1].master_dtype = TX_NONE; }},
    {"layout_that_is_not_legal", TX_ERROR_INVALID_ARGUMENT, "cap 0", [](Question &q) { q.layout.cap = 0; }},
    {"buckets_of_another_layout", TX_ERROR_MISMATCH, "1 buckets in 1 buffers",
     [](Question &q) { q.layout.cap = 100000; }},
    {"buckets_of_another_world", TX_ERROR_MISMATCH, "2 buckets", [](Question &q) { q.layout.world = 5; }},
    {"bucket_overfull", TX_ERROR_MISMATCH, "2 buckets", [](Question &q) { q.buckets[0].used = 38401; }},
    {"bucket_of_another_buffer", TX_ERROR_MISMATCH, "1 buffers", [](Question &q) { q.buckets[1].buffer = 1; }},
    {"place_of_no_buffer", TX_ERROR_MISMATCH, "1 buffers", [](Question &q) { q.places[1].buffer = -1; }},
    {"place_of_another_buffer", TX_ERROR_MISMATCH, "1 buffers", [](Question &q) { q.places[0].buffer = 1; }},
    {"buffer_without_a_parameter", TX_ERROR_MISMATCH, "no parameter in buffer 1",
     [](Question &q) {
       q.params[0] = Param(1000, TX_F32);
       q.buckets[0].buffer = 0;
       q.buckets[1].buffer = 1;
     }},
    {"more_than_int64_counts", TX_ERROR_INVALID_ARGUMENT, "int64",
     [](Question &q) { q.units[0].numel = INT64_MAX / 2, q.args.strategy = TX_OPTIM_GRADS_PARAMS; }},
    {"more_frozen_than_int64_counts", TX_ERROR_INVALID_ARGUMENT, "int64",
     [](Question &q) { q.args.frozen_bytes = INT64_MAX; }},
};
INSTANTIATE_TEST_SUITE_P(Cases, MemoryBadTest, testing::ValuesIn(kBad),
                         [](const auto &info) { return std::string(info.param.id); });

TEST(Memory, no_memory_to_write_is_refused) {
  const Question question(kNoShard);
  EXPECT_EQ(tx_memory_plan(&question.args, nullptr, nullptr), TX_ERROR_INVALID_ARGUMENT);
  tx_memory memory = {};
  EXPECT_EQ(tx_memory_plan(nullptr, &memory, nullptr), TX_ERROR_INVALID_ARGUMENT);
}

}  // namespace
