// The simulated ranks, network and tensors of Muon's exchange (muon_world.h), and the checks of a run.
#include "tests/core/muon_world.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <sstream>

namespace muon_world {
namespace {

// -- programs --------------------------------------------------------------------------------------------------------

int64_t Pick(std::mt19937_64 *random, int64_t from, int64_t to) {
  return std::uniform_int_distribution<int64_t>(from, to)(*random);
}

int64_t NumelOf(const Param &p) {
  int64_t numel = 0;
  for (const auto &[rows, columns] : p.matrices)
    numel += rows * columns;
  return numel;
}

Param RandomParam(std::mt19937_64 *random, int64_t world) {
  Param p;
  p.travels = Pick(random, 0, 3) ? TX_BF16 : TX_F32;
  const int64_t columns = Pick(random, 1, 6);
  for (int64_t k = Pick(random, 0, 2) ? 1 : Pick(random, 2, 5); k > 0; k--)
    p.matrices.emplace_back(Pick(random, 1, 6), columns);
  const int64_t numel = NumelOf(p), rows = numel / columns, each = (rows + world - 1) / world;
  for (int64_t r = 0; r < world; r++)  // sharded by rows, as by FSDP2; or anywhere, as by buckets
    p.ends.push_back(std::min((r + 1) * each, rows) * columns);
  if (Pick(random, 0, 1)) {
    for (int64_t &end : p.ends)
      end = Pick(random, 0, 4) ? Pick(random, 0, numel) : numel;
    std::sort(p.ends.begin(), p.ends.end());
    p.ends.back() = numel;
  }
  return p;
}

// -- messages and what they contain -----------------------------------------------------------------------------------

// An element that records its origin, and whether it belongs to a momentum or to an update.
struct Element {
  int64_t param, at;
  bool updated;
  bool operator==(const Element &other) const {
    return param == other.param && at == other.at && updated == other.updated;
  }
};

using Elements = std::vector<Element>;

// One rank's contribution to a collective.
struct Given {
  int32_t kind;  // tx_muon_do
  int64_t round;
  Elements sent;
  std::vector<int64_t> come, go;  // bytes received from and sent to each rank
  bool failed = false;            // whether computing its product failed
};

struct Collective {
  std::vector<std::optional<Given>> of;
};

enum class Is { kRunning, kDone, kRaised, kLost };

// A message in flight, and the memory it holds until it is freed.
struct Message {
  size_t collective;
  int64_t bytes_sent, bytes_into;
};

struct Rank {
  std::vector<tx_muon_matrix> matrices;
  std::vector<tx_muon_run> runs;
  std::vector<int64_t> memory;
  tx_muon_exchange *machine = nullptr;
  tx_muon_exchange_args args;
  int64_t fingerprint = 0, planned = 0, held = 0, most = 0, moves = 0;
  size_t started = 0;  // number of collectives
  Is is = Is::kRunning;
  std::optional<tx_muon_action> current;
  std::map<int64_t, Elements> momenta;  // by parameter
  std::map<int64_t, Message> gathers, scatters;
  std::map<int64_t, Elements> own;  // matrices that this rank owns, by round
  std::map<int64_t, bool> failed;   // by round: whether this rank's product failed
  std::vector<int64_t> stepped, discarded, multiplied;
};

class World {
 public:
  World(const Spec &spec, Coverage *coverage) : spec_(spec), coverage_(coverage), random_(spec.seed) {}

  std::string Run() {
    coverage_->programs++;
    for (int64_t r = 0; r < spec_.world && wrong_.empty(); r++)
      Make(r);
    if (!wrong_.empty()) return wrong_;
    for (const auto &rank : ranks_) {
      if (rank->fingerprint == ranks_[0]->fingerprint) continue;
      coverage_->refused++;  // all ranks raise: they compare fingerprints before the first message
      return "";
    }
    for (const Fault &f : spec_.faults)
      if (f.what == FaultKind::kOtherPlan) return "the plans differ, and the fingerprints do not";
    while (wrong_.empty() && Move())
      continue;
    if (wrong_.empty()) CheckEnd();
    return wrong_;
  }

