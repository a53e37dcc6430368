// Structs that start with `size`: a shorter one of an older header and a longer one of a newer header are rejected by
// name, whatever else they contain.

#include <cstdint>
#include <ostream>
#include <string>

#include "csrc/torch_ext_advanced.h"
#include "gtest/gtest.h"

namespace {

struct Case {
  const char *function;
  const char *initialiser;
  uint64_t size;
  tx_status (*call)(uint64_t size, tx_error *error);
};

void PrintTo(const Case &c, std::ostream *out) {
  *out << c.function << " with " << c.initialiser;
}

const tx_adamw_group kGroup = {0.1, 0.9, 0.99, 1e-8, 0, 0, 1};

// Legal arguments without parameters.
tx_adamw_args OneGroup() {
  tx_adamw_args args = TX_ADAMW_ARGS_INIT;
  args.n_groups = 1;
  args.groups = &kGroup;
  return args;
}

tx_status Copy(void *, int32_t, void *, const void *, int64_t, tx_error *) {
  return TX_OK;
}
tx_status Mark(void *, int32_t, int64_t, tx_error *) {
  return TX_OK;
}
tx_status Follow(void *, int64_t, tx_error *) {
  return TX_OK;
}

// A call that does nothing, with legal arguments except for the size of one struct.
#define CASE(function, TYPE, type, ...)                                             \
  {                                                                                 \
#function, #TYPE, sizeof(type), [](uint64_t size, tx_error *error) -> tx_status { \
      type args = TYPE;                                            \
      args.size = size;                                            \
      __VA_ARGS__                                                  \
    } \
  }

const Case kCases[] = {
    CASE(tx_grad_stats, TX_PARALLEL_INIT, tx_parallel,
         {
           int64_t stats[TX_STATS_LEN] = {};
           return tx_grad_stats(0, nullptr, {stats, TX_STATS_LEN, TX_I64, 0}, {}, &args, error);
         }),
    CASE(tx_policy_resolve, TX_POLICY_ARGS_INIT, tx_policy_args,
         {
           tx_policy policy = TX_POLICY_INIT;
           return tx_policy_resolve(&args, &policy, nullptr, 0, error);
         }),
    CASE(tx_policy_resolve, TX_POLICY_INIT, tx_policy,
         {
           const tx_policy_args from = TX_POLICY_ARGS_INIT;
           return tx_policy_resolve(&from, &args, nullptr, 0, error);
         }),
    CASE(tx_policy_row, TX_POLICY_INIT, tx_policy,
         {
           const tx_policy_args from = TX_POLICY_ARGS_INIT;
           tx_policy policy = TX_POLICY_INIT;
           tx_origin origins[TX_POLICY_FIELDS];
           EXPECT_EQ(tx_policy_resolve(&from, &policy, origins, TX_POLICY_FIELDS, nullptr), TX_OK);
           return tx_policy_row(&policy, origins, TX_F32, &args, error);
         }),
    CASE(tx_scale_from_policy, TX_SCALE_INIT, tx_scale,
         {
           const tx_policy_args from = TX_POLICY_ARGS_INIT;
           tx_policy policy = TX_POLICY_INIT;
           EXPECT_EQ(tx_policy_resolve(&from, &policy, nullptr, 0, nullptr), TX_OK);
           return tx_scale_from_policy(&policy, &args, error);
         }),
    CASE(tx_scale_update, TX_SCALE_INIT, tx_scale, { return tx_scale_update(&args, 0, error); }),
    CASE(tx_adamw, TX_ADAMW_ARGS_INIT, tx_adamw_args, { return tx_adamw(&args, nullptr, error); }),
    CASE(tx_adamw_check, TX_ADAMW_ARGS_INIT, tx_adamw_args, { return tx_adamw_check(&args, error); }),
    CASE(tx_adamw_offloaded, TX_ADAMW_ARGS_INIT, tx_adamw_args,
         {
           tx_staging staging = TX_STAGING_INIT;
           staging.batch = TX_SAMPLED;
           return tx_adamw_offloaded(&args, &staging, nullptr, error);
         }),
    CASE(tx_adamw_offloaded, TX_STAGING_INIT, tx_staging,
         {
           const tx_adamw_args step = OneGroup();
           args.batch = TX_SAMPLED;
           return tx_adamw_offloaded(&step, &args, nullptr, error);
         }),
    CASE(tx_adamw_offloaded, TX_COPY_OPS_INIT, tx_copy_ops,
         {
           const tx_adamw_args step = OneGroup();
           tx_staging staging = TX_STAGING_INIT;
           staging.batch = TX_SAMPLED;
           staging.copy_ops = &args;
           args.copy = Copy;
           args.mark = args.wait = Mark;
           args.follow = Follow;
           return tx_adamw_offloaded(&step, &staging, nullptr, error);
         }),
    CASE(tx_health_of, TX_HEALTH_INIT, tx_health,
         {
           int64_t row[TX_HEALTH_LEN] = {};
           return tx_health_of({row, TX_HEALTH_LEN, TX_I64, 0}, &args, error);
         }),
    CASE(tx_bucket_pack, TX_BUCKET_PACK_ARGS_INIT, tx_bucket_pack_args,
         { return tx_bucket_pack(&args, nullptr, error); }),
    CASE(tx_bucket_reduce, TX_BUCKET_REDUCE_ARGS_INIT, tx_bucket_reduce_args,
         { return tx_bucket_reduce(&args, nullptr, error); }),
    CASE(tx_cast, TX_CAST_ARGS_INIT, tx_cast_args, { return tx_cast(&args, nullptr, error); }),
    CASE(tx_layout_plan, TX_LAYOUT_ARGS_INIT, tx_layout_args,
         {
           tx_layout_summary summary;
           return tx_layout_plan(&args, nullptr, nullptr, 0, &summary, error);
         }),
    CASE(tx_memory_plan, TX_MEMORY_ARGS_INIT, tx_memory_args,
         {
           const tx_layout_args layout = TX_LAYOUT_ARGS_INIT;
           tx_memory memory;
           args.layout = &layout;
           return tx_memory_plan(&args, &memory, error);
         }),
    CASE(tx_coalesce, TX_COALESCE_ARGS_INIT, tx_coalesce_args,
         {
           int64_t n;
           int64_t ends[1];
           args.world = 1;
           return tx_coalesce(&args, ends, &n, error);
         }),
};

class StructSize : public testing::TestWithParam<Case> {};

TEST_P(StructSize, OfThisHeaderIsAccepted) {
  tx_error error = {};
  (void)GetParam().call(GetParam().size, &error);
  EXPECT_EQ(std::string(error.message).find("_INIT"), std::string::npos) << error.message;
}

TEST_P(StructSize, OfAnOlderOrNewerHeaderIsRefusedByName) {
  for (const uint64_t size : {uint64_t{0}, GetParam().size - 8, GetParam().size + 8, UINT64_MAX}) {
    tx_error error = {};
    EXPECT_EQ(GetParam().call(size, &error), TX_ERROR_INVALID_ARGUMENT) << size;
    EXPECT_NE(std::string(error.message).find(GetParam().initialiser), std::string::npos) << error.message;
  }
}

INSTANTIATE_TEST_SUITE_P(All, StructSize, testing::ValuesIn(kCases));

}  // namespace
