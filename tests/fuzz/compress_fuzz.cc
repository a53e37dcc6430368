// Compressed messages of bf16: what is compressed can be expanded again, and any bytes may be given to expand.
#include "tests/fuzz/operate.h"

namespace {

void Compress(fuzz::Input *input) {
  fuzz::Memory memory(input);
  const int64_t numel = input->Odd(16) ? fuzz::Numel(input) : TX_BLOCK * (1 + input->Below(20));
  tx_tensor values = memory.Take(numel, TX_BF16, input->Below(2));
  for (uint32_t i = input->Below(40); i > 0 && numel > 0; i--) {  // outliers
    static_cast<uint8_t *>(values.data)[2 * (input->Below(4096) % numel) + 1] = input->Byte();
  }
  tx_tensor message = memory.Take(tx_compressed_bytes(numel) + input->Odd(32), TX_U8);
  tx_tensor rests = memory.I64s(1);
  if (input->Odd(8)) fuzz::MakeOneOdd(input, {&values, &message});
  int64_t rest = 0;
  const tx_status status = fuzz::Operate(input, &memory, [&](const tx_parallel *, tx_error *error) {
    return tx_compress(values, message, static_cast<int64_t *>(rests.data), error);
  });
  if (status != TX_OK) return;
  std::memcpy(&rest, rests.data, sizeof rest);
  CHECK(rest >= 0 && rest <= 2 * numel);
  const tx_tensor back = memory.Take(numel, TX_BF16);
  const auto *tail = static_cast<const uint8_t *>(values.data) + 2 * numel - rest;
  CHECK(tx_expand(message, back, &rest, nullptr) == TX_OK);
  std::memcpy(static_cast<uint8_t *>(back.data) + 2 * numel - rest, tail, static_cast<size_t>(rest));
  CHECK(std::memcmp(back.data, values.data, static_cast<size_t>(2 * numel)) == 0);
}

void Expand(fuzz::Input *input) {
  fuzz::Memory memory(input);
  const int64_t numel = TX_BLOCK * (1 + input->Below(6));
  const tx_tensor message = memory.Take(tx_compressed_bytes(numel), TX_U8), values = memory.Take(numel, TX_BF16);
  const tx_tensor rests = memory.I64s(1);
  if (input->Odd(2)) {  // a valid message, damaged
    const tx_tensor source = memory.Take(numel, TX_BF16);
    auto *bytes = static_cast<uint8_t *>(source.data);
    for (int64_t i = 0; i < numel; i++)
      bytes[2 * i + 1] = 0x3F;
    for (uint32_t i = input->Below(16); i > 0; i--) /* outliers */
      bytes[2 * (input->Below(65535) % numel) + 1] = 0;
    CHECK(tx_compress(source, message, static_cast<int64_t *>(rests.data), nullptr) == TX_OK);
  }
  const bool at_the_end = input->Odd(2);
  for (uint32_t i = input->Below(30); i > 0; i--) {
    const int64_t any = input->Below(65535);
    const int64_t at = at_the_end ? message.numel - 1 - any % 40 : any % message.numel;
    static_cast<uint8_t *>(message.data)[at] = input->Byte();
  }
  const tx_status status = fuzz::Operate(input, &memory, [&](const tx_parallel *, tx_error *error) {
    return tx_expand(message, values, static_cast<int64_t *>(rests.data), error);
  });
  int64_t rest = 0;
  std::memcpy(&rest, rests.data, sizeof rest);
  if (status == TX_OK) CHECK(rest >= 0 && rest <= 2 * numel);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  input.Odd(2) ? Expand(&input) : Compress(&input);
  return 0;
}