 private:
  template <typename... Words>
  void Wrong(const Words &...words) {
    std::ostringstream text;
    (text << ... << words);
    if (wrong_.empty()) wrong_ = text.str();
  }

  const Fault *FaultOf(FaultKind what, int64_t rank, int64_t at) const {
    for (const Fault &f : spec_.faults)
      if (f.what == what && (rank < 0 || f.rank == rank) && (at < 0 || f.at == at)) return &f;
    return nullptr;
  }

  void Make(int64_t r) {
    ranks_.emplace_back(new Rank);
    Rank *rank = ranks_.back().get();
    std::vector<double> sizes;
    std::vector<int64_t> ids;
    int64_t n_params = 0;
    for (size_t p = 0; p < spec_.params.size(); p++) {
      if (FaultOf(FaultKind::kOtherPlan, r, static_cast<int64_t>(p))) continue;
      const Param &param = spec_.params[p];
      int64_t begin = 0;
      for (const auto &[rows, columns] : param.matrices) {
        rank->matrices.push_back({n_params, begin, rows, columns, 0, param.travels, param.travels, 0});
        sizes.push_back(tx_muon_operations(rows, columns, 5, TX_MUON_AUTO, 0, 0));
        ids.push_back(static_cast<int64_t>(p) + 1000);
        begin += rows * columns;
      }
      for (int64_t k = 0, from = 0; k < spec_.world; from = param.ends[static_cast<size_t>(k++)])
        rank->runs.push_back({from, param.ends[static_cast<size_t>(k)]});
      n_params++;
    }
    Plan(rank, sizes, ids, r, n_params);
  }

  void Plan(Rank *rank, const std::vector<double> &sizes, const std::vector<int64_t> &ids, int64_t r,
            int64_t n_params) {
    const auto n = static_cast<int64_t>(sizes.size());
    std::vector<int64_t> room(static_cast<size_t>(tx_plan_owners_bytes(n, spec_.world) / 8 + 1));
    std::vector<int32_t> owners(sizes.size() + 1);
    int64_t plan = 0;
    if (tx_plan_owners(n, sizes.data(), spec_.world, room.data(), owners.data(), &plan, nullptr) != TX_OK)
      return Wrong("no plan of owners");
    for (size_t i = 0; i < sizes.size(); i++)
      rank->matrices[i].owner = owners[i];
    rank->fingerprint = tx_muon_fingerprint(plan, n, rank->matrices.data(), ids.data());
    rank->args = TX_MUON_EXCHANGE_ARGS_INIT;
    rank->args.n = n;
    rank->args.matrices = rank->matrices.data();
    rank->args.n_params = n_params;
    rank->args.runs = rank->runs.data();
    rank->args.world = spec_.world;
    rank->args.rank = r;
    rank->memory.resize(static_cast<size_t>(tx_muon_exchange_bytes(&rank->args) / 8 + 1));
    rank->planned = tx_muon_exchange_peak(&rank->args, rank->memory.data());
    tx_error error;
    if (tx_muon_exchange_init(rank->memory.data(), &rank->args, &rank->machine, &error) != TX_OK) Wrong(error.message);
    rank->stepped.resize(spec_.params.size());
    rank->discarded.resize(spec_.params.size());
    rank->multiplied.resize(sizes.size());
  }

  // Lets a random rank perform one action. Returns false if no rank can.
  bool Move() {
    std::vector<int64_t> able;
    bool running = false;
    for (int64_t r = 0; r < spec_.world; r++) {
      running = running || At(r).is == Is::kRunning;
      if (At(r).is == Is::kRunning && !Waits(r)) able.push_back(r);
    }
    if (able.empty()) {
      if (running) Wrong("ranks wait for each other");
      return false;
    }
    const int64_t r = able[static_cast<size_t>(Pick(&random_, 0, static_cast<int64_t>(able.size()) - 1))];
    Rank *rank = &At(r);
    if (!rank->current) {
      if (FaultOf(FaultKind::kLost, r, rank->moves++)) {
        rank->is = Is::kLost;
        return true;
      }
      tx_muon_action action;
      if (!tx_muon_exchange_next(rank->machine, &action)) {
        rank->is = Is::kDone;
        coverage_->actions[TX_MUON_DONE]++;
        return true;
      }
      rank->current = action;
      if (Waits(r)) return true;
    }
    Act(r);
    return true;
  }

