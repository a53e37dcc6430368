// The step of parameters with offloaded state has the bits of the ordinary step, for any batch and number of slots. The
// staging memory may be too small.
#include "tests/fuzz/adamw_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  fuzz::Memory memory(&input);
  fuzz::Adamw call(&input, &memory);
  if (input.Odd(8)) call.MakeNumbersOdd(&input);
  if (input.Odd(16)) fuzz::MakeOneOdd(&input, call.Tensors());
  tx_staging staging = TX_STAGING_INIT;
  staging.batch = input.Odd(8) ? input.I64() : TX_SAMPLED * (1 + input.Below(3));
  staging.slots = input.Odd(16) ? input.I32() : 1 + static_cast<int32_t>(input.Below(TX_MAX_SLOTS));
  const int64_t needed = 4 * TX_MAX_SLOTS * 3 * TX_SAMPLED * 8;
  staging.bytes = input.Odd(8) ? input.I64() : needed;
  std::vector<uint8_t> room(static_cast<size_t>(needed) + 64);
  staging.memory = room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64) % 64 + input.Odd(64);
  // Never claims more memory than there is, except for numbers that no memory can have.
  if (staging.bytes > needed && staging.bytes < int64_t{1} << 56) staging.bytes = needed;
  const bool absurd = staging.bytes > needed;
  if (absurd) staging.batch = INT64_MAX / 4096 * 4096;
  const tx_adamw_args *args = call.Args(&input);

  CHECK(tx_isa_select(nullptr, nullptr) == TX_OK);
  const auto before = memory.Copy();
  const tx_status plain = tx_adamw(args, nullptr, nullptr);
  const auto stepped = memory.Copy();
  memory.Restore(before);
  const tx_status status = fuzz::Operate(&input, &memory, [&](const tx_parallel *parallel, tx_error *error) {
    tx_parallel four = TX_PARALLEL_INIT;
    if (parallel) four = *parallel;
    if (four.num_threads > 4) four.num_threads = 4;
    return tx_adamw_offloaded(args, &staging, parallel ? &four : nullptr, error);
  });
  if (plain != TX_OK) CHECK(status != TX_OK || args->on_external_write != TX_EXTERNAL_IGNORE);
  if (status == TX_OK && plain == TX_OK && args->on_external_write == TX_EXTERNAL_IGNORE)
    CHECK(memory.HasNan() || memory.Copy() == stepped);
  return 0;
}
