// Compares our declarations of NCCL (nccl_table.h, nccl_symbols.def) with NVIDIA's nccl.h, if it is installed. If a
// prototype differs, this file does not compile. Our declarations use int for NCCL's enumerations.
#include <cstddef>
#include <type_traits>

#include "csrc/nccl/nccl_table.h"
#include "gtest/gtest.h"

#if __has_include("nccl.h")
#include "nccl.h"

namespace {

template <class Ours, class Theirs>
constexpr bool same_value() {
  if constexpr (std::is_same_v<Ours, Theirs>)
    return true;
  else if constexpr (std::is_same_v<Ours, int>)
    return std::is_enum_v<Theirs> && sizeof(Theirs) == sizeof(int);
  else if constexpr (std::is_same_v<Ours, int *>)
    return std::is_enum_v<std::remove_pointer_t<Theirs>>;
  else if constexpr (std::is_same_v<Ours, void *> || std::is_same_v<Ours, void **>)
    return std::is_same_v<Theirs, ncclWindow_t> || std::is_same_v<Theirs, ncclWindow_t *>;
  else if constexpr (std::is_same_v<Ours, tx_nccl_id>)
    return std::is_same_v<Theirs, ncclUniqueId> && sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs);
  else if constexpr (std::is_same_v<Ours, tx_nccl_id *>)
    return std::is_same_v<Theirs, ncclUniqueId *>;
  else
    return std::is_same_v<Ours, tx_nccl_config *> && std::is_same_v<Theirs, ncclConfig_t *>;
}

template <class Ours, class Theirs>
struct SameFunction : std::false_type {};
template <class R, class... A, class S, class... B>
struct SameFunction<R (*)(A...), S (*)(B...)>
    : std::bool_constant<sizeof...(A) == sizeof...(B) && same_value<R, S>() && (same_value<A, B>() && ...)> {};

#define TX_NCCL(result, symbol, parameters, major, minor)                                  \
  static_assert(SameFunction<decltype(tx_nccl_table::symbol), decltype(&::symbol)>::value, \
                #symbol ": prototypes differ");
#if NCCL_VERSION_CODE >= 22800
#define TX_NCCL_OPTIONAL(result, symbol, parameters, major, minor) TX_NCCL(result, symbol, parameters, major, minor)
#else
#define TX_NCCL_OPTIONAL(result, symbol, parameters, major, minor)
#endif
#include "csrc/nccl/nccl_symbols.def"
#undef TX_NCCL
#undef TX_NCCL_OPTIONAL

static_assert(TX_NCCL_SUCCESS == int{ncclSuccess} && TX_NCCL_IN_PROGRESS == int{ncclInProgress});
static_assert(TX_NCCL_UINT8 == int{ncclUint8} && TX_NCCL_ID_BYTES == NCCL_UNIQUE_ID_BYTES);
static_assert(TX_NCCL_UNDEFINED == NCCL_CONFIG_UNDEF_INT);
static_assert(TX_NCCL_CODE(2, 19) == NCCL_VERSION(2, 19, 0));

#define TX_FIELD(ours, theirs)                                                              \
  static_assert(offsetof(tx_nccl_config, ours) == offsetof(ncclConfig_t, theirs), #theirs); \
  static_assert(sizeof(tx_nccl_config::ours) == sizeof(ncclConfig_t::theirs), #theirs)
TX_FIELD(size, size);
TX_FIELD(magic, magic);
TX_FIELD(version, version);
TX_FIELD(blocking, blocking);
TX_FIELD(cga_cluster_size, cgaClusterSize);
TX_FIELD(min_ctas, minCTAs);
TX_FIELD(max_ctas, maxCTAs);
TX_FIELD(net_name, netName);
TX_FIELD(split_share, splitShare);
#if NCCL_VERSION_CODE >= 22800
TX_FIELD(traffic_class, trafficClass);
TX_FIELD(comm_name, commName);
TX_FIELD(collnet_enable, collnetEnable);
TX_FIELD(cta_policy, CTAPolicy);
TX_FIELD(shrink_share, shrinkShare);
TX_FIELD(nvls_ctas, nvlsCTAs);
TX_FIELD(n_channels_per_net_peer, nChannelsPerNetPeer);
TX_FIELD(nvlink_centric_sched, nvlinkCentricSched);
static_assert(TX_NCCL_CTA_POLICY_ZERO == NCCL_CTA_POLICY_ZERO && TX_NCCL_WIN_COLL_SYMMETRIC == NCCL_WIN_COLL_SYMMETRIC);
#endif

TEST(NcclAbi, TheConfigurationBeginsAsTheirs) {
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  const tx_nccl_config ours = TX_NCCL_CONFIG_INIT;
  EXPECT_EQ(ours.magic, theirs.magic);
  EXPECT_EQ(ours.blocking, theirs.blocking);
  EXPECT_EQ(ours.split_share, theirs.splitShare);
#if NCCL_VERSION_CODE == 22809
  EXPECT_EQ(ours.size, theirs.size);
  EXPECT_EQ(ours.version, theirs.version);
#endif
}

}  // namespace

#else

TEST(NcclAbi, TheConfigurationBeginsAsTheirs) {
  GTEST_SKIP()
      << "no nccl.h: pip install --no-deps nvidia-nccl-cu13==2.28.9 (190 MB) beside torch, or set NCCL_HOME to "
         "the folder that has include/nccl.h";
}

#endif

TEST(NcclAbi, NoRequiredSymbolIsYoungerThanTheFloor) {
#define TX_NCCL(result, symbol, parameters, major, minor) \
  EXPECT_LE(TX_NCCL_CODE(major, minor), TX_NCCL_CODE(TX_NCCL_FLOOR_MAJOR, TX_NCCL_FLOOR_MINOR)) << #symbol;
#define TX_NCCL_OPTIONAL(result, symbol, parameters, major, minor) \
  EXPECT_GT(TX_NCCL_CODE(major, minor), TX_NCCL_CODE(TX_NCCL_FLOOR_MAJOR, TX_NCCL_FLOOR_MINOR)) << #symbol;
#include "csrc/nccl/nccl_symbols.def"
#undef TX_NCCL
#undef TX_NCCL_OPTIONAL
}
