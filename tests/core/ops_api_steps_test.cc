// Random calls of the AdamW and Muon steps, some with illegal arguments (api_check.h).
#include "tests/core/api_check.h"
#include "tests/core/api_steps.h"

namespace {

TEST(ApiCalls, OfSteps) {
  api::CheckAll({{"tx_adamw", api::Adamw},
                 {"tx_adamw_check", api::AdamwCheck},
                 {"tx_adamw_offloaded", api::AdamwOffloaded},
                 {"tx_adamw_check_groups", api::AdamwCheckGroups},
                 {"tx_health_of", api::HealthOf},
                 {"tx_muon_momentum", api::MuonMomentum},
                 {"tx_muon_update", api::MuonUpdate},
                 {"tx_muon_check_group", api::MuonCheckGroup},
                 {"tx_muon_mirror", api::MuonMirror}},
                1000);
}

}  // namespace
