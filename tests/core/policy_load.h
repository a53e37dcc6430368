// Calls tx_policy_resolve with arguments written as plain text, so that test cases are data (and compile quickly under
// sanitizers).
//
// A load is a list of settings separated by spaces: model=bf16, shard=fp32, bf16=1, fp16=0, preset=conservative,
// full_shard=1; keys of a configuration: config.lr=0.1, opt.exp_avg_dtype=fp32, ddp.bucket_size=5; and keys of a hook's
// answer: opt_hook.lr=1, ddp_hook.bucket_size=5. Values: True, False, None, numbers (1 is an integer, 1.0 a float),
// dtype:float64 for a dtype code; anything else is text. 'Quotes' make a value text that would otherwise be something
// else.
#ifndef TX_TESTS_CORE_POLICY_LOAD_H
#define TX_TESTS_CORE_POLICY_LOAD_H

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

extern "C" {
#include "csrc/core/policy_fields.h"
}
#include "csrc/torch_ext.h"

inline std::vector<std::string> Split(const std::string &text, const std::string &separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + separator.size();
  }
  return parts;
}

// "a=1 b=2" -> {a: 1, b: 2}; of equal names the last one counts.
inline std::map<std::string, std::string> Pairs(const std::string &text) {
  std::map<std::string, std::string> pairs;
  for (const std::string &pair : Split(text, " ")) {
    const size_t equals = pair.find('=');
    pairs[pair.substr(0, equals)] = pair.substr(equals + 1);
  }
  return pairs;
}

inline int32_t DtypeCode(const std::string &name) {
  for (int32_t code = 0; code <= TX_F8_E5M2; code++) {
    if (name == tx_dtype_name(static_cast<tx_dtype>(code))) return code;
  }
  return std::atoi(name.c_str());
}

struct Hook {
  std::vector<tx_setting> answer;
  std::vector<tx_policy> seen;
  tx_status status = TX_OK;

  static tx_status Call(void *ctx, const tx_policy *policy, const tx_setting **settings, int64_t *n, tx_error *error) {
    auto *hook = static_cast<Hook *>(ctx);
    hook->seen.push_back(*policy);
    *settings = hook->answer.data();
    *n = static_cast<int64_t>(hook->answer.size());
    if (hook->status != TX_OK) std::strcpy(error->message, "the hook's own words");
    return hook->status;
  }
};

// The result of tx_policy_resolve.
struct Resolved {
  tx_status status = TX_OK;
  tx_policy policy = TX_POLICY_INIT;
  tx_origin origins[TX_POLICY_FIELDS] = {};
  tx_error error = {};
  Hook hooks[2];  // of the optimizer, of DDP

  // A field as readable text: "bf16", "True".
  std::string operator[](const std::string &field) const {
    char buffer[64];
    tx_text text = tx_text_in(buffer, sizeof buffer);
    tx_policy_format(&policy, tx_policy_find(field.c_str()), &text);
    return buffer;
  }

  // Where a field's value came from: "override", "follows main_grads_dtype".
  std::string Origin(const std::string &field) const {
    const tx_origin &origin = origins[tx_policy_find(field.c_str())];
    std::string text = tx_source_name(static_cast<tx_source>(origin.source));
    if (origin.cause >= 0) text += std::string(" ") + tx_policy_field_at(origin.cause)->name;
    return text;
  }
};

inline tx_setting ParseSetting(const std::string &key, const std::string &value, std::deque<std::string> *storage) {
  tx_setting s = {};
  s.key = storage->emplace_back(key).c_str();
  char *end;
  if (value == "None") {
    s.kind = TX_VALUE_NONE;
  } else if (value == "True" || value == "False") {
    s.kind = TX_VALUE_BOOL;
    s.integer = value == "True";
  } else if (value.rfind("dtype:", 0) == 0) {
    s.kind = TX_VALUE_DTYPE;
    s.integer = DtypeCode(value.substr(6));
  } else if (s.integer = std::strtoll(value.c_str(), &end, 10); !*end && end != value.c_str()) {
    s.kind = TX_VALUE_INT;
  } else if (s.number = std::strtod(value.c_str(), &end); !*end && end != value.c_str()) {
    s.kind = TX_VALUE_FLOAT;
  } else {
    s.kind = TX_VALUE_TEXT;
    s.text = storage->emplace_back(value[0] == '\'' ? value.substr(1, value.size() - 2) : value).c_str();
  }
  return s;
}