  Rank &At(int64_t r) { return *ranks_[static_cast<size_t>(r)]; }

  // The collective that an action waits for, if any.
  static std::optional<size_t> WaitedFor(const Rank &rank, const tx_muon_action &action) {
    if (action.kind == TX_MUON_RECEIVE) return rank.gathers.at(action.round).collective;
    if (action.kind == TX_MUON_INSTALL) return rank.scatters.at(action.round).collective;
    return {};
  }

  // Whether the rank has to wait: some running rank has not joined the collective yet.
  bool Waits(int64_t r) {
    const auto collective = At(r).current ? WaitedFor(At(r), *At(r).current) : std::nullopt;
    if (!collective) return false;
    for (int64_t other = 0; other < spec_.world; other++)
      if (!collectives_[*collective].of[static_cast<size_t>(other)] && At(other).is == Is::kRunning) return true;
    return false;
  }

  void Act(int64_t r) {
    Rank *rank = &At(r);
    const tx_muon_action action = *rank->current;
    rank->current.reset();
    coverage_->actions[static_cast<size_t>(action.kind)]++;
    if (const auto collective = WaitedFor(*rank, action)) {
      const auto &of = collectives_[*collective].of;
      if (std::any_of(of.begin(), of.end(), [](const auto &given) { return !given; })) {
        rank->is = Is::kRaised;  // a rank was lost
        return;
      }
    }
    switch (action.kind) {
      case TX_MUON_MOMENTUM:
        return Momentum(rank, action.param);
      case TX_MUON_GATHER:
        return Gather(rank, action.round);
      case TX_MUON_RECEIVE:
        return Receive(rank, action.round);
      case TX_MUON_MULTIPLY:
        return Multiply(rank, action.round);
      case TX_MUON_SCATTER:
        return Scatter(rank, action.round);
      case TX_MUON_INSTALL:
        return Install(rank, action.round);
      case TX_MUON_UPDATE:
        return Update(rank, action.param);
      case TX_MUON_DISCARD:
        return Discard(rank, action.param);
      default:
        return Wrong("action ", action.kind);
    }
  }

  void Hold(Rank *rank, int64_t bytes) {
    rank->held += bytes;
    rank->most = std::max(rank->most, rank->held);
    if (rank->held > rank->planned) Wrong("rank ", rank->args.rank, " holds ", rank->held, " of ", rank->planned);
  }

  static int64_t Bytes(int32_t dtype, size_t elements) {
    return static_cast<int64_t>(elements) * (dtype == TX_BF16 ? 2 : 4);
  }

  tx_muon_run RunOf(const Rank &rank, int64_t param) const {
    return rank.runs[static_cast<size_t>(param * spec_.world + rank.args.rank)];
  }

  int32_t Travels(int64_t param) const { return spec_.params[static_cast<size_t>(param)].travels; }

  const tx_muon_matrix &MatrixOf(const Rank &rank, int64_t i) const { return rank.matrices[static_cast<size_t>(i)]; }

  void Momentum(Rank *rank, int64_t param) {
    if (rank->momenta.count(param)) return Wrong("the momentum of ", param, " was made");
    const tx_muon_run run = RunOf(*rank, param);
    Elements *made = &rank->momenta[param];
    for (int64_t at = run.begin; at < run.end; at++)
      made->push_back({param, at, false});
    Hold(rank, Bytes(Travels(param), made->size()));
  }

  // Joins the next collective, and records the additional memory that the message holds.
  Message Start(Rank *rank, Given given, int64_t holds) {
    if (collectives_.size() == rank->started)
      collectives_.push_back({std::vector<std::optional<Given>>(static_cast<size_t>(spec_.world))});
    Collective *here = &collectives_[rank->started];
    for (const auto &other : here->of) {
      if (!other) continue;
      if (other->kind != given.kind || other->round != given.round)
        Wrong("ranks are in different collectives: ", other->kind, " of round ", other->round, " and ", given.kind,
              " of round ", given.round);
    }
    for (int64_t r = 0; r < spec_.world; r++)
      coverage_->sent += r == rank->args.rank ? 0 : given.go[static_cast<size_t>(r)];
    Hold(rank, holds);
    here->of[static_cast<size_t>(rank->args.rank)] = std::move(given);
    return {rank->started++, 0, holds};
  }

