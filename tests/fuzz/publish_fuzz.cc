// A publisher that gets any legal requests, and an engine that follows it: every bit arrives, on any instruction set,
// one version at a time or several at once. Forged bytes with a correct checksum have the same result everywhere.
#include <cmath>
#include <cstring>
#include <vector>

#include "csrc/core/delta_bytes.h"
#include "csrc/math/delta_value.h"
#include "csrc/torch_ext_delta.h"
#include "tests/fuzz/fuzz.h"

namespace {

using Bytes = std::vector<uint8_t>;

constexpr int64_t kNumel[] = {700, 8300, 1300};
constexpr tx_dtype kDtypes[] = {TX_BF16, TX_F16, TX_F32};
constexpr int64_t kItems[] = {2, 2, 4};
constexpr size_t kGuardBytes = 64;
const tx_delta_param kTable[] = {
    {"a", kNumel[0], kDtypes[0], 0}, {"b", kNumel[1], kDtypes[1], 0}, {"c", kNumel[2], kDtypes[2], 0}};

uint32_t Get(const uint8_t *weights, int64_t i, size_t p) {
  uint32_t bits = 0;
  std::memcpy(&bits, weights + i * kItems[p], static_cast<size_t>(kItems[p]));
  return bits;
}
void Set(uint8_t *weights, int64_t i, size_t p, uint32_t bits) {
  std::memcpy(weights + i * kItems[p], &bits, static_cast<size_t>(kItems[p]));
}
// A master that rounds to the given weight. For an infinite weight, a number above the largest finite one.
float MasterOf(uint32_t bits, tx_dtype dtype) {
  if (dtype == TX_F32) return tx_f32_from_bits(bits);
  const auto low = static_cast<uint16_t>(bits);
  const float x = dtype == TX_F16 ? tx_f32_from_f16(low) : tx_f32_from_bf16(low);
  return std::isinf(x) ? std::copysign(dtype == TX_F16 ? 1e5f : 3.4e38f, x) : x;
}

class Publisher {
 public:
  bool exact, checks, sliceable;

  explicit Publisher(fuzz::Input *input) {
    exact = input->Odd(3);
    checks = !input->Odd(3);
    sliceable = input->Odd(4);
    random_ = input->Byte();
    for (size_t p = 0; p < 3; p++) {
      const auto n = static_cast<size_t>(kNumel[p]);
      weights_[p].resize(n * static_cast<size_t>(kItems[p]));
      for (int64_t i = 0; i < kNumel[p]; i++) {
        Set(weights_[p].data(), i, p, p == 2 ? 0x3c000000u | (Next() & 0x80ffffffu) : 0x3800u | (Next() & 0x87ffu));
        masters_[p].push_back(MasterOf(Get(weights_[p].data(), i, p), kDtypes[p]));
      }
      last_[p] = weights_[p];
      changed_[p].resize((n + 7) / 8);
      moved_[p].resize((n + TX_BLOCK - 1) / TX_BLOCK);
      distances_[p].resize((n + 1) / 2);
      checksums_[p].resize((n + TX_CHECKSUM - 1) / TX_CHECKSUM);
    }
    const uint64_t id[2] = {1, 2};
    CHECK(tx_delta_chain_begin(3, kTable, id, 0, 1, &chain_, nullptr) == TX_OK);
    const std::vector<tx_delta_run> runs = Runs();
    CHECK(tx_delta_renew(3, runs.data(), nullptr, nullptr) == TX_OK);
  }

