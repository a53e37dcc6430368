// An engine's pieces, generated at random: fused, sliced, transposed, reversed, with gaps, at odd addresses, and wrong
// ones. tx_delta_open has to return the status that a check of every element and byte gives. A message has to write the
// bytes of the elements that the engine holds, and no other byte.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "csrc/torch_ext_delta.h"

#ifdef TX_SANITIZED
// Some requests below exceed the memory; by default the sanitizer's malloc aborts on them instead of returning NULL.
extern "C" const char *__asan_default_options() {
  return "allocator_may_return_null=1";
}
#endif

namespace {

using Bytes = std::vector<uint8_t>;

constexpr int64_t kArena = 1 << 14;

int64_t Item(int32_t dtype) {
  return dtype == TX_F32 ? 4 : 2;
}

// -- a program ------------------------------------------------------------------------------------------------------

struct Program {
  explicit Program(uint32_t seed) : gen(seed), arena(kArena, 0x5a) {
    const int32_t dtypes[] = {TX_BF16, TX_F16, TX_F32};
    for (int64_t n = 1 + Below(3), p = 0; p < n; p++) {
      names.push_back(std::string(1, static_cast<char>('a' + p)));
      params.push_back({nullptr, Below(8) ? Below(60) : 0, dtypes[Below(3)], 0});
    }
    for (size_t p = 0; p < params.size(); p++)
      params[p].name = names[p].c_str();
    for (size_t p = 0; p < params.size(); p++)
      Cut(static_cast<int64_t>(p));
    std::shuffle(pieces.begin(), pieces.end(), gen);
    for (int64_t wrong = Below(3) ? 0 : 1 + Below(2); wrong > 0 && !pieces.empty(); wrong--)
      Spoil();
  }

  int64_t Below(int64_t bound) { return static_cast<int64_t>(gen() % static_cast<uint64_t>(bound)); }

  // Divides a parameter, as a matrix of random shape, into blocks of columns.
  void Cut(int64_t p) {
    const int64_t numel = params[static_cast<size_t>(p)].numel;
    std::vector<int64_t> rows;
    for (int64_t r = 1; r <= numel; r++)
      if (numel % r == 0) rows.push_back(r);
    if (numel == 0) return;
    const int64_t r = rows[static_cast<size_t>(Below(static_cast<int64_t>(rows.size())))], c = numel / r;
    for (int64_t from = 0; from < c;) {
      const int64_t columns = 1 + Below(c - from);
      Place({p, from, r, columns, c, nullptr, 0, 0});
      from += columns;
    }
  }
  // Places a piece in the arena after the previous one.
  void Place(tx_delta_piece piece) {
    const int64_t item = Item(params[static_cast<size_t>(piece.param)].dtype);
    const int64_t gap = 1 + Below(2), pad = Below(3), r = piece.rows, c = piece.columns;
    const bool transposed = Below(2), up = Below(2), left = Below(2);
    const int64_t inner = (transposed ? r : c) * gap + pad, outer = transposed ? c : r;
    piece.row_stride = (transposed ? gap : inner) * (up ? -1 : 1);
    piece.column_stride = (transposed ? inner : gap) * (left ? -1 : 1);
    used += Below(4);
    const int64_t least = (up ? (r - 1) * piece.row_stride : 0) + (left ? (c - 1) * piece.column_stride : 0);
    if (Below(6)) piece.data = arena.data() + used - least * item;
    used += inner * outer * item;
    pieces.push_back(piece);
  }
  void Spoil() {
    tx_delta_piece &piece = pieces[static_cast<size_t>(Below(static_cast<int64_t>(pieces.size())))];
    int64_t *fields[] = {&piece.param, &piece.first,      &piece.rows,         &piece.columns,
                         &piece.step,  &piece.row_stride, &piece.column_stride};
    const int64_t which = Below(9), by = Below(5) - 2;
    if (which < 7) {
      *fields[which] += by;
    } else if (piece.data) {
      piece.data = arena.data() + kArena / 2 + Below(64);
    }
  }