  static int64_t Sum(const std::vector<int64_t> &bytes) {
    int64_t sum = 0;
    for (int64_t one : bytes)
      sum += one;
    return sum;
  }

  void Gather(Rank *rank, int64_t round) {
    Given given = {TX_MUON_GATHER, round, {}, {}, {}};
    Sizes(rank, round, &given.come, &given.go);
    int64_t into = Sum(given.come), bytes = Sum(given.go);
    for (int64_t owner = 0; owner < spec_.world; owner++) {
      const int64_t matrix = tx_muon_exchange_matrix(rank->machine, round, owner);
      if (matrix < 0) continue;
      const int64_t param = MatrixOf(*rank, matrix).param;
      const tx_muon_run part = tx_muon_exchange_part(rank->machine, matrix, rank->args.rank);
      if (part.begin == part.end) continue;
      if (!rank->momenta.count(param)) return Wrong("no momentum of ", param, " in round ", round);
      const Elements &from = rank->momenta.at(param);
      const int64_t first = RunOf(*rank, param).begin;
      given.sent.insert(given.sent.end(), from.begin() + (part.begin - first), from.begin() + (part.end - first));
    }
    Message message = Start(rank, std::move(given), into + bytes);
    message.bytes_sent = bytes;
    message.bytes_into = into;
    rank->gathers[round] = message;
  }

  void Sizes(Rank *rank, int64_t round, std::vector<int64_t> *come, std::vector<int64_t> *go) {
    come->resize(static_cast<size_t>(spec_.world));
    go->resize(static_cast<size_t>(spec_.world));
    tx_muon_exchange_sizes(rank->machine, round, come->data(), go->data());
  }

  // The elements that a rank received, in the order of the ranks that sent them. In `sent`, the elements for a rank
  // follow those for the previous ranks.
  Elements Arrived(Rank *rank, size_t collective) {
    Elements found;
    const auto own = static_cast<size_t>(rank->args.rank);
    const Given &mine = *collectives_[collective].of[own];
    for (size_t s = 0; s < collectives_[collective].of.size(); s++) {
      const Given &theirs = *collectives_[collective].of[s];
      if (theirs.go[own] != mine.come[s])
        Wrong("rank ", s, " sends ", theirs.go[own], " bytes to rank ", own, ", which expects ", mine.come[s]);
      int64_t skipped = 0;
      for (size_t to = 0; to < own; to++)
        skipped += theirs.go[to];
      size_t at = 0;
      for (; at < theirs.sent.size() && skipped > 0; at++)
        skipped -= Bytes(Travels(theirs.sent[at].param), 1);
      for (int64_t left = theirs.go[own]; at < theirs.sent.size() && left > 0; at++) {
        found.push_back(theirs.sent[at]);
        left -= Bytes(Travels(theirs.sent[at].param), 1);
      }
    }
    return found;
  }

  void Receive(Rank *rank, int64_t round) {
    const Message message = rank->gathers.at(round);
    const int64_t matrix = tx_muon_exchange_matrix(rank->machine, round, rank->args.rank);
    Elements found = Arrived(rank, message.collective), expected;
    if (matrix >= 0) {
      const tx_muon_matrix &m = MatrixOf(*rank, matrix);
      for (int64_t at = m.begin; at < m.begin + m.rows * m.columns; at++)
        expected.push_back({m.param, at, false});
    }
    if (!(found == expected)) Wrong("rank ", rank->args.rank, " did not receive its matrix of round ", round);
    rank->own[round] = std::move(found);
    rank->held -= message.bytes_sent;
    rank->gathers.erase(round);
  }

  void Multiply(Rank *rank, int64_t round) {
    const int64_t matrix = tx_muon_exchange_matrix(rank->machine, round, rank->args.rank);
    if (matrix < 0 || !rank->own.count(round)) return Wrong("nothing to multiply in round ", round);
    rank->multiplied[static_cast<size_t>(matrix)]++;
    coverage_->multiplied++;
    rank->failed[round] = FaultOf(FaultKind::kRaise, -1, matrix) || FaultOf(FaultKind::kNonfinite, -1, matrix);
    for (Element &one : rank->own[round])
      one.updated = true;
  }

