// Casts between any dtypes, block-scaled or not.
#include "tests/fuzz/operate.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const tx_dtype kScaled[] = {TX_U8, TX_F16};
  fuzz::Input input(data, size);
  fuzz::Memory memory(&input);
  std::vector<tx_tensor> lists[4];  // sources and destinations, and the scales of both
  std::vector<tx_meta> meta;
  for (uint32_t n = 1 + input.Below(3); n > 0; n--) {
    const int64_t numel = fuzz::Numel(&input);
    for (int side = 0; side < 2; side++) {
      const bool scaled = input.Odd(2);
      const tx_dtype dtype = scaled ? input.Of(kScaled) : input.Of(fuzz::kPlain);
      lists[side].push_back(memory.Take(numel, dtype, input.Below(3)));
      lists[2 + side].push_back(scaled ? memory.Take(fuzz::Blocks(numel), TX_U8) : fuzz::None());
    }
    meta.push_back({input.I64(), input.Odd(4) ? input.I64() : 0, 0});
  }
  if (input.Odd(4)) fuzz::MakeOneOdd(&input, fuzz::All({&lists[0], &lists[1], &lists[2], &lists[3]}));
  if (input.Odd(16)) lists[1][0] = lists[0][0];
  tx_cast_args args = TX_CAST_ARGS_INIT;
  args.n = input.Odd(32) ? -1 - input.Byte() : static_cast<int64_t>(meta.size());
  args.srcs = lists[0].data();
  args.dsts = lists[1].data();
  args.src_scales = input.Odd(16) ? nullptr : lists[2].data();
  args.dst_scales = input.Odd(16) ? nullptr : lists[3].data();
  args.meta = input.Odd(2) ? nullptr : meta.data();
  args.seed = static_cast<uint64_t>(input.I64());
  args.step = input.I64();
  args.format = input.Odd(16) ? input.I32() : static_cast<int32_t>(input.Below(2));
  args.rounding = input.Odd(16) ? input.I32() : static_cast<int32_t>(input.Below(3));
  (void)fuzz::Operate(&input, &memory,
                      [&](const tx_parallel *parallel, tx_error *error) { return tx_cast(&args, parallel, error); });
  return 0;
}
