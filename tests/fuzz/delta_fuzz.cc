// Deltas that consist of any bytes, and deltas with forged bodies and correct checksums: what is rejected writes
// nothing, and what is applied only writes weights.
#include <cstring>
#include <vector>

#include "csrc/core/delta_bytes.h"
#include "csrc/torch_ext_delta.h"
#include "tests/fuzz/fuzz.h"

namespace {

constexpr int64_t kNumel[] = {700, 9000, 40};
constexpr tx_dtype kDtypes[] = {TX_BF16, TX_F16, TX_F32};
constexpr int64_t kGuardBytes = 64;

struct Engine {
  std::vector<uint8_t> memory[3];
  tx_delta_receiver *receiver = nullptr;

  explicit Engine(bool sliced) {
    const tx_delta_param table[] = {
        {"a", kNumel[0], kDtypes[0], 0}, {"b", kNumel[1], kDtypes[1], 0}, {"c", kNumel[2], kDtypes[2], 0}};
    std::vector<tx_delta_piece> pieces;
    for (int64_t p = 0; p < 3; p++) {
      const int64_t item = p == 2 ? 4 : 2;
      memory[p].assign(static_cast<size_t>(kNumel[p] * item + 2 * kGuardBytes), 0x3c);
      uint8_t *data = memory[p].data() + kGuardBytes;
      if (sliced && p == 0) {
        pieces.push_back({p, 0, 70, 5, 10, data, 1, 70});
        pieces.push_back({p, 5, 70, 5, 10, nullptr, 0, 0});
      } else {
        pieces.push_back({p, 0, 1, kNumel[p], 0, data, 0, 1});
      }
    }
    CHECK(tx_delta_open(3, table, static_cast<int64_t>(pieces.size()), pieces.data(), &receiver, nullptr) == TX_OK);
  }
  ~Engine() { tx_delta_close(receiver); }
};

// A message as a trainer makes it.
std::vector<uint8_t> Encode(fuzz::Input *input) {
  const tx_delta_param table[] = {
      {"a", kNumel[0], kDtypes[0], 0}, {"b", kNumel[1], kDtypes[1], 0}, {"c", kNumel[2], kDtypes[2], 0}};
  const uint64_t id[2] = {1, 2};
  tx_delta_chain chain = TX_DELTA_CHAIN_INIT;
  CHECK(tx_delta_chain_begin(3, table, id, 0, 1, &chain, nullptr) == TX_OK);
  std::vector<uint8_t> weights[3], changed[3], distances[3], moved[3];
  std::vector<tx_delta_run> runs;
  const bool exact = input->Odd(3);
  for (int64_t p = 0; p < 3; p++) {
    weights[p].assign(static_cast<size_t>(kNumel[p] * (p == 2 ? 4 : 2)), 0x3c);
    changed[p].assign(static_cast<size_t>((kNumel[p] + 7) / 8), 0);
    distances[p].assign(static_cast<size_t>((kNumel[p] + 1) / 2), 0);
    moved[p].assign(static_cast<size_t>(2 * ((kNumel[p] + 127) / 128)), 0x3a);
    for (uint32_t i = 0; i < 40; i++) {
      const int64_t at = (input->Byte() * 37 + i * 97) % kNumel[p];
      weights[p][static_cast<size_t>(at * (p == 2 ? 4 : 2))] ^= 1;
      changed[p][static_cast<size_t>(at / 8)] |= static_cast<uint8_t>(1 << at % 8);
      distances[p][static_cast<size_t>(at / 2)] |= static_cast<uint8_t>(1 << 4 * (at % 2));
    }
    tx_delta_run run = {};
    run.param = p;
    run.weights = {weights[p].data(), kNumel[p], kDtypes[p], 0};
    run.changed = {changed[p].data(), static_cast<int64_t>(changed[p].size()), TX_U8, 0};
    if (!exact || p == 2) run.moved = {moved[p].data(), static_cast<int64_t>(moved[p].size() / 2), TX_BF16, 0};
    if (exact && p < 2) run.distances = {distances[p].data(), static_cast<int64_t>(distances[p].size()), TX_U8, 0};
    runs.push_back(run);
  }
  tx_delta_encode_args args = TX_DELTA_ENCODE_ARGS_INIT;
  args.n_params = 3;
  args.params = table;
  args.n_runs = 3;
  args.runs = runs.data();
  args.sliceable = input->Odd(2);
  args.steps = input->Odd(2);
  tx_delta_message message = {};
  CHECK(tx_delta_encode(&args, &chain, nullptr, &message, nullptr) == TX_OK);
  const auto *data = static_cast<const uint8_t *>(message.data);
  std::vector<uint8_t> bytes(data, data + message.bytes);
  tx_delta_free(&message);
  return bytes;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  Engine engine(input.Odd(3));
  std::vector<uint8_t> bytes;
  if (input.Odd(4)) {
    bytes = input.Bytes(4096);
  } else {
    bytes = Encode(&input);
    for (uint32_t i = input.Byte() % 32; i > 0; i--)
      bytes[(input.Byte() * 256u + input.Byte()) % bytes.size()] = input.Byte();
    if (!input.Odd(4)) {
      const uint64_t sum = tx_xxh64(bytes.data(), static_cast<int64_t>(bytes.size()) - 8);
      std::memcpy(bytes.data() + bytes.size() - 8, &sum, sizeof sum);
    }
  }
  const tx_tensor message = {bytes.data(), static_cast<int64_t>(bytes.size()), TX_U8, 0};
  tx_delta_info info = TX_DELTA_INFO_INIT;
  if (tx_delta_info_of(message, &info, nullptr) == TX_OK) {
    std::vector<tx_delta_param> params(static_cast<size_t>(info.n_params));
    if (tx_delta_params_of(message, info.n_params, params.data(), nullptr) == TX_OK) {
      for (const tx_delta_param &param : params)
        CHECK(std::strlen(param.name) > 0 && param.numel >= 0);
    }
  }
  const std::vector<uint8_t> before[3] = {engine.memory[0], engine.memory[1], engine.memory[2]};
  tx_error error;
  const tx_status status = tx_delta_apply(engine.receiver, 1, &message, input.Odd(2), nullptr, &error);
  for (int64_t p = 0; p < 3; p++) {
    const std::vector<uint8_t> &now = engine.memory[p];
    if (status != TX_OK) CHECK(now == before[p]);
    for (size_t i = 0; i < kGuardBytes; i++)
      CHECK(now[i] == 0x3c && now[now.size() - 1 - i] == 0x3c);
  }
  return 0;
}