  void Scatter(Rank *rank, int64_t round) {
    if (!rank->own.count(round)) return Wrong("round ", round, " was not received");
    Given given = {TX_MUON_SCATTER, round, rank->own.at(round), {}, {}, rank->failed[round]};
    for (const Element &one : given.sent)
      if (!one.updated) Wrong("a matrix of round ", round, " goes back as it came");
    Sizes(rank, round, &given.go, &given.come);
    const int64_t into = Sum(given.come), bytes = Sum(given.go);
    Message message = Start(rank, std::move(given), into);
    message.bytes_sent = bytes;
    message.bytes_into = into;
    rank->scatters[round] = message;
  }

  void Install(Rank *rank, int64_t round) {
    const Message message = rank->scatters.at(round);
    const Elements found = Arrived(rank, message.collective);
    for (int64_t owner = 0; owner < spec_.world; owner++)
      if (collectives_[message.collective].of[static_cast<size_t>(owner)]->failed)
        tx_muon_exchange_fail(rank->machine, tx_muon_exchange_matrix(rank->machine, round, owner));
    for (const Element &one : found) {
      if (!rank->momenta.count(one.param)) return Wrong("an update of ", one.param, ", of which there is no momentum");
      Element *at = &rank->momenta.at(one.param).at(static_cast<size_t>(one.at - RunOf(*rank, one.param).begin));
      if (at->updated || !one.updated || at->at != one.at) Wrong("an update of ", one.param, " came twice, or is none");
      *at = one;
    }
    rank->held -= message.bytes_sent + message.bytes_into;
    rank->own.erase(round);
    rank->scatters.erase(round);
  }

  void Update(Rank *rank, int64_t param) {
    for (const Element &one : rank->momenta[param])
      if (!one.updated) Wrong("parameter ", param, " is stepped before its updates came back");
    const tx_muon_run run = RunOf(*rank, param);
    if (rank->momenta[param].size() != static_cast<size_t>(run.end - run.begin)) Wrong("a part of ", param, " is lost");
    rank->stepped[static_cast<size_t>(param)]++;
    coverage_->stepped++;
    Free(rank, param);
  }

  void Discard(Rank *rank, int64_t param) {
    rank->discarded[static_cast<size_t>(param)]++;
    Free(rank, param);
  }

  void Free(Rank *rank, int64_t param) {
    rank->held -= Bytes(Travels(param), rank->momenta[param].size());
    rank->momenta.erase(param);
  }

  void CheckEnd() {
    const bool lost = std::any_of(ranks_.begin(), ranks_.end(), [](const auto &r) { return r->is == Is::kLost; });
    int64_t first = -1;
    std::vector<bool> fails(spec_.params.size());
    const Rank &any = At(0);
    for (size_t i = 0; i < any.matrices.size(); i++) {
      const auto matrix = static_cast<int64_t>(i);
      int64_t times = 0;
      for (const auto &rank : ranks_)
        times += rank->multiplied[i];
      if (times > 1 || (!lost && times != 1)) Wrong("matrix ", i, " was orthogonalised ", times, " times");
      if (!FaultOf(FaultKind::kRaise, -1, matrix) && !FaultOf(FaultKind::kNonfinite, -1, matrix)) continue;
      first = first < 0 ? matrix : first;
      fails[static_cast<size_t>(any.matrices[i].param)] = true;
    }
    (lost ? coverage_->with_lost : first >= 0 ? coverage_->with_failed : coverage_->whole)++;
    for (const auto &rank : ranks_)
      CheckRank(*rank, lost, fails, first);
  }

