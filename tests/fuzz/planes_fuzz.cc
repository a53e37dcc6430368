// Hostile messages of planes: for any bytes, decoding never reads or writes out of bounds, and allocates memory for one
// block only. Encoded values are decoded to the same values, on every instruction set.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "csrc/torch_ext_advanced.h"

namespace {

const tx_dtype kDtypes[] = {TX_F32, TX_BF16, TX_F16, TX_I16, TX_U8};
const int64_t kWidths[] = {4, 2, 2, 2, 1};

void Demand(bool holds) {
  if (!holds) abort();
}

tx_tensor Bytes(std::vector<uint8_t> &bytes) {
  return {bytes.data(), static_cast<int64_t>(bytes.size()), TX_U8, 0};
}

// Heap allocations of the exact sizes, so that a sanitizer finds the first byte out of bounds.
void Decode(std::vector<uint8_t> message) {
  tx_planes about = TX_PLANES_INIT;
  if (tx_planes_read(Bytes(message), &about, nullptr) != TX_OK) return;
  Demand(about.bytes <= static_cast<int64_t>(message.size()));
  tx_planes_check(Bytes(message), 0, about.n_blocks, nullptr);
  if (about.numel > 1 << 20) return;
  std::vector<uint8_t> values(static_cast<size_t>(about.numel) * 4);
  const auto dtype = static_cast<tx_dtype>(about.dtype);
  tx_planes_decode(Bytes(message), {values.data(), about.numel, dtype, 0}, nullptr);
  if (about.numel > 2) {
    tx_planes_decode_range(Bytes(message), 1, {values.data(), about.numel - 2, dtype, 0}, nullptr);
  }
}

// Gives the bytes the header and the checksums of an encoded message, so that decoding reaches the blocks.
void DecodeSealed(const uint8_t *data, size_t size, tx_dtype dtype, int64_t width) {
  std::vector<uint8_t> zeros(static_cast<size_t>(width * 700));
  std::vector<uint8_t> message(static_cast<size_t>(tx_planes_bound(dtype, 700)));
  int64_t bytes = 0;
  for (size_t i = 0; i < zeros.size(); i++)
    zeros[i] = static_cast<uint8_t>(size ? data[i % size] & 3 : 0);
  Demand(tx_planes_encode({zeros.data(), 700, dtype, 0}, Bytes(message), &bytes, nullptr) == TX_OK);
  message.resize(static_cast<size_t>(bytes));
  for (size_t i = 0; i + 2 < size; i += 3) {
    message[(data[i] | data[i + 1] << 8) % message.size()] ^= data[i + 2];
  }
  Decode(message);
}

void RoundTrip(const uint8_t *data, size_t size, tx_dtype dtype, int64_t width) {
  const int64_t n = static_cast<int64_t>(size) / width;
  std::vector<uint8_t> values(data, data + n * width), back(values.size()), first;
  for (int32_t i = 0; tx_isa_name(i); i++) {
    Demand(tx_isa_select(tx_isa_name(i), nullptr) == TX_OK);
    std::vector<uint8_t> message(static_cast<size_t>(tx_planes_bound(dtype, n)));
    int64_t bytes = 0;
    Demand(tx_planes_encode({values.data(), n, dtype, 0}, Bytes(message), &bytes, nullptr) == TX_OK);
    message.resize(static_cast<size_t>(bytes));
    Demand(tx_planes_decode(Bytes(message), {back.data(), n, dtype, 0}, nullptr) == TX_OK);
    Demand(back == values && (i == 0 || message == first));
    first = message;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size == 0) return 0;
  const size_t which = data[0] % 5;
  if (data[0] & 0x80) {
    RoundTrip(data + 1, size - 1, kDtypes[which], kWidths[which]);
  } else if (data[0] & 0x40) {
    DecodeSealed(data + 1, size - 1, kDtypes[which], kWidths[which]);
  } else {
    Decode(std::vector<uint8_t>(data + 1, data + size));
  }
  return 0;
}
