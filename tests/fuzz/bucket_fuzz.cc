// Buckets: gradients at any offsets are copied into any dtype and back, and chunks of ranks are summed.
#include <algorithm>

#include "tests/fuzz/operate.h"

namespace {

struct Bucket {
  std::vector<tx_tensor> grads, sums, bucket, scales;
  std::vector<int64_t> offsets;
  int64_t numel = 0;

  Bucket(fuzz::Input *input, fuzz::Memory *memory) {
    const bool blocks = input->Odd(2);
    for (uint32_t n = input->Below(4); n > 0; n--) {
      const int64_t count = fuzz::Numel(input);
      grads.push_back(input->Odd(8) ? fuzz::None() : memory->Take(count, input->Of(fuzz::kPlain), input->Below(3)));
      sums.push_back(grads.back().numel ? memory->Take(count, input->Of(fuzz::kPlain)) : fuzz::None());
      offsets.push_back(numel);
      numel += count + input->Below(3);
      if (blocks) numel = fuzz::Blocks(numel) * TX_BLOCK;
    }
    if (!input->Odd(4)) numel = fuzz::Blocks(numel) * TX_BLOCK;
    bucket.push_back(memory->Take(numel, blocks ? TX_U8 : input->Of(fuzz::kPlain), input->Below(3)));
    scales.push_back(blocks ? memory->Take(fuzz::Blocks(numel), TX_U8) : fuzz::None());
    if (!offsets.empty() && input->Odd(8)) {
      offsets[input->Below(static_cast<uint32_t>(offsets.size()))] = input->I64();
    }
    if (input->Odd(4)) fuzz::MakeOneOdd(input, fuzz::All({&grads, &sums, &bucket, &scales}));
  }
};

void PackAndUnpack(fuzz::Input *input) {
  fuzz::Memory memory(input);
  Bucket b(input, &memory);
  tx_bucket_pack_args args = TX_BUCKET_PACK_ARGS_INIT;
  args.n = input->Odd(32) ? -1 - input->Byte() : static_cast<int64_t>(b.grads.size());
  args.grads = b.grads.data();
  args.offsets = b.offsets.data();
  args.bucket = b.bucket[0];
  args.scales = b.scales[0];
  args.seed = static_cast<uint64_t>(input->I64());
  args.step = input->I64();
  args.rounding = input->Odd(16) ? input->I32() : static_cast<int32_t>(input->Below(3));
  const tx_status packed = fuzz::Operate(input, &memory, [&](const tx_parallel *parallel, tx_error *error) {
    return tx_bucket_pack(&args, parallel, error);
  });
  const tx_status unpacked = fuzz::Operate(input, &memory, [&](const tx_parallel *parallel, tx_error *error) {
    return tx_bucket_unpack(args.bucket, args.scales, args.n, args.offsets, b.grads.data(), parallel, error);
  });
  if (packed == TX_OK && input->Odd(2)) CHECK(unpacked == TX_OK || unpacked == TX_ERROR_INVALID_ARGUMENT);
}

void Accumulate(fuzz::Input *input) {
  fuzz::Memory memory(input);
  const Bucket b(input, &memory);
  const int64_t n = input->Odd(32) ? -1 - input->Byte() : static_cast<int64_t>(b.grads.size());
  (void)fuzz::Operate(input, &memory, [&](const tx_parallel *parallel, tx_error *error) {
    return tx_bucket_accumulate(n, b.sums.data(), b.grads.data(), parallel, error);
  });
}

void Reduce(fuzz::Input *input) {
  fuzz::Memory memory(input);
  const int64_t n = 1 + input->Below(4), numel = fuzz::Numel(input);
  const tx_dtype dtype = input->Odd(3) ? TX_U8 : input->Of(fuzz::kPlain);
  std::vector<tx_tensor> chunks, scales, others;
  for (int64_t i = 0; i < n; i++) {
    chunks.push_back(memory.Take(numel, dtype, input->Below(2)));
    scales.push_back(memory.Take(fuzz::Blocks(numel), TX_U8));
  }
  others.push_back(memory.Take(numel, input->Of(fuzz::kPlain)));
  others.push_back(input->Odd(2) ? memory.I64s(TX_STATS_LEN) : fuzz::None());
  if (input->Odd(8)) others[0] = chunks[0];
  if (input->Odd(4)) fuzz::MakeOneOdd(input, fuzz::All({&chunks, &scales, &others}));
  tx_bucket_reduce_args args = TX_BUCKET_REDUCE_ARGS_INIT;
  args.n = input->Odd(32) ? -static_cast<int64_t>(input->Below(2)) : n;
  args.chunks = chunks.data();
  args.scales = dtype == TX_U8 ? scales.data() : nullptr;
  args.shard = others[0];
  args.stats = others[1];
  args.scale = input->Odd(2) ? input->F64() : 0.5;
  args.accumulate = input->Odd(16) ? input->I32() : static_cast<int32_t>(input->Below(2));
  (void)fuzz::Operate(input, &memory, [&](const tx_parallel *parallel, tx_error *error) {
    return tx_bucket_reduce(&args, parallel, error);
  });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  void (*const kCalls[])(fuzz::Input *) = {PackAndUnpack, Accumulate, Reduce};
  input.Of(kCalls)(&input);
  return 0;
}
