// Builds parameters for the planners from the fuzzer's bytes.
#ifndef TESTS_FUZZ_LAYOUT_INPUT_H
#define TESTS_FUZZ_LAYOUT_INPUT_H

#include "csrc/torch_ext_advanced.h"
#include "tests/fuzz/fuzz.h"

namespace fuzz {

struct Layout {
  std::deque<std::vector<int64_t>> shapes;
  std::deque<std::string> names;
  std::vector<tx_layout_param> params;
  std::vector<int64_t> order;
  tx_layout_args args = TX_LAYOUT_ARGS_INIT;

  explicit Layout(Input *input, uint32_t oddness = 32) {
    const int64_t n = input->Below(8);
    for (int64_t i = 0; i < n; i++)
      params.push_back(Param(input, i, oddness));
    for (int64_t i = 0; i < n; i++)
      order.push_back(i);
    for (int64_t i = n; i-- > 1;)
      std::swap(order[static_cast<size_t>(i)], order[input->Below(static_cast<uint32_t>(i) + 1)]);
    if (n > 0 && input->Odd(oddness)) order[input->Below(static_cast<uint32_t>(n))] = input->I64();
    args.n = input->Odd(oddness) ? -1 - input->Byte() : n;
    args.params = params.data();
    args.order = input->Odd(4) ? order.data() : nullptr;
    args.world = input->Odd(oddness) ? input->I64() : 1 + input->Below(9);
    if (input->Odd(2)) args.cap = input->Odd(oddness) ? input->I64() : 1 + input->Below(20000);
    args.overlap = input->Odd(8) ? input->I32() : 1;
    args.high_bandwidth = input->Odd(8) ? input->I32() : 0;
  }

 private:
  tx_layout_param Param(Input *input, int64_t i, uint32_t oddness) {
    static const int32_t kDtypes[] = {TX_BF16, TX_F32, TX_U8, TX_F16, TX_C128};
    const int32_t dtype = input->Of(kDtypes), wire = input->Odd(4) ? TX_U8 : dtype;
    const int64_t numel = input->Odd(oddness) ? input->I64() : input->Below(30000);
    tx_layout_param p = {nullptr, nullptr, 0, numel, -1, 0, dtype, dtype, wire, 0};
    if (i > 0 && input->Odd(6)) {
      p.tied = input->Below(static_cast<uint32_t>(i));
      if (!input->Odd(oddness)) p.numel = params[static_cast<size_t>(p.tied)].numel;
    }
    if (input->Odd(oddness)) p.tied = input->I64();
    if (input->Odd(6)) p.key = input->I64();
    if (input->Odd(oddness)) p.grad_dtype = input->I32();
    if (input->Odd(oddness)) p.device = input->I32();
    if (input->Odd(3)) {
      names.push_back(input->Text(200));
      p.name = names.back().c_str();
    }
    if (input->Odd(3)) {
      shapes.push_back({p.numel, 1, 1});
      if (input->Odd(oddness)) shapes.back()[input->Below(3)] = input->I64();
      p.shape = shapes.back().data();
      p.ndim = input->Odd(oddness) ? -1 : 1 + static_cast<int64_t>(input->Below(3));
    }
    return p;
  }
};

}  // namespace fuzz

#endif