  // Every weight is visited at most once.
  void Step(fuzz::Input *input) {
    steps_++;
    for (size_t p = 0; p < 3; p++) {
      const uint32_t stride = 1 + input->Below(1000), how = input->Below(8);
      const float by = std::ldexp(1.0f, static_cast<int>(input->Byte()) - 140);
      random_ = random_ << 8 | input->Byte();
      for (int64_t i = Next() % stride; i < kNumel[p]; i += 1 + Next() % stride) {
        const uint32_t was = Get(weights_[p].data(), i, p);
        const float master = masters_[p][static_cast<size_t>(i)];
        const float sign = Next() & 1 ? 1.0f : -1.0f;
        switch (how) {
          case 0:
          case 1:
            Move(p, i, master + sign * by * std::fabs(master));
            break;
          case 2:
            Move(p, i, master + sign * by);
            break;
          case 3:
            Move(p, i, MasterOf(Next() & (p == 2 ? ~0u : 0xffffu), kDtypes[p]));
            break;
          case 4:
            Move(p, i, sign * (Next() % 3 == 0 ? 0.0f : Next() % 3 == 0 ? 1e5f : 1.0f));
            break;
          case 5:
            Move(p, i, -master);
            break;
          default:
            Move(p, i, MasterOf(was ^ (1u << Next() % 4), kDtypes[p]));
        }
      }
    }
  }
  // An external write to a weight, which tx_delta_mark finds.
  void Write(fuzz::Input *input) {
    const size_t p = input->Below(2);
    const int64_t i = (input->Byte() * 256 + input->Byte()) % kNumel[p];
    const float x = 0.25f * static_cast<float>(1 + input->Byte());
    float &master = masters_[p][static_cast<size_t>(i)];
    Set(weights_[p].data(), i, p, Rounded(x, kDtypes[p]));
    tx_delta_written tensors[2] = {};
    for (size_t k = 0; k < 2; k++) {
      tensors[k].weights = {weights_[k].data(), kNumel[k], kDtypes[k], 0};
      tensors[k].masters = {masters_[k].data(), kNumel[k], TX_F32, 0};
      tensors[k].moved = {moved_[k].data(), static_cast<int64_t>(moved_[k].size()), TX_BF16, 0};
    }
    const bool differs = Rounded(master, kDtypes[p]) != Rounded(x, kDtypes[p]);
    CHECK(tx_delta_mark(2, tensors, nullptr, nullptr) == TX_OK);
    CHECK((tensors[p].marked != 0) == differs && tensors[1 - p].marked == 0);
    master = MasterOf(Get(weights_[p].data(), i, p), kDtypes[p]);
    changed_[p][static_cast<size_t>(i / 8)] |= static_cast<uint8_t>(differs << i % 8);
    Distance(p, i);
  }

  Bytes Encode() {
    const std::vector<tx_delta_run> runs = Runs();
    tx_delta_encode_args args = TX_DELTA_ENCODE_ARGS_INIT;
    args.n_params = 3;
    args.params = kTable;
    args.n_runs = 3;
    args.runs = runs.data();
    args.sliceable = sliceable;
    args.steps = steps_ == 1;
    tx_delta_message message = {};
    CHECK(tx_delta_encode(&args, &chain_, nullptr, &message, nullptr) == TX_OK);
    const auto *data = static_cast<const uint8_t *>(message.data);
    const Bytes bytes(data, data + message.bytes);
    tx_delta_free(&message);
    for (size_t p = 0; p < 3; p++)
      last_[p] = weights_[p];
    steps_ = 0;
    return bytes;
  }

  const Bytes &weights(size_t p) const { return weights_[p]; }
  bool Keeps(const Publisher &other) const {
    for (size_t p = 0; p < 3; p++) {
      if (changed_[p] != other.changed_[p] || moved_[p] != other.moved_[p] || checksums_[p] != other.checksums_[p] ||
          distances_[p] != other.distances_[p]) {
        return false;
      }
    }
    return std::memcmp(&chain_, &other.chain_, sizeof chain_) == 0;
  }

