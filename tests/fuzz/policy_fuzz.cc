// Configurations: any keys with any values, from mappings and from hooks; and policies as another program, or a damaged
// checkpoint, could return them.
#include <cfloat>
#include <cmath>

#include "tests/fuzz/fuzz.h"

namespace {

const char *const kWords[] = {"fp32",     "bf16",        "fp16",           "fp8",  "auto", "None",     "8bit",
                              "no_shard", "optim_grads", "bf16_remainder", "True", "on",   "dithered", "adamw"};

int32_t KindOf(const tx_policy_field &field) {
  switch (field.type) {
    case TX_FIELD_F64:
      return TX_VALUE_FLOAT;
    case TX_FIELD_I64:
    case TX_FIELD_I32:
      return TX_VALUE_INT;
    case TX_FIELD_BOOL:
      return TX_VALUE_BOOL;
    default:
      return TX_VALUE_TEXT;
  }
}

// Settings, and the texts that they point to.
struct Settings {
  std::deque<std::string> texts;
  std::vector<tx_setting> list;

  explicit Settings(fuzz::Input *input) {
    for (uint32_t n = input->Below(5); n > 0; n--) {
      tx_setting s = {};
      const tx_policy_field *field = tx_policy_field_at(static_cast<int32_t>(input->Below(TX_POLICY_FIELDS)));
      texts.push_back(field->name);
      if (input->Odd(8)) texts.back() += input->Text(12);
      if (input->Odd(16)) texts.back() = input->Text(50);
      s.key = texts.back().c_str();
      s.kind = input->Odd(4) ? static_cast<int32_t>(input->Below(6)) : KindOf(*field);
      if (input->Odd(32)) s.kind = input->I32();
      texts.push_back(input->Odd(4) ? input->Text(60) : kWords[input->Below(14)]);
      s.text = texts.back().c_str();
      s.integer = input->Odd(4) ? input->I64() : input->Below(8);
      s.number = input->F64();
      list.push_back(s);
    }
  }
  int64_t n() const { return static_cast<int64_t>(list.size()); }
};

tx_status Hook(void *ctx, const tx_policy *policy, const tx_setting **settings, int64_t *n, tx_error *error) {
  CHECK(policy->size == sizeof *policy && error);
  const auto *mine = static_cast<const Settings *>(ctx);
  *settings = mine->list.data();
  *n = mine->n();
  return TX_OK;
}

// Every value is legal in its row, and the table of fields shows it.
void CheckPolicy(const tx_policy &policy, const tx_origin *origins) {
  for (int32_t i = 0; i < TX_POLICY_FIELDS; i++) {
    const tx_policy_field *field = tx_policy_field_at(i);
    const auto *at = reinterpret_cast<const char *>(&policy) + field->offset;
    int32_t value = 0;
    if (field->bytes == sizeof value) std::memcpy(&value, at, sizeof value);
    if (field->type == TX_FIELD_BOOL) CHECK(value == 0 || value == 1);
    if (field->type == TX_FIELD_DTYPE) CHECK(value >= TX_NONE && value <= TX_F8_E5M2);
    if (field->type == TX_FIELD_ENUM) CHECK(value >= 0 && value < 8);
    if (field->type == TX_FIELD_TEXT) CHECK(strnlen(at, TX_TEXT_CAPACITY) < TX_TEXT_CAPACITY);
    if (origins) CHECK(origins[i].source >= TX_SOURCE_DEFAULT && origins[i].source <= TX_SOURCE_HOOK);
  }
  const int64_t length = tx_policy_describe(&policy, origins, nullptr, 0);
  CHECK(length > 0);
  std::vector<char> text(static_cast<size_t>(length) + 1, 'x');
  CHECK(tx_policy_describe(&policy, origins, text.data(), length + 1) == length);
  CHECK(static_cast<int64_t>(std::strlen(text.data())) == length);
}

// Calls the functions that take a policy.
void Use(fuzz::Input *input, const tx_policy &policy, const tx_origin *origins) {
  const auto dtype = static_cast<tx_dtype>(input->Odd(4) ? input->I32() : 1 + static_cast<int32_t>(input->Below(4)));
  fuzz::Memory memory(input);
  const tx_tensor bytes = memory.Take(static_cast<int64_t>(sizeof(tx_policy)), TX_U8);
  const tx_tensor more = memory.Take(static_cast<int64_t>(sizeof(tx_origin)) * TX_POLICY_FIELDS, TX_U8);
  auto *row = static_cast<tx_policy *>(bytes.data);
  auto *row_origins = static_cast<tx_origin *>(more.data);
  row->size = sizeof *row;
  const tx_status status =
      fuzz::Answer(&memory, [&](tx_error *error) { return tx_policy_row(&policy, origins, dtype, row, error); });
  if (status == TX_OK) CheckPolicy(*row, nullptr);
  const Settings settings(input);
  if (fuzz::Answer(&memory, [&](tx_error *error) {
        return tx_policy_with(&policy, origins, settings.list.data(), settings.n(), row, row_origins, error);
      }) == TX_OK) {
    CheckPolicy(*row, row_origins);
  }
  const int64_t numel = input->I64();
  const int32_t keep = input->I32();
  tx_dtype m = TX_NONE, v = TX_NONE;
  if (tx_policy_moments(&policy, numel, keep, &m, &v, nullptr) == TX_OK) CHECK(m != TX_NONE && v != TX_NONE);

  tx_scale scale = TX_SCALE_INIT;
  const bool fits = policy.initial_loss_scale >= policy.min_loss_scale && policy.initial_loss_scale <= FLT_MAX &&
                    policy.loss_scale_growth_factor <= FLT_MAX;
  CHECK((tx_scale_from_policy(&policy, &scale, nullptr) == TX_OK) == fits);
  if (!fits) return;
  for (uint32_t i = input->Below(30); i > 0; i--) {
    const int32_t found_inf = static_cast<int32_t>(input->Below(2));
    CHECK(tx_scale_update(&scale, found_inf, nullptr) == TX_OK);
    CHECK(scale.scale >= scale.min_scale && std::isfinite(static_cast<float>(scale.scale)));
  }
}

// As they could be in a damaged checkpoint.
void UseDamaged(fuzz::Input *input, tx_policy policy) {
  const std::vector<uint8_t> bytes = input->Bytes(8);
  const uint32_t at = input->Below(sizeof policy);
  for (size_t i = 0; i < bytes.size() && at + i < sizeof policy; i++)
    reinterpret_cast<uint8_t *>(&policy)[at + i] = bytes[i];
  (void)tx_policy_describe(&policy, nullptr, nullptr, 0);
  tx_policy row = TX_POLICY_INIT;
  tx_dtype m = TX_NONE, v = TX_NONE;
  (void)tx_policy_row(&policy, nullptr, TX_F32, &row, nullptr);
  (void)tx_policy_moments(&policy, 5000, 0, &m, &v, nullptr);
  tx_scale scale = {sizeof scale, input->F64(), input->F64(), input->F64(), input->I64(),
                    input->I64(), input->F64(), input->I64(), input->I64()};
  (void)tx_scale_from_policy(&policy, &scale, nullptr);
  (void)tx_scale_update(&scale, input->I32(), nullptr);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  Settings config(&input), optimizer(&input), ddp(&input), hook(&input);
  tx_policy_args args = TX_POLICY_ARGS_INIT;
  args.n_config = config.n();
  args.config = config.list.data();
  args.optimizer = {optimizer.n(), optimizer.list.data(), input.Odd(4) ? Hook : nullptr, &hook};
  args.ddp = {ddp.n(), ddp.list.data(), input.Odd(4) ? Hook : nullptr, &hook};
  args.model_dtype = static_cast<int32_t>(input.Below(4));
  args.preset = static_cast<int32_t>(input.Below(2));
  args.full_shard = static_cast<int32_t>(input.Below(2));
  if (input.Odd(4)) args.bf16 = static_cast<int32_t>(input.Below(3));
  if (input.Odd(4)) args.fp16 = static_cast<int32_t>(input.Below(3));
  if (input.Odd(16)) args.shard_dtype = TX_F32;
  if (input.Odd(32)) args.model_dtype = input.I32();
  if (input.Odd(32)) args.preset = input.I32();
  if (input.Odd(64)) args.n_config = -1;

  fuzz::Memory memory(&input);
  const tx_tensor bytes = memory.Take(static_cast<int64_t>(sizeof(tx_policy)), TX_U8);
  const tx_tensor more = memory.Take(static_cast<int64_t>(sizeof(tx_origin)) * TX_POLICY_FIELDS, TX_U8);
  auto *policy = static_cast<tx_policy *>(bytes.data);
  auto *origins = static_cast<tx_origin *>(more.data);
  policy->size = sizeof *policy;
  const tx_status status = fuzz::Answer(
      &memory, [&](tx_error *error) { return tx_policy_resolve(&args, policy, origins, TX_POLICY_FIELDS, error); });
  if (status != TX_OK) return 0;
  CheckPolicy(*policy, origins);
  Use(&input, *policy, origins);
  UseDamaged(&input, *policy);
  return 0;
}
