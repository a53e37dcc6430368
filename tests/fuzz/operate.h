// Calls of operators: tensors that may be invalid, and what must hold for every call.
#ifndef TESTS_FUZZ_OPERATE_H
#define TESTS_FUZZ_OPERATE_H

#include <initializer_list>

#include "csrc/torch_ext_advanced.h"
#include "tests/fuzz/fuzz.h"

namespace fuzz {

inline constexpr tx_dtype kPlain[] = {TX_BF16, TX_F32, TX_F16};

// The number of elements: around the sizes of blocks and tiles, and sometimes enough for several threads.
inline int64_t Numel(Input *input) {
  static const int64_t kNumels[] = {1, 127, 128, 129, 300, 0, 1024, 1100, 4095, 4100};
  if (input->Odd(64)) return 16384 + input->Below(3000);
  return input->Odd(2) ? input->Below(600) : input->Of(kNumels);
}

inline int64_t Blocks(int64_t numel, int64_t block = TX_BLOCK) {
  return (numel + block - 1) / block;
}

// Makes a tensor unusual: it has to be rejected, or the change does not matter. The tensor never claims more memory
// than it has, except for numbers that no memory can have.
inline void MakeOdd(Input *input, tx_tensor *t) {
  switch (input->Below(5)) {
    case 0:
      t->numel = input->I64();
      if (t->numel >= 0 && t->numel < int64_t{1} << 56) t->numel = -1 - t->numel;
      break;
    case 1:
      t->dtype = static_cast<tx_dtype>(input->I32() | 64); /* not a dtype's code */
      break;
    case 2:
      t->data = nullptr;
      break;
    case 3:
      t->numel = 0;
      break;
    default:
      if (t->numel > 0) { /* the memory still ends at the same address */
        const int64_t cut = 1 + input->Below(t->numel > 200 ? 200 : static_cast<uint32_t>(t->numel));
        t->data = static_cast<uint8_t *>(t->data) + cut * SizeOf(t->dtype);
        t->numel -= cut;
      }
  }
}

inline void MakeOneOdd(Input *input, std::vector<tx_tensor *> tensors) {
  MakeOdd(input, tensors[input->Below(static_cast<uint32_t>(tensors.size()))]);
}

inline std::vector<tx_tensor *> All(std::initializer_list<std::vector<tx_tensor> *> lists) {
  std::vector<tx_tensor *> all;
  for (auto *list : lists) {
    for (tx_tensor &t : *list)
      all.push_back(&t);
  }
  return all;
}

// Makes a call, call(parallel, error), as fuzz::Answer does. The resulting bits must be the same for any other
// instruction set and number of threads.
template <typename Call>
tx_status Operate(Input *input, Memory *memory, Call call) {
  const Parallel parallel(input);
  int32_t n_isas = 0;
  while (tx_isa_name(n_isas))
    n_isas++;
  const char *const first = tx_isa_name(static_cast<int32_t>(input->Below(static_cast<uint32_t>(n_isas))));
  const char *const second = tx_isa_name(static_cast<int32_t>(input->Below(static_cast<uint32_t>(n_isas))));
  bool again = false;
  const tx_status status = Answer(memory, [&](tx_error *error) {
    CHECK(tx_isa_select(again ? second : first, nullptr) == TX_OK);
    const bool plain = again && parallel.get() && parallel.get()->size == sizeof(tx_parallel);
    again = true;
    return call(plain ? nullptr : parallel.get(), error);
  });
  return status;
}

}  // namespace fuzz

#endif
