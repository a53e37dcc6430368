// A call of tx_policy_resolve written as a value, so that cases can be data.
#ifndef TX_TESTS_CORE_POLICY_LOAD_H
#define TX_TESTS_CORE_POLICY_LOAD_H

#include <cstring>
#include <map>
#include <string>
#include <variant>
#include <vector>

extern "C" {
#include "csrc/core/policy_fields.h"
}
#include "csrc/torch_ext.h"

struct None {};
using Value = std::variant<None, bool, int, double, const char *, tx_dtype>;
struct Setting {
  const char *key;
  Value value;
};
using Settings = std::vector<Setting>;

inline std::vector<tx_setting> ToC(const Settings &settings) {
  std::vector<tx_setting> list;
  for (const Setting &s : settings) {
    tx_setting c = {};
    c.key = s.key;
    c.kind = static_cast<int32_t>(s.value.index());
    if (const auto *v = std::get_if<bool>(&s.value)) c.integer = *v;
    if (const auto *v = std::get_if<int>(&s.value)) c.integer = *v;
    if (const auto *v = std::get_if<double>(&s.value)) c.number = *v;
    if (const auto *v = std::get_if<const char *>(&s.value)) c.text = *v;
    if (const auto *v = std::get_if<tx_dtype>(&s.value)) c.integer = *v;
    list.push_back(c);
  }
  return list;
}

// What tx_policy_resolve is called with; aggregate, so that cases name only what they set.
struct Load {
  tx_dtype model = TX_NONE;
  int bf16 = TX_UNSET;
  int fp16 = TX_UNSET;
  tx_preset preset = TX_PRESET_SEED;
  bool full_shard = false;
  Settings config = {};
  Settings optimizer = {};
  Settings ddp = {};
  Settings optimizer_hook = {};  // hooks that answer so, whatever they see; none where empty
  Settings ddp_hook = {};
};

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

struct Resolved {
  tx_status status;
  tx_policy policy = TX_POLICY_INIT;
  tx_origin origins[TX_POLICY_FIELDS] = {};
  tx_error error = {};
  Hook hooks[2];

  // "bf16", "True", ...: a field as people read it.
  std::string operator[](const std::string &field) const {
    char buffer[64];
    tx_text text = tx_text_in(buffer, sizeof buffer);
    tx_policy_format(&policy, tx_policy_find(field.c_str()), &text);
    return buffer;
  }
  // "override", "follows main_grads_dtype", ...
  std::string Origin(const std::string &field) const {
    const tx_origin &origin = origins[tx_policy_find(field.c_str())];
    std::string text = tx_source_name(static_cast<tx_source>(origin.source));
    if (origin.cause >= 0) text += std::string(" ") + tx_policy_field_at(origin.cause)->name;
    return text;
  }
};

inline Resolved Resolve(const Load &load, tx_status hook_status = TX_OK) {
  Resolved r;
  const std::vector<tx_setting> config = ToC(load.config), optimizer = ToC(load.optimizer), ddp = ToC(load.ddp);
  r.hooks[0].answer = ToC(load.optimizer_hook);
  r.hooks[1].answer = ToC(load.ddp_hook);
  r.hooks[0].status = hook_status;
  tx_policy_args args = TX_POLICY_ARGS_INIT;
  args.n_config = static_cast<int64_t>(config.size());
  args.config = config.data();
  args.optimizer = {static_cast<int64_t>(optimizer.size()), optimizer.data(),
                    load.optimizer_hook.empty() ? nullptr : Hook::Call, &r.hooks[0]};
  args.ddp = {static_cast<int64_t>(ddp.size()), ddp.data(), load.ddp_hook.empty() ? nullptr : Hook::Call, &r.hooks[1]};
  args.model_dtype = load.model;
  args.bf16 = load.bf16;
  args.fp16 = load.fp16;
  args.preset = load.preset;
  args.full_shard = load.full_shard;
  r.status = tx_policy_resolve(&args, &r.policy, r.origins, TX_POLICY_FIELDS, &r.error);
  return r;
}

#endif
