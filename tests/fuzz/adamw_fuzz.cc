// The step: any dtypes, sizes, hyper-parameters and tables of places, optional outputs, and parameters that share
// memory.
#include "tests/fuzz/adamw_input.h"
#include "tests/fuzz/extras_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  fuzz::Memory memory(&input);
  fuzz::Adamw call(&input, &memory);
  if (input.Odd(4)) fuzz::MakeOneOdd(&input, call.Tensors());
  if (input.Odd(4)) call.MakeNumbersOdd(&input);
  if (input.Odd(32) && call.params.size() > 1) {  // memory that would be written twice
    auto tensors = call.Tensors();
    *tensors[input.Below(static_cast<uint32_t>(tensors.size()))] = call.params[0];
  }
  const tx_adamw_args *args = call.Args(&input);
  fuzz::Extras extras(&input, &memory, call.params, call.masters);
  extras.Lend(&call.args);
  tx_error error = {};
  const tx_status legal = tx_adamw_check(args, &error);
  const tx_status status = fuzz::Operate(
      &input, &memory, [&](const tx_parallel *parallel, tx_error *why) { return tx_adamw(args, parallel, why); });
  if (legal != TX_OK) CHECK(status != TX_OK && fuzz::IsSentence(error));
  return 0;
}