inline Resolved Resolve(const std::string &load, tx_status hook_status = TX_OK) {
  Resolved r;
  std::deque<std::string> storage;
  std::map<std::string, std::vector<tx_setting>> lists;
  tx_policy_args args = TX_POLICY_ARGS_INIT;
  for (const std::string &token : Split(load, " ")) {
    const size_t equals = token.find('=');
    const std::string name = token.substr(0, equals), value = token.substr(equals + 1);
    const size_t dot = name.find('.');
    if (dot != std::string::npos) {
      lists[name.substr(0, dot)].push_back(ParseSetting(name.substr(dot + 1), value, &storage));
    } else if (name == "model") {
      args.model_dtype = DtypeCode(value);
    } else if (name == "shard") {
      args.shard_dtype = DtypeCode(value);
    } else if (name == "bf16") {
      args.bf16 = std::stoi(value);
    } else if (name == "fp16") {
      args.fp16 = std::stoi(value);
    } else if (name == "full_shard") {
      args.full_shard = std::stoi(value);
    } else if (name == "preset") {
      args.preset = value == "conservative" ? TX_PRESET_CONSERVATIVE : std::atoi(value.c_str());
    } else {
      ADD_FAILURE() << "what is " << token << " in " << load << "?";
    }
  }
  const auto list = [&](const char *name, int64_t *n, const tx_setting **settings) {
    *n = static_cast<int64_t>(lists[name].size());
    *settings = lists[name].data();
  };
  list("config", &args.n_config, &args.config);
  list("opt", &args.optimizer.n, &args.optimizer.settings);
  list("ddp", &args.ddp.n, &args.ddp.settings);
  r.hooks[0].answer = lists["opt_hook"];
  r.hooks[1].answer = lists["ddp_hook"];
  tx_policy_overrides *sides[2] = {&args.optimizer, &args.ddp};
  for (int i = 0; i < 2; i++) {
    r.hooks[i].status = hook_status;
    sides[i]->hook = r.hooks[i].answer.empty() ? nullptr : Hook::Call;
    sides[i]->hook_ctx = &r.hooks[i];
  }
  r.status = tx_policy_resolve(&args, &r.policy, r.origins, TX_POLICY_FIELDS, &r.error);
  return r;
}

template <class Case>
std::string Id(const testing::TestParamInfo<Case> &info) {
  return info.param.id;
}

// The rows of statement A2 of semantics.md, as fields.
#define BF16                                                                                                        \
  "param_dtype=bf16 main_params_dtype=fp32 exp_avg_dtype=bf16 exp_avg_sq_dtype=bf16 main_grads_dtype=bf16 "         \
  "grad_comm_dtype=bf16 grad_reduce_in_fp32=False use_precision_aware_optimizer=True store_param_remainders=False " \
  "bf16=True fp16=False"
#define FP16                                                                                                       \
  "param_dtype=fp16 main_params_dtype=fp32 exp_avg_dtype=fp32 exp_avg_sq_dtype=fp32 main_grads_dtype=fp32 "        \
  "grad_comm_dtype=fp32 grad_reduce_in_fp32=True use_precision_aware_optimizer=True store_param_remainders=False " \
  "initial_loss_scale=32768 min_loss_scale=1 bf16=False fp16=True"
#define FP32                                                                                                \
  "param_dtype=fp32 main_params_dtype=fp32 exp_avg_dtype=fp32 exp_avg_sq_dtype=fp32 main_grads_dtype=fp32 " \
  "grad_comm_dtype=fp32 grad_reduce_in_fp32=True use_precision_aware_optimizer=False bf16=False fp16=False"

// A7: every state in fp32.
#define ALL_FP32                                                                                                \
  "main_params_dtype=fp32 exp_avg_dtype=fp32 exp_avg_sq_dtype=fp32 main_grads_dtype=fp32 grad_comm_dtype=fp32 " \
  "grad_reduce_in_fp32=True preset=conservative"

// A8: the five keys that pass through verbatim, as settings (side: "config.") or as fields (side: "").
#define FIVE(side) \
  side "optimizer=lion " side "lr=1.5e-06 " side "min_lr=0 " side "clip_grad=0.7 " side "weight_decay=0.33"

// B1: what the flag full_shard sets.
#define FULL_SHARD                                                                                                \
  "use_distributed_optimizer=True check_for_nan_in_grad=True data_parallel_sharding_strategy=optim_grads_params " \
  "overlap_grad_reduce=True overlap_param_gather=True"

#endif
