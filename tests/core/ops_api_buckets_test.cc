// Random calls for gradient statistics, buckets, casts, masters and messages, some with illegal arguments
// (api_check.h).
#include "tests/core/api_check.h"
// after api_check.h, for EXPECT_EQ
#include "tests/core/api_buckets.h"

namespace {

TEST(ApiCalls, OfBuckets) {
  api::CheckAll({{"tx_grad_stats", api::GradStats},
                 {"tx_grad_norm", api::GradNorm},
                 {"tx_bucket_pack", api::BucketPack},
                 {"tx_bucket_unpack", api::BucketUnpack},
                 {"tx_bucket_reduce", api::BucketReduce},
                 {"tx_bucket_accumulate", api::BucketAccumulate},
                 {"tx_cast", api::Cast},
                 {"tx_master_encode", api::MasterEncode},
                 {"tx_master_decode", api::MasterDecode},
                 {"tx_master_resync", api::MasterResync},
                 {"tx_master_checksum", api::MasterChecksum}},
                800);
}

TEST(ApiCalls, OfMessages) {
  api::CheckAll({{"tx_compress", api::Compress},
                 {"tx_expand", api::Expand},
                 {"tx_planes_encode", api::PlanesEncode},
                 {"tx_planes_read", api::PlanesRead},
                 {"tx_planes_check", api::PlanesCheck},
                 {"tx_planes_decode", api::PlanesDecode},
                 {"tx_planes_decode_range", api::PlanesDecodeRange}},
                400);
}

}  // namespace
