// Random calls of the planning functions, some with illegal arguments (api_check.h).
#include "tests/core/api_check.h"
// after api_check.h, for EXPECT_EQ
#include "tests/core/api_planning.h"

namespace {

TEST(ApiCalls, OfPlanning) {
  api::CheckAll({{"tx_layout_plan", api::LayoutPlan},
                 {"tx_layout_shard", api::LayoutShard},
                 {"tx_layout_slices", api::LayoutSlices},
                 {"tx_layout_boxes", api::LayoutBoxes},
                 {"tx_offload_choose", api::OffloadChoose},
                 {"tx_coalesce", api::Coalesce},
                 {"tx_plan_owners", api::PlanOwners},
                 {"tx_muon_exchange_init", api::MuonExchangeInit},
                 {"tx_memory_plan", api::MemoryPlan},
                 {"tx_cycle_init", api::CycleInit}},
                1000);
}

}  // namespace