 private:
  uint32_t Next() {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(random_ >> 33);
  }
  static uint32_t Rounded(float x, tx_dtype dtype) {
    return dtype == TX_F32 ? tx_bits_from_f32(x) : dtype == TX_F16 ? tx_f16_from_f32(x) : tx_bf16_from_f32(x);
  }
  void Move(size_t p, int64_t i, float x) {
    float &master = masters_[p][static_cast<size_t>(i)];
    uint16_t &bound = moved_[p][static_cast<size_t>(i / TX_BLOCK)];
    const double far = std::fabs(static_cast<double>(x) - master), sum = tx_f32_from_bf16(bound) + far;
    const uint32_t up = sum < 3e38 ? tx_bits_from_f32(std::nextafter(static_cast<float>(sum), INFINITY)) + 0xffff : 0;
    if (far != 0) bound = sum < 3e38 ? static_cast<uint16_t>(up >> 16) : 0x7f80;
    master = x;
    const uint32_t bits = Rounded(x, kDtypes[p]);
    if (bits != Get(weights_[p].data(), i, p))
      changed_[p][static_cast<size_t>(i / 8)] |= static_cast<uint8_t>(1 << i % 8);
    Set(weights_[p].data(), i, p, bits);
    Distance(p, i);
  }
  void Distance(size_t p, int64_t i) {
    if (p == 2) return;
    const int64_t d = tx_delta_ordered(Get(weights_[p].data(), i, p), kDtypes[p]) -
                      tx_delta_ordered(Get(last_[p].data(), i, p), kDtypes[p]);
    uint8_t &two = distances_[p][static_cast<size_t>(i / 2)];
    const int32_t shift = i % 2 ? 4 : 0, code = d < -7 || d > 7 ? 8 : static_cast<int32_t>(d) & 15;
    two = static_cast<uint8_t>((two & ~(15 << shift)) | code << shift);
  }
  std::vector<tx_delta_run> Runs() {
    const auto n = [](const auto &v) { return static_cast<int64_t>(v.size()); };
    std::vector<tx_delta_run> runs(3);
    for (size_t p = 0; p < 3; p++) {
      runs[p].param = static_cast<int64_t>(p);
      runs[p].weights = {weights_[p].data(), kNumel[p], kDtypes[p], 0};
      runs[p].changed = {changed_[p].data(), n(changed_[p]), TX_U8, 0};
      runs[p].moved = {moved_[p].data(), n(moved_[p]), TX_BF16, 0};
      if (exact && p < 2) runs[p].distances = {distances_[p].data(), n(distances_[p]), TX_U8, 0};
      if (checks) runs[p].checksums = {checksums_[p].data(), n(checksums_[p]), TX_I64, 0};
    }
    return runs;
  }
  uint64_t random_;
  Bytes weights_[3], last_[3], changed_[3], distances_[3];
  std::vector<float> masters_[3];
  std::vector<uint16_t> moved_[3];
  std::vector<int64_t> checksums_[3];
  tx_delta_chain chain_ = TX_DELTA_CHAIN_INIT;
  int64_t steps_ = 0;
};

// An engine with the publisher's weights of some version; it may lack a part of parameter "a".
struct Engine {
  Bytes memory[3];
  tx_delta_receiver *receiver = nullptr;

  Engine(const Publisher &of, bool sliced) {
    std::vector<tx_delta_piece> pieces;
    for (size_t p = 0; p < 3; p++) {
      memory[p].assign(kGuardBytes, 0x3c);
      memory[p].insert(memory[p].end(), of.weights(p).begin(), of.weights(p).end());
      memory[p].insert(memory[p].end(), kGuardBytes, 0x3c);
      uint8_t *data = memory[p].data() + kGuardBytes;
      const auto param = static_cast<int64_t>(p);
      if (sliced && p == 0) {
        pieces.push_back({param, 0, 70, 5, 10, data, 10, 1});
        pieces.push_back({param, 5, 70, 5, 10, nullptr, 0, 0});
      } else {
        pieces.push_back({param, 0, 1, kNumel[p], 0, data, 0, 1});
      }
    }
    CHECK(tx_delta_open(3, kTable, static_cast<int64_t>(pieces.size()), pieces.data(), &receiver, nullptr) == TX_OK);
  }
  Engine(const Engine &) = delete;
  ~Engine() { tx_delta_close(receiver); }

