// Names of dtypes, strategies and parameters, and codes that do not exist.
#include "tests/fuzz/fuzz.h"

namespace {

const char *const kKeys[] = {"main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "grad_comm_dtype", "lr", ""};

void CheckCodes(int32_t code) {
  const auto dtype = static_cast<tx_dtype>(code);
  int64_t bytes = -7;
  tx_error error = {};
  const tx_status status = tx_dtype_size(dtype, &bytes, &error);
  CHECK(status == TX_OK ? bytes >= 1 && bytes <= 16 : bytes == -7 && fuzz::IsSentence(error));
  CHECK((tx_dtype_torch_name(dtype) != nullptr) == (status == TX_OK));
  CHECK(tx_dtype_name(dtype)[0] != '\0');
  CHECK(tx_dtype_is_floating(dtype) == 0 || status == TX_OK);
  CHECK(tx_status_name(static_cast<tx_status>(code))[0] != '\0');
  CHECK(tx_source_name(static_cast<tx_source>(code))[0] != '\0');
  CHECK((tx_operator_name(code) != nullptr) == (tx_operator_schema(code) != nullptr));
  (void)tx_isa_name(code);
  (void)tx_policy_field_at(code);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  const int32_t code = input.I32();
  std::string key = kKeys[input.Below(6)];
  if (input.Odd(4)) key = input.Text(40);
  const std::string text = input.Text(300);
  CheckCodes(code);

  fuzz::Memory memory(&input);
  const tx_tensor found = memory.One<int32_t>(TX_C128, TX_I32);
  auto *const dtype = static_cast<tx_dtype *>(found.data);
  const bool parsed =
      fuzz::Answer(&memory, [&](tx_error *error) { return tx_dtype_parse(text.c_str(), dtype, error); }) == TX_OK;
  if (parsed && *dtype != TX_NONE) {  // the dtype's own name is one of its names
    tx_dtype again = TX_NONE;
    CHECK(tx_dtype_parse(tx_dtype_name(*dtype), &again, nullptr) == TX_OK && again == *dtype);
  }
  const bool coerced = fuzz::Answer(&memory, [&](tx_error *error) {
                         return tx_dtype_coerce(key.c_str(), text.c_str(), dtype, error);
                       }) == TX_OK;
  CHECK(parsed || !coerced);
  if (coerced) CHECK(tx_dtype_check_key(key.c_str(), *dtype, nullptr) == TX_OK);
  (void)fuzz::Answer(
      &memory, [&](tx_error *error) { return tx_dtype_check_key(key.c_str(), static_cast<tx_dtype>(code), error); });
  (void)fuzz::Answer(&memory, [&](tx_error *error) {
    return tx_strategy_find(key.c_str(), text.c_str(), static_cast<int32_t *>(found.data), error);
  });
  CHECK(tx_param_id(text.c_str()) >= 0);
  return 0;
}