  void CheckRank(const Rank &rank, bool lost, const std::vector<bool> &fails, int64_t first) {
    const int64_t r = rank.args.rank;
    if (!lost && rank.is != Is::kDone) Wrong("rank ", r, " did not end");
    for (size_t p = 0; p < fails.size(); p++) {
      const int64_t steps = rank.stepped[p], expected = fails[p] ? 0 : 1;
      if (steps > expected || (!lost && steps != expected)) Wrong("rank ", r, " stepped ", p, " ", steps, " times");
      if (!lost && rank.discarded[p] != 1 - expected) Wrong("rank ", r, " does not discard ", p);
    }
    if (lost) return;
    if (tx_muon_exchange_failed(rank.machine) != first)
      Wrong("rank ", r, " names matrix ", tx_muon_exchange_failed(rank.machine), " instead of ", first);
    if (rank.held != 0) Wrong("rank ", r, " holds ", rank.held, " bytes at the end");
    if (rank.most != rank.planned) Wrong("rank ", r, " held ", rank.most, " bytes, and ", rank.planned, " are planned");
  }

  const Spec &spec_;
  Coverage *coverage_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<Collective> collectives_;
  std::string wrong_;
};

}  // namespace

Spec Generate(uint64_t seed) {
  std::mt19937_64 random(seed);
  Spec spec;
  spec.seed = seed;
  spec.world = Pick(&random, 1, 6);
  int64_t n = 0;
  for (int64_t k = Pick(&random, 0, 9); k > 0; k--) {
    spec.params.push_back(RandomParam(&random, spec.world));
    n += static_cast<int64_t>(spec.params.back().matrices.size());
  }
  if (n == 0) return spec;
  for (int64_t k = Pick(&random, 0, 5) - 3; k > 0; k--) {
    const auto what = static_cast<FaultKind>(Pick(&random, 0, 2));
    spec.faults.push_back(
        {what, Pick(&random, 0, spec.world - 1), Pick(&random, 0, what == FaultKind::kLost ? 40 : n - 1)});
  }
  if (spec.world > 1 && Pick(&random, 0, 19) == 0) {
    const int64_t other = Pick(&random, 0, spec.world - 1);
    const int64_t left_out = Pick(&random, 0, static_cast<int64_t>(spec.params.size()) - 1);
    spec.faults = {{FaultKind::kOtherPlan, other, left_out}};
    if (Pick(&random, 0, 1)) {  // all other ranks leave out an identical parameter instead
      spec.params.push_back(spec.params[static_cast<size_t>(left_out)]);
      for (int64_t r = 0; r < spec.world; r++)
        if (r != other) spec.faults.push_back({FaultKind::kOtherPlan, r, static_cast<int64_t>(spec.params.size()) - 1});
    }
  }
  return spec;
}

std::string Text(const Spec &spec) {
  std::ostringstream text;
  text << "seed " << spec.seed << ": " << spec.world << " ranks\n";
  for (size_t p = 0; p < spec.params.size(); p++) {
    const Param &param = spec.params[p];
    text << "  parameter " << p << " in " << (param.travels == TX_BF16 ? "bf16" : "fp32") << ':';
    for (const auto &[rows, columns] : param.matrices)
      text << ' ' << rows << 'x' << columns;
    text << ", cut at";
    for (int64_t end : param.ends)
      text << ' ' << end;
    text << '\n';
  }
  static const char *const kNames[] = {"is lost before action", "raises at matrix", "has non-finite products of matrix",
                                       "leaves out parameter"};
  for (const Fault &f : spec.faults)
    text << "  rank " << f.rank << ' ' << kNames[static_cast<int>(f.what)] << ' ' << f.at << '\n';
  return text.str();
}

std::string Run(const Spec &spec, Coverage *coverage) {
  return World(spec, coverage).Run();
}

Spec Shrink(Spec spec) {
  Coverage ignored;
  const auto fails = [&ignored](const Spec &s) { return !Run(s, &ignored).empty(); };
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (size_t i = 0; i < spec.faults.size() && !smaller; i++) {
      Spec less = spec;
      less.faults.erase(less.faults.begin() + static_cast<int64_t>(i));
      if ((smaller = fails(less))) spec = less;
    }
    const bool by_number = !spec.faults.empty();  // faults refer to matrices by number, which would change
    for (size_t p = spec.params.size(); p-- > 0 && !smaller && !by_number;) {
      Spec less = spec;
      less.params.erase(less.params.begin() + static_cast<int64_t>(p));
      if ((smaller = fails(less))) spec = less;
    }
  }
  return spec;
}

}  // namespace muon_world
