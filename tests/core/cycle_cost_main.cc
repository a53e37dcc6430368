// Predicts what training steps cost (tests/core/cycle_cost.h). Reads clusters, models and cases from standard input;
// writes one line of JSON per case. tests/bench/cost generates the input.
//
//     cluster RANKS_PER_NODE WITHIN BETWEEN NODE_BYTES_PER_SECOND POST_SECONDS SUM_BYTES_PER_SECOND
//         (on one line; for the cases that follow. WITHIN, BETWEEN: LATENCY BYTES_PER_SECOND MESSAGE_SECONDS)
//     model PARAM_DTYPE GRAD_DTYPE WIRE_DTYPE GATHER_DTYPE FORWARD_SECONDS BACKWARD_SECONDS STEP_SECONDS
//     param NUMEL ROWS UNIT BUCKET        a parameter of that model, in registration order
//     case KIND HOW WORLD CAP CHECK_FOR_NAN       numbers of tx_cycle_kind and cycle_cost::How; CAP 0: the default
#include <cinttypes>
#include <cstdio>
#include <exception>
#include <iostream>
#include <sstream>
#include <string>

#include "tests/core/cycle_cost.h"

namespace {

std::istream &operator>>(std::istream &in, cycle_cost::Link &link) {
  return in >> link.latency >> link.bytes_per_second >> link.message_seconds;
}

void Print(const cycle_cost::Cost &cost) {
  std::printf("{\"seconds\": %.9g, \"compute_seconds\": %.9g, ", cost.seconds, cost.compute_seconds);
  const auto number = [](const char *name, int64_t value, const char *end) {
    std::printf("\"%s\": %" PRId64 "%s", name, value, end);
  };
  number("gradient_bytes", cost.gradient_bytes, ", ");
  number("weight_bytes", cost.weight_bytes, ", ");
  number("report_bytes", cost.report_bytes, ", ");
  number("node_bytes", cost.node_bytes, ", ");
  number("messages", cost.messages, ", ");
  number("buckets", cost.buckets, ", ");
  number("largest_message", cost.largest_message, ", ");
  number("in_flight_bytes", cost.in_flight_bytes, ", ");
  number("planned_bytes", cost.planned_bytes, "}\n");
  std::fflush(stdout);
}

// Processes one line of input; returns false if it is not valid.
bool Read(const std::string &line, cycle_cost::Case *one) {
  std::istringstream in(line);
  std::string word;
  in >> word;
  if (word == "cluster") {
    cycle_cost::Cluster &c = one->cluster;
    in >> c.ranks_per_node >> c.within >> c.between >> c.node_bytes_per_second >> c.post_seconds >>
        c.sum_bytes_per_second;
  } else if (word == "model") {
    cycle_cost::Model &m = one->model;
    m.params.clear();
    in >> m.param_dtype >> m.grad_dtype >> m.wire_dtype >> m.gather_dtype >> m.forward_seconds >> m.backward_seconds >>
        m.step_seconds;
  } else if (word == "param") {
    cycle_cost::Param param;
    in >> param.numel >> param.rows >> param.unit >> param.bucket;
    one->model.params.push_back(param);
  } else if (word == "case") {
    int how = 0;
    in >> one->kind >> how >> one->world >> one->cap >> one->check_for_nan;
    if (one->cap == 0) one->cap = TX_NO_INT;
    one->how = static_cast<cycle_cost::How>(how);
    if (in) Print(cycle_cost::Predict(*one));
  } else {
    return word.empty();
  }
  return static_cast<bool>(in);
}

}  // namespace

int main() {
  cycle_cost::Case one;
  for (std::string line; std::getline(std::cin, line);) {
    try {
      if (Read(line, &one)) continue;
      std::fprintf(stderr, "not a line of the input: %s\n", line.c_str());
    } catch (const std::exception &error) {
      std::fprintf(stderr, "%s: %s\n", line.c_str(), error.what());
    }
    return 1;
  }
  return 0;
}
