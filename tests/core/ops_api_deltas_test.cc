// Random calls for weight deltas, some with illegal arguments (api_check.h).
#include "tests/core/api_check.h"
// after api_check.h, for EXPECT_EQ
#include "tests/core/api_deltas.h"

namespace {

TEST(ApiCalls, OfDeltas) {
  api::CheckAll({{"tx_delta_chain_begin", api::ChainBegin},
                 {"tx_delta_renew", api::Renew},
                 {"tx_delta_mark", api::Mark},
                 {"tx_delta_encode", api::Encode},
                 {"tx_delta_merge", api::Merge},
                 {"tx_delta_info_of", api::InfoOf},
                 {"tx_delta_params_of", api::ParamsOf},
                 {"tx_delta_open", api::Open},
                 {"tx_delta_apply", api::Apply}},
                600);
}

}  // namespace