  tx_status Apply(const std::vector<Bytes> &messages, int32_t verify) {
    std::vector<tx_tensor> tensors;
    for (const Bytes &bytes : messages)
      tensors.push_back({const_cast<uint8_t *>(bytes.data()), static_cast<int64_t>(bytes.size()), TX_U8, 0});
    const Bytes before[3] = {memory[0], memory[1], memory[2]};
    tx_error error;
    const tx_status status =
        tx_delta_apply(receiver, static_cast<int64_t>(tensors.size()), tensors.data(), verify, nullptr, &error);
    for (size_t p = 0; p < 3; p++) {
      if (status != TX_OK) CHECK(memory[p] == before[p]);
      for (size_t i = 0; i < kGuardBytes; i++)
        CHECK(memory[p][i] == 0x3c && memory[p][memory[p].size() - 1 - i] == 0x3c);
    }
    if (status != TX_OK) CHECK(fuzz::IsSentence(error));
    return status;
  }
};

Bytes Merged(const std::vector<Bytes> &messages) {
  std::vector<tx_tensor> tensors;
  for (const Bytes &bytes : messages)
    tensors.push_back({const_cast<uint8_t *>(bytes.data()), static_cast<int64_t>(bytes.size()), TX_U8, 0});
  tx_delta_message merged = {};
  CHECK(tx_delta_merge(static_cast<int64_t>(tensors.size()), tensors.data(), &merged, nullptr) == TX_OK);
  const auto *data = static_cast<const uint8_t *>(merged.data);
  const Bytes bytes(data, data + merged.bytes);
  tx_delta_free(&merged);
  return bytes;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  uint32_t isas = 0;
  while (tx_isa_name(static_cast<int32_t>(isas)))
    isas++;
  const char *one = tx_isa_name(static_cast<int32_t>(input.Below(isas)));
  const char *other = tx_isa_name(static_cast<int32_t>(input.Below(isas)));
  CHECK(tx_isa_select(one, nullptr) == TX_OK);
  Publisher publisher(&input);
  const Publisher first = publisher;
  const bool sliced = input.Odd(4);
  std::vector<Bytes> versions;
  for (uint32_t v = 1 + input.Below(3); v > 0; v--) {
    for (uint32_t steps = (input.Byte() + 1) % 4; steps > 0; steps--)
      publisher.Step(&input);
    if (input.Odd(4)) publisher.Write(&input);
    Publisher again = publisher;
    versions.push_back(publisher.Encode());
    CHECK(tx_isa_select(other, nullptr) == TX_OK);
    CHECK(again.Encode() == versions.back());
    CHECK(again.Keeps(publisher));
    CHECK(tx_isa_select(one, nullptr) == TX_OK);
  }

  const int32_t verify = publisher.checks && !sliced && input.Odd(2) ? TX_DELTA_FULL : TX_DELTA_TOUCHED;
  Engine engine(first, sliced);
  tx_status status = TX_OK;
  if (input.Odd(2)) {
    status = engine.Apply({Merged(versions)}, verify);
  } else if (input.Odd(2)) {
    status = engine.Apply(versions, verify);
  } else {
    for (size_t v = 0; v < versions.size() && status == TX_OK; v++)
      status = engine.Apply({versions[v]}, verify);
  }
  CHECK(status == TX_OK || (sliced && !publisher.sliceable && status == TX_ERROR_MISMATCH));
  for (size_t p = sliced; p < 3 && status == TX_OK; p++)
    CHECK(std::memcmp(engine.memory[p].data() + kGuardBytes, publisher.weights(p).data(),
                      publisher.weights(p).size()) == 0);

  if (!input.Odd(2)) return 0;
  Bytes &forged = versions[input.Below(static_cast<uint32_t>(versions.size()))];
  for (uint32_t i = 1 + input.Byte() % 8; i > 0; i--)
    forged[(input.Byte() * 256u + input.Byte()) % forged.size()] ^= static_cast<uint8_t>(1u << input.Below(8));
  const uint64_t sum = tx_xxh64(forged.data(), static_cast<int64_t>(forged.size()) - 8);
  std::memcpy(forged.data() + forged.size() - 8, &sum, sizeof sum);
  Engine here(first, sliced), there(first, sliced);
  status = here.Apply(versions, verify);
  CHECK(tx_isa_select(other, nullptr) == TX_OK);
  CHECK(there.Apply(versions, verify) == status);
  for (size_t p = 0; p < 3; p++)
    CHECK(here.memory[p] == there.memory[p]);
  return 0;
}
