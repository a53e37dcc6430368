// The comparison of the exchanges that all ranks report.
#include "csrc/torch_ext_advanced.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  const int64_t n_ranks = 1 + input.Below(4);
  std::vector<tx_nccl_record> records(static_cast<size_t>(n_ranks) * TX_NCCL_RECORDS);
  const int64_t last = input.Odd(4) ? input.I64() : input.Byte();
  for (int64_t back = 0; back < TX_NCCL_RECORDS && last - back > 0; back++) {
    for (int64_t rank = 0; rank < n_ranks; rank++) {
      const int64_t operation = last - back;
      tx_nccl_record *r = &records[static_cast<size_t>(rank * TX_NCCL_RECORDS + (operation - 1) % TX_NCCL_RECORDS)];
      r->operation = operation;
      r->hash = static_cast<uint64_t>(operation) * 7;
      std::snprintf(r->what, sizeof r->what, "all-to-all of bucket %d", static_cast<int>(operation % 9));
    }
  }
  bool same = true;
  for (uint32_t i = input.Below(6); i > 0; i--) {
    tx_nccl_record *r = &records[input.Below(static_cast<uint32_t>(records.size()))];
    if (input.Odd(2)) r->operation = input.I64();
    if (input.Odd(2)) r->hash = static_cast<uint64_t>(input.I64());
    if (input.Odd(4)) std::memset(r->what, 'x', sizeof r->what); /* not terminated */
    same = false;
  }
  tx_error error = {};
  const tx_status status = tx_nccl_compare(input.Odd(32) ? input.Byte() - 255 : n_ranks, records.data(), &error);
  CHECK(status == TX_OK || fuzz::IsSentence(error));
  if (same) CHECK(status == TX_OK || status == TX_ERROR_INVALID_ARGUMENT);
  return 0;
}
