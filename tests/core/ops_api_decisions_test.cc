// Random calls for dtypes, the policy and the loss scale, some with illegal arguments (api_check.h).
#include "tests/core/api_check.h"
// after api_check.h, for EXPECT_EQ
#include "tests/core/api_decisions.h"

namespace {

TEST(ApiCalls, OfDecisions) {
  api::CheckAll({{"tx_dtype_parse", api::DtypeParse},
                 {"tx_dtype_coerce", api::DtypeCoerce},
                 {"tx_dtype_check_key", api::DtypeCheckKey},
                 {"tx_dtype_size", api::DtypeSize},
                 {"tx_strategy_find", api::StrategyFind},
                 {"tx_isa_select", api::IsaSelect},
                 {"tx_policy_resolve", api::PolicyResolve},
                 {"tx_policy_row", api::PolicyRow},
                 {"tx_policy_with", api::PolicyWith},
                 {"tx_policy_moments", api::PolicyMoments},
                 {"tx_policy_describe", api::PolicyDescribe},
                 {"tx_scale_from_policy", api::ScaleFromPolicy},
                 {"tx_scale_update", api::ScaleUpdate}},
                1000);
}

}  // namespace
