// The tensor lists of a tx_adamw_args, with one entry per parameter in each list.
#ifndef TESTS_CORE_ADAMW_LISTS_H
#define TESTS_CORE_ADAMW_LISTS_H

#include <vector>

#include "csrc/torch_ext.h"

struct AdamwLists {
  std::vector<tx_tensor> params, grads, exp_avgs, exp_avg_sqs, masters, scales, steps, checksums;
  std::vector<tx_meta> meta;

  // Points args at all lists except checksums, which are optional in a call.
  void Lend(tx_adamw_args *args) {
    args->n = static_cast<int64_t>(params.size());
    args->params = params.data();
    args->grads = grads.data();
    args->exp_avgs = exp_avgs.data();
    args->exp_avg_sqs = exp_avg_sqs.data();
    args->masters = masters.data();
    args->scales = scales.data();
    args->steps = steps.data();
    args->meta = meta.data();
  }
  std::vector<tx_tensor *> Tensors() {
    std::vector<tx_tensor *> all;
    for (auto *list : {&params, &grads, &exp_avgs, &exp_avg_sqs, &masters, &scales, &steps, &checksums})
      for (tx_tensor &t : *list)
        all.push_back(&t);
    return all;
  }
};

#endif
