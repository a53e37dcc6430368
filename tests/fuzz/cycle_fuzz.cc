// The gradient cycle's state machine: any events in any order, and reports of other ranks with any contents.
#include "csrc/torch_ext_cycle.h"
#include "tests/fuzz/fuzz.h"

namespace {

constexpr int64_t kMostParams = 9;
const char *const kNames[kMostParams] = {"a", "b", "c", "layers.0.weight", "", "e", "f", "g", "h"};
const char *const kUnits[kMostParams] = {"u", "v", "w", "x", "y", "z", "0", "1", "2"};

struct Machine {
  fuzz::Input *input;
  std::vector<int64_t> bucket_of, buffer_of;
  std::vector<int64_t> memory, rebuilt;
  tx_cycle_args args = {};
  tx_cycle *cycle = nullptr;
  int64_t messages = 0;  // sent in this backward

  explicit Machine(fuzz::Input *in) : input(in) {
    args.size = sizeof args;
    args.n_params = input->Below(kMostParams + 1);
    args.kind = static_cast<int32_t>(input->Below(5));
    args.n_buckets = args.n_params ? 1 + input->Below(static_cast<uint32_t>(args.n_params)) : 0;
    args.world = 1 + static_cast<int32_t>(input->Below(3));
    args.rank = static_cast<int32_t>(input->Below(static_cast<uint32_t>(args.world)));
    args.slots = 1 + input->Below(4);
    int32_t *const kFlags[] = {&args.check_for_nan, &args.find_unused, &args.reorder, &args.scales_sums};
    for (int32_t *flag : kFlags)
      *flag = static_cast<int32_t>(input->Below(2));
    args.names = kNames;
    args.units = args.kind == TX_CYCLE_UNITS ? kUnits : nullptr;
    Plan();
    cycle = Make(&memory, nullptr);
  }
  bool IsGiven() const { return args.kind >= TX_CYCLE_UNITS; }
  void Plan() {
    for (int64_t b = 0; b < args.n_buckets; b++)
      buffer_of.push_back(b == 0 ? 0 : buffer_of.back() + input->Odd(3));
    for (int64_t i = 0; i < args.n_params; i++) {
      const bool odd = input->Odd(128);
      const int64_t bucket = i < args.n_buckets ? i : input->Below(static_cast<uint32_t>(args.n_buckets));
      bucket_of.push_back(odd ? input->I64() : bucket);
    }
    args.bucket_of = IsGiven() ? nullptr : bucket_of.data();
    args.buffer_of = IsGiven() ? nullptr : buffer_of.data();
  }
  tx_cycle *Make(std::vector<int64_t> *room, const tx_cycle *from) {
    const int64_t bytes = tx_cycle_bytes(&args);
    CHECK(bytes > 0);
    room->assign(static_cast<size_t>(bytes + 7) / 8, -1);
    tx_cycle *made = nullptr;
    tx_error error = {};
    const tx_status status = from ? tx_cycle_rebuild(room->data(), bytes, &args, from, &made, &error)
                                  : tx_cycle_init(room->data(), bytes, &args, &made, &error);
    CHECK((status == TX_OK) == (made != nullptr));
    CHECK(status == TX_OK || fuzz::IsSentence(error));
    return made;
  }
  std::vector<uint8_t> Flags() {
    std::vector<uint8_t> flags(static_cast<size_t>(kMostParams));
    for (uint8_t &flag : flags)
      flag = static_cast<uint8_t>(input->Below(2));
    return flags;
  }
  int64_t Param() {
    if (args.n_params == 0 || input->Odd(64)) return input->I64();
    return input->Below(static_cast<uint32_t>(args.n_params));
  }
  void Answered(tx_cycle_answer answer) {
    CHECK(answer >= -1 && answer <= 1);
    CHECK(answer != -1 || tx_cycle_refusal(cycle)[0] != '\0');
  }
  void Event();
  void Acts();
  void Act(const tx_cycle_action &action);
  void Read();
};

void Machine::Event() {
  const std::vector<uint8_t> flags = Flags();
  const int64_t param = Param(), bucket = Param();
  switch (input->Below(13)) {
    case 0:
    case 1:
      Answered(tx_cycle_begin(cycle, static_cast<int32_t>(input->Below(2)), static_cast<int32_t>(input->Below(2))));
      break;
    case 2: {
      const int32_t flags_of_grad = tx_cycle_accumulate(cycle, param, static_cast<int32_t>(input->Below(3)));
      CHECK(flags_of_grad >= 0 && flags_of_grad < 64);
      break;
    }
    case 3:
      for (int64_t i = args.n_params; i-- > 0;)
        Answered(tx_cycle_ready(cycle, i));
      break;
    case 4:
      Answered(tx_cycle_ready(cycle, param));
      break;
    case 5:
      Answered(tx_cycle_given(cycle, bucket, input->Below(60000), input->Odd(4) ? 0 : 1,
                              static_cast<int32_t>(input->Below(2))));
      break;
    case 6:
      Answered(tx_cycle_end(cycle));
      break;
    case 7:
      tx_cycle_died(cycle, input->Odd(2) ? flags.data() : nullptr);
      break;
    case 8:
      if (input->Odd(4)) tx_cycle_broken(cycle, flags.data());
      tx_cycle_zero(cycle, &param, 1);
      break;
    case 9:
      if (input->Odd(4)) tx_cycle_fail(cycle, input->Odd(2) ? nullptr : "the wire broke");
      break;
    case 10:
      Answered(tx_cycle_check_step(cycle, input->Odd(2) ? flags.data() : nullptr, nullptr));
      break;
    case 11:
      tx_cycle_stepping(cycle);
      for (uint32_t n = input->Below(4); n > 0; n--)
        tx_cycle_gathering(cycle);
      if (!input->Odd(8)) tx_cycle_stepped(cycle);
      break;
    default:
      tx_cycle_set_messages(cycle, flags.data());
  }
}

// The reports of all ranks: copies of this one's, some with other bytes.
void Machine::Read() {
  const int64_t bytes = tx_cycle_report_bytes(cycle);
  CHECK(bytes >= 16);
  std::vector<std::vector<uint8_t>> reports;
  std::vector<const uint8_t *> at, scratch(static_cast<size_t>(args.world));
  for (int32_t r = 0; r < args.world; r++) {
    reports.emplace_back(static_cast<size_t>(bytes));
    tx_cycle_report(cycle, input->Odd(8) ? input->I64() : -1, Flags().data(), reports.back().data());
    for (uint32_t i = input->Odd(4) ? input->Below(20) : 0; i > 0; i--)
      reports.back()[input->Below(static_cast<uint32_t>(bytes))] = input->Byte();
  }
  for (const auto &report : reports)
    at.push_back(report.data());
  tx_cycle_read(cycle, at.data(), scratch.data(), static_cast<int32_t>(input->Below(2)));
}

void Machine::Act(const tx_cycle_action &action) {
  switch (action.kind) {
    case TX_DO_CHECK:
      CHECK(action.first >= 0 && action.first < args.n_buckets);
      break;
    case TX_DO_SEND:
      CHECK(action.first >= 0 && action.first < action.end && action.end <= args.n_buckets);
      CHECK(action.message >= 0);
      break;
    case TX_DO_INSPECT: {
      CHECK(action.first >= 0 && action.first < args.n_params);
      const int32_t flags = tx_cycle_missing(cycle, action.first, static_cast<int32_t>(input->Below(3)),
                                             static_cast<int32_t>(input->Below(2)));
      CHECK(flags >= 0 && flags < 64);
      break;
    }
    case TX_DO_ORDER:
      for (int64_t i = 0; i < args.n_params; i++)
        CHECK(tx_cycle_order(cycle)[i] >= 0 && tx_cycle_order(cycle)[i] < args.n_params);
      if (input->Odd(2)) {
        tx_cycle *made = Make(&rebuilt, cycle);
        CHECK(made);
        cycle = made;
        memory.swap(rebuilt);
        return;
      }
      break;
    case TX_DO_WAIT:
      CHECK(action.message >= 0 && action.message < messages);
      break;
    case TX_DO_READ:
      Read();
      break;
    case TX_DO_RAISE:
      CHECK(action.text && action.text[0] != '\0' && std::strlen(action.text) < 100000);
      return;
    default:
      break;
  }
  tx_cycle_done(cycle, static_cast<int32_t>(input->Below(2)));
}

// Performs actions until there are none left, or one is interrupted; an action that was not done must be returned
// again.
void Machine::Acts() {
  for (int n = 0; n < 200; n++) {
    tx_cycle_action action, again;
    const int32_t kind = tx_cycle_next(cycle, &action);
    CHECK(kind == action.kind && kind >= TX_DO_NOTHING && kind <= TX_DO_WEIGHTS);
    if (kind == TX_DO_NOTHING) return;
    if (kind != TX_DO_RAISE) {
      CHECK(tx_cycle_next(cycle, &again) == kind && again.first == action.first && again.message == action.message);
    }
    if (kind == TX_DO_SEND) messages = action.message + 1;
    if (input->Odd(32)) return;
    Act(action);
  }
  CHECK(!"it ends");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  Machine machine(&input);
  if (!machine.cycle) return 0;
  for (int n = 0; n < 60 && input.left() > 0; n++) {
    machine.Event();
    if (!input.Odd(4)) machine.Acts();
    const int32_t phase = tx_cycle_phase_of(machine.cycle);
    CHECK(phase >= TX_PHASE_IDLE && phase <= TX_PHASE_RECOVERING);
    CHECK(tx_cycle_number(machine.cycle) >= 0);
  }
  return 0;
}
