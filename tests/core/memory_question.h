// Inputs for the tests of tx_memory_plan: a model, its layout, and the arguments.
#ifndef TESTS_CORE_MEMORY_QUESTION_H
#define TESTS_CORE_MEMORY_QUESTION_H

#include <gtest/gtest.h>

#include <vector>

#include "csrc/torch_ext_advanced.h"

inline tx_layout_param Param(int64_t numel, tx_dtype dtype = TX_BF16, tx_dtype grad = TX_NONE,
                             tx_dtype wire = TX_NONE) {
  tx_layout_param p = {};
  p.numel = numel;
  p.tied = -1;
  p.param_dtype = dtype;
  p.grad_dtype = grad == TX_NONE ? dtype : grad;
  p.wire_dtype = wire == TX_NONE ? p.grad_dtype : wire;
  return p;
}

constexpr tx_memory_state State(tx_dtype exp_avg, tx_dtype exp_avg_sq, tx_dtype master) {
  return {exp_avg, exp_avg_sq, master, 0};
}

// A unit of FSDP2 that is trained completely and whose gradients are reduced in the weights' dtype.
inline tx_memory_unit Unit(int64_t numel, tx_dtype dtype = TX_BF16) {
  return {numel, numel, dtype, dtype, dtype, 0};
}

// A model, the training set-up, and the expected parts of tx_memory. Fields that are not given are 0.
struct Case {
  const char *id;
  std::vector<tx_layout_param> params;
  tx_memory_state state;
  int64_t world, cap;
  tx_strategy strategy;
  tx_memory bytes;  // expected; without total and peak
  std::vector<tx_memory_unit> units = {};
  int64_t frozen_bytes = 0;
  int64_t in_flight = 4;
  tx_dtype gather = TX_NONE;
};

inline void PrintTo(const Case &c, std::ostream *out) {
  *out << c.id;
}

constexpr tx_memory_state kMixed = State(TX_BF16, TX_BF16, TX_F32);

// Four ranks and a cap of 1000: 38400 elements in a bucket of 38400, then 1000 in one of 1024. That is 39400 elements
// in 39424; a quarter is 9856. Three quarters, 29568, are received from the other ranks.
inline const std::vector<tx_layout_param> kModel = {Param(1000), Param(38400)};

// expected: params, grads, masters, moments, scales, steps, transient
inline const Case kNoShard = {
    "no_shard", kModel, kMixed, 4, 1000, TX_NO_SHARD, {39400 * 2, 39424 * 2, 39400 * 4, 39400 * 4, 0, 8, 29568 * 2}};

// A planned layout and the tx_memory_args that refer to it.
struct Question {
  explicit Question(const Case &c) : params(c.params), units(c.units) {
    layout = TX_LAYOUT_ARGS_INIT;
    layout.n = static_cast<int64_t>(params.size());
    layout.params = params.data();
    layout.world = c.world;
    layout.cap = c.cap;
    places.resize(params.size());
    buckets.resize(params.size());
    states.assign(params.size(), c.state);
    tx_layout_summary summary = {};
    tx_error error;
    EXPECT_EQ(tx_layout_plan(&layout, places.data(), buckets.data(), layout.n, &summary, &error), TX_OK)
        << error.message;
    args = TX_MEMORY_ARGS_INIT;
    args.layout = &layout;
    args.places = places.data();
    args.buckets = buckets.data();
    args.n_buckets = summary.n_buckets;
    args.states = states.data();
    args.n_units = static_cast<int64_t>(units.size());
    args.units = units.data();
    args.frozen_bytes = c.frozen_bytes;
    args.in_flight = c.in_flight;
    args.strategy = c.strategy;
    args.gather_dtype = c.gather;
  }
  Question(const Question &) = delete;
  Question &operator=(const Question &) = delete;

  std::vector<tx_layout_param> params;
  std::vector<tx_memory_unit> units;
  std::vector<tx_layout_place> places;
  std::vector<tx_layout_bucket> buckets;
  std::vector<tx_memory_state> states;
  tx_layout_args layout;
  tx_memory_args args;
};

#endif