  std::mt19937 gen;
  Bytes arena;
  int64_t used = kArena / 2;  // in the middle, so that spoilt pieces stay inside
  std::vector<std::string> names;
  std::vector<tx_delta_param> params;
  std::vector<tx_delta_piece> pieces;
};

// -- what is expected -------------------------------------------------------------------------------------------------

// The address of each element of each parameter, found element by element; nullptr: the engine does not hold it.
struct Truth {
  tx_status status = TX_OK;
  std::vector<std::vector<uint8_t *>> places;
};

tx_status PieceStatus(const Program &program, const tx_delta_piece &piece) {
  if (piece.param < 0 || piece.param >= static_cast<int64_t>(program.params.size())) return TX_ERROR_INVALID_ARGUMENT;
  const int64_t numel = program.params[static_cast<size_t>(piece.param)].numel;
  if (piece.rows < 1 || piece.columns < 1 || piece.first < 0) return TX_ERROR_SHAPE;
  if (piece.rows > 1 && piece.step < piece.columns) return TX_ERROR_SHAPE;
  return piece.first + (piece.rows - 1) * piece.step + piece.columns > numel && piece.rows > 1 ? TX_ERROR_SHAPE
         : piece.rows == 1 && piece.first + piece.columns > numel                              ? TX_ERROR_SHAPE
                                                                                               : TX_OK;
}

Truth ExpectedPlaces(const Program &program) {
  Truth truth;
  for (const tx_delta_piece &piece : program.pieces) {
    truth.status = PieceStatus(program, piece);
    if (truth.status != TX_OK) return truth;
  }
  std::set<uint8_t *> bytes;
  bool twice = false;
  for (const tx_delta_param &param : program.params)
    truth.places.emplace_back(static_cast<size_t>(param.numel));
  std::vector<std::vector<int>> counts;
  for (const tx_delta_param &param : program.params)
    counts.emplace_back(static_cast<size_t>(param.numel));
  for (const tx_delta_piece &piece : program.pieces) {
    const auto p = static_cast<size_t>(piece.param);
    const int64_t item = Item(program.params[p].dtype);
    for (int64_t r = 0; r < piece.rows; r++) {
      for (int64_t c = 0; c < piece.columns; c++) {
        const auto element = static_cast<size_t>(piece.first + r * piece.step + c);
        counts[p][element]++;
        if (!piece.data) continue;
        auto *at = static_cast<uint8_t *>(piece.data) + (r * piece.row_stride + c * piece.column_stride) * item;
        truth.places[p][element] = at;
        for (int64_t b = 0; b < item; b++)
          twice |= !bytes.insert(at + b).second;
      }
    }
  }
  for (size_t p = 0; p < counts.size(); p++) {
    int64_t rows = 0;
    for (const tx_delta_piece &piece : program.pieces)
      rows += piece.param == static_cast<int64_t>(p) ? piece.rows : 0;
    // Some rows must overlap then, whatever else is wrong.
    if (rows > program.params[p].numel) truth.status = TX_ERROR_OVERLAP;
    if (truth.status != TX_OK) return truth;
    for (const int count : counts[p]) {
      truth.status = count == 0 ? TX_ERROR_SHAPE : count > 1 ? TX_ERROR_OVERLAP : TX_OK;
      if (truth.status != TX_OK) return truth;
    }
  }
  truth.status = twice ? TX_ERROR_OVERLAP : TX_OK;
  return truth;
}

// A message with all weights of the parameters.
Bytes Message(const std::vector<tx_delta_param> &params, std::vector<Bytes> *weights, std::mt19937 *gen) {
  std::vector<tx_delta_run> runs;
  weights->clear();
  for (const tx_delta_param &param : params) {
    weights->emplace_back(static_cast<size_t>(param.numel * Item(param.dtype)));
    for (uint8_t &byte : weights->back())
      byte = static_cast<uint8_t>((*gen)() & 0x3f);
  }
  for (size_t p = 0; p < params.size(); p++) {
    tx_delta_run run = {};
    run.param = static_cast<int64_t>(p);
    run.weights = {(*weights)[p].data(), params[p].numel, static_cast<tx_dtype>(params[p].dtype), 0};
    if (params[p].numel > 0) runs.push_back(run);
  }
  const uint64_t id[2] = {3, 4};
  tx_delta_chain chain = TX_DELTA_CHAIN_INIT;
  tx_error error = {};
  EXPECT_EQ(tx_delta_chain_begin(static_cast<int64_t>(params.size()), params.data(), id, 0, 1, &chain, &error), TX_OK)
      << error.message;
  tx_delta_encode_args args = TX_DELTA_ENCODE_ARGS_INIT;
  args.n_params = static_cast<int64_t>(params.size());
  args.params = params.data();
  args.n_runs = static_cast<int64_t>(runs.size());
  args.runs = runs.data();
  args.kind = TX_DELTA_WHOLE;
  args.sliceable = 1;
  tx_delta_message message = {};
  EXPECT_EQ(tx_delta_encode(&args, &chain, nullptr, &message, &error), TX_OK) << error.message;
  const auto *data = static_cast<const uint8_t *>(message.data);
  Bytes bytes(data, data + message.bytes);
  tx_delta_free(&message);
  return bytes;
}

struct Tally {
  int opened = 0, refused = 0;
};

void OpenAndReceive(uint32_t seed, Tally *tally) {
  Program program(seed);
  const Truth truth = ExpectedPlaces(program);
  const Bytes before = program.arena;
  tx_delta_receiver *receiver = nullptr;
  tx_error error = {};
  const tx_status status =
      tx_delta_open(static_cast<int64_t>(program.params.size()), program.params.data(),
                    static_cast<int64_t>(program.pieces.size()), program.pieces.data(), &receiver, &error);
  ASSERT_EQ(tx_status_name(status), tx_status_name(truth.status)) << error.message;
  ASSERT_EQ(receiver != nullptr, status == TX_OK);
  ASSERT_TRUE(program.arena == before);
  if (status != TX_OK) {
    tally->refused++;
    return;
  }
  tally->opened++;
  std::vector<Bytes> weights;
  Bytes message = Message(program.params, &weights, &program.gen);
  const tx_tensor tensor = {message.data(), static_cast<int64_t>(message.size()), TX_U8, 0};
  EXPECT_EQ(tx_delta_apply(receiver, 1, &tensor, TX_DELTA_TOUCHED, nullptr, &error), TX_OK) << error.message;
  tx_delta_close(receiver);
  Bytes expected = before;
  for (size_t p = 0; p < truth.places.size(); p++) {
    const auto item = static_cast<size_t>(Item(program.params[p].dtype));
    for (size_t i = 0; i < truth.places[p].size(); i++) {
      if (uint8_t *at = truth.places[p][i])
        std::copy_n(weights[p].begin() + static_cast<ptrdiff_t>(i * item), item,
                    expected.begin() + (at - program.arena.data()));
    }
  }
  ASSERT_TRUE(program.arena == expected) << "a byte is another one than its element's";
}

// Environment: TX_DELTA_PIECES is the number of programs. The first seed is 1.
TEST(DeltaPieces, OpenAndReceiveAsEveryElementSays) {
  const char *asked = std::getenv("TX_DELTA_PIECES");
  Tally tally;
  for (uint32_t seed = 1; seed <= (asked ? static_cast<uint32_t>(std::atol(asked)) : 4000); seed++) {
    OpenAndReceive(seed, &tally);
    ASSERT_FALSE(HasFatalFailure() || HasNonfatalFailure()) << "seed " << seed;
  }
  EXPECT_GT(tally.opened, 100);
  EXPECT_GT(tally.refused, 100);
}

// -- absurd numbers ---------------------------------------------------------------------------------------------------

constexpr int64_t kMost = int64_t{1} << 56;

tx_status Open(const std::vector<tx_delta_param> &params, const std::vector<tx_delta_piece> &pieces, tx_error *error) {
  tx_delta_receiver *receiver = nullptr;
  const tx_status status = tx_delta_open(static_cast<int64_t>(params.size()), params.data(),
                                         static_cast<int64_t>(pieces.size()), pieces.data(), &receiver, error);
  tx_delta_close(receiver);
  return status;
}

TEST(DeltaPieces, MoreRowsThanElementsAreRefused) {
  tx_error error = {};
  const std::vector<tx_delta_piece> some(3, {0, 0, 1000, 1, 1, nullptr, 0, 0});
  EXPECT_EQ(Open({{"weight", 1000, TX_BF16, 0}}, some, &error), TX_ERROR_OVERLAP);
  EXPECT_NE(std::string(error.message).find("\"weight\""), std::string::npos) << error.message;
  // 24 bytes for each of 2^61 rows are 0 modulo 2^64; a list of 2^56 elements is larger than any memory.
  const std::vector<tx_delta_piece> absurd(32, {0, 0, kMost, 1, 1, nullptr, 0, 0});
  EXPECT_EQ(Open({{"weight", kMost, TX_BF16, 0}}, absurd, &error), TX_ERROR_OUT_OF_MEMORY) << error.message;
}

// Strides of a piece that has too many elements to list them all.
constexpr int64_t kColumns = kMost / 8;
struct Strides {
  const char *id;
  int64_t rows, row_stride, column_stride;
  tx_status status;
};
const Strides kStrides[] = {
    {"columns_in_one_place", 1, 0, 0, TX_ERROR_OVERLAP},
    {"rows_in_one_place", 2, 0, 1, TX_ERROR_OVERLAP},
    {"rows_that_begin_within_another", 2, kColumns - 1, 1, TX_ERROR_OVERLAP},
    {"rows_with_gaps_that_meet", 2, 2 * kColumns - 2, 2, TX_ERROR_OVERLAP},
    {"columns_with_gaps", 1, 0, 2, TX_OK},
    {"columns_with_gaps_reversed", 1, 0, -3, TX_OK},
    {"rows_between_each_other", 2, 1, 2, TX_OK},
    {"rows_with_gaps_that_do_not_meet", 2, 2 * kColumns - 1, 2, TX_OK},
};
void PrintTo(const Strides &strides, std::ostream *out) {
  *out << strides.id;
}

class DeltaStridesTest : public ::testing::TestWithParam<Strides> {};

TEST_P(DeltaStridesTest, AreJudgedWithoutAListOfElements) {
  const Strides &s = GetParam();
  uint16_t weight = 7;
  tx_error error = {};
  const tx_delta_piece piece = {0, 0, s.rows, kColumns, kColumns, &weight, s.row_stride, s.column_stride};
  EXPECT_EQ(Open({{"weight", s.rows * kColumns, TX_BF16, 0}}, {piece}, &error), s.status) << error.message;
  EXPECT_EQ(std::string(error.message).find("\"weight\"") == 0, s.status != TX_OK) << error.message;
  EXPECT_EQ(weight, 7);
}

INSTANTIATE_TEST_SUITE_P(All, DeltaStridesTest, ::testing::ValuesIn(kStrides),
                         [](const auto &info) { return std::string(info.param.id); });

TEST(DeltaPieces, MoreMemoryThanThereIsAddressesForIsRefused) {
  std::vector<std::string> names;
  std::vector<tx_delta_param> params;
  std::vector<tx_delta_piece> pieces;
  uint16_t weight = 7;
  for (int64_t p = 0; p < 32; p++)
    names.push_back("weight" + std::to_string(10 + p));
  for (int64_t p = 0; p < 32; p++) {
    params.push_back({names[static_cast<size_t>(p)].c_str(), kMost, TX_BF16, 0});
    pieces.push_back({p, 0, 1, kMost, 0, &weight, 0, 0});
  }
  tx_error error = {};
  const tx_status status = Open(params, pieces, &error);
  EXPECT_TRUE(status == TX_ERROR_OVERLAP || status == TX_ERROR_OUT_OF_MEMORY) << error.message;
  EXPECT_EQ(weight, 7);
}

}  // namespace
