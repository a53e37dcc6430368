// The questions of ops_environment_test.cc: calls of every kind of function whose results, statuses and messages must
// not depend on the state of the calling thread.
#ifndef TESTS_CORE_ENVIRONMENT_QUESTIONS_H
#define TESTS_CORE_ENVIRONMENT_QUESTIONS_H

#include <cmath>
#include <cstring>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "csrc/torch_ext_advanced.h"
#include "tests/core/delta_trainer.h"

namespace environment {

// Collects all bytes of the results, and the messages of all errors.
class Answer {
 public:
  template <typename Value>
  void Add(const Value &value) {
    static_assert(std::is_trivially_copyable_v<Value>);
    bytes_.append(reinterpret_cast<const char *>(&value), sizeof value);
  }
  template <typename Value>
  void Add(const std::vector<Value> &values) {
    bytes_.append(reinterpret_cast<const char *>(values.data()), values.size() * sizeof(Value));
  }
  void Add(const std::string &text) { bytes_ += text; }
  void Status(tx_status status, const tx_error &error) {
    Add(status);
    if (status != TX_OK) Add(std::string(error.message));
  }
  const std::string &bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

constexpr int64_t kNumel = 5000;

inline std::vector<float> Normal(int64_t n, float size, uint32_t seed) {
  // Whole numbers times powers of two, so that the data do not depend on the rounding mode.
  std::mt19937 gen(seed);
  std::vector<float> values;
  for (int64_t i = 0; i < n; i++)
    values.push_back(static_cast<float>(static_cast<int32_t>(gen() >> 8) - (1 << 23)) * size);
  return values;
}

template <typename Value>
tx_tensor Tensor(std::vector<Value> *values, tx_dtype dtype) {
  return {values->data(), static_cast<int64_t>(values->size()), dtype, 0};
}

// The upper 16 bits of fp32 numbers, as bf16 weights.
inline std::vector<uint16_t> Upper(const std::vector<float> &values) {
  std::vector<uint16_t> halves;
  for (const float &value : values) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    halves.push_back(static_cast<uint16_t>(bits >> 16));
  }
  return halves;
}

// Everything that tx_adamw writes for bf16 weights, including all optional outputs.
struct Step {
  explicit Step(tx_dtype moment, bool remainders)
      : moment_dtype(moment),
        master_dtype(remainders ? TX_I16 : TX_F32),
        masters(Normal(kNumel, 0x1p-28f, 1)),
        params(Upper(masters)),
        grads(Normal(kNumel, 0x1p-30f, 2)),
        remainder(kNumel),
        exp_avg(kNumel * 4),
        exp_avg_sq(kNumel * 4),
        scales(moment == TX_U8 ? 2 * ((kNumel + 127) / 128) : 0),
        changed((kNumel + 7) / 8),
        moved((kNumel + 127) / 128),
        distances((kNumel + 1) / 2),
        emas(kNumel),
        ema_lows(kNumel),
        health(TX_HEALTH_LEN) {
    grads[7] = 0x1p-140f;  // subnormal
    masters[11] = 0x1p-141f;
  }
  tx_tensor Moment(std::vector<uint8_t> *bytes) const { return {bytes->data(), kNumel, moment_dtype, 0}; }

  void Run(Answer *answer) {
    const tx_adamw_group group = {1e-3, 0.9, 0.999, 1e-8, 0.1, 0, 1};
    const tx_tensor param = Tensor(&params, TX_BF16), grad = Tensor(&grads, TX_F32), m = Moment(&exp_avg),
                    v = Moment(&exp_avg_sq), scale = Tensor(&scales, TX_U8), count = Tensor(&steps, TX_F32),
                    master = master_dtype == TX_F32 ? Tensor(&masters, TX_F32) : Tensor(&remainder, TX_I16),
                    bits = Tensor(&changed, TX_U8), bound = Tensor(&moved, TX_BF16), far = Tensor(&distances, TX_U8),
                    ema = Tensor(&emas, TX_BF16), lows = Tensor(&ema_lows, TX_U8), row = Tensor(&health, TX_I64);
    tx_adamw_args args = TX_ADAMW_ARGS_INIT;
    args.n = 1;
    args.params = &param;
    args.grads = &grad;
    args.exp_avgs = &m;
    args.exp_avg_sqs = &v;
    args.masters = &master;
    args.scales = &scale;
    args.steps = &count;
    args.n_groups = 1;
    args.groups = &group;
    args.grad_scale = Tensor(&grad_scale, TX_F32);
    args.clip_coef = Tensor(&clip_coef, TX_F32);
    args.changed = &bits;
    args.moved = &bound;
    args.distances = &far;
    args.emas = &ema;
    args.ema_lows = &lows;
    args.healths = &row;
    args.ema_decay = 0.99;
    tx_error error = {};
    for (int i = 0; i < 3; i++)
      answer->Status(tx_adamw(&args, nullptr, &error), error);
    tx_health found = TX_HEALTH_INIT;
    answer->Status(tx_health_of(row, &found, &error), error);
    answer->Add(found);
    answer->Add(masters), answer->Add(params), answer->Add(remainder), answer->Add(exp_avg), answer->Add(exp_avg_sq);
    answer->Add(scales), answer->Add(changed), answer->Add(moved), answer->Add(distances), answer->Add(emas);
    answer->Add(ema_lows), answer->Add(health), answer->Add(steps);
    tx_adamw_group bad = group;
    bad.beta1 = 1.5;
    answer->Status(tx_adamw_check_groups(&bad, 1, nullptr, &error), error);
  }

  tx_dtype moment_dtype, master_dtype;
  std::vector<float> masters;
  std::vector<uint16_t> params;
  std::vector<float> grads;
  std::vector<int16_t> remainder;
  std::vector<uint8_t> exp_avg, exp_avg_sq, scales, changed;
  std::vector<uint16_t> moved;
  std::vector<uint8_t> distances;
  std::vector<uint16_t> emas;
  std::vector<uint8_t> ema_lows;
  std::vector<int64_t> health;
  std::vector<float> steps{0.0f}, grad_scale{3.0f}, clip_coef{0.7f};
};

template <tx_dtype moment, bool remainders>
void Adamw(Answer *answer) {
  Step(moment, remainders).Run(answer);
}

inline void Muon(Answer *answer) {
  std::vector<float> params = Normal(kNumel, 0x1p-28f, 3), grads = Normal(kNumel, 0x1p-30f, 4), momentum(kNumel),
                     work(kNumel), steps{2.0f};
  std::vector<float> divisor{3.0f};
  const tx_tensor param = Tensor(&params, TX_F32), grad = Tensor(&grads, TX_F32), m = Tensor(&momentum, TX_F32),
                  u = Tensor(&work, TX_F32), count = Tensor(&steps, TX_F32);
  tx_muon_momentum_args first = TX_MUON_MOMENTUM_ARGS_INIT;
  first.n = 1;
  first.grads = &grad;
  first.momentums = &m;
  first.updates = &u;
  first.steps = &count;
  first.grad_scale = Tensor(&divisor, TX_F32);
  tx_error error = {};
  answer->Status(tx_muon_momentum(&first, nullptr, &error), error);
  const tx_muon_part part = {0, 0};
  const tx_muon_rate rate = {0.01, 0.003};
  tx_muon_update_args second = TX_MUON_UPDATE_ARGS_INIT;
  second.n = 1;
  second.params = &param;
  second.updates = &u;
  second.steps = &count;
  second.n_parts = 1;
  second.parts = &part;
  second.rates = &rate;
  answer->Status(tx_muon_update(&second, nullptr, &error), error);
  answer->Add(params), answer->Add(momentum), answer->Add(work), answer->Add(steps);
}

inline void Statistics(Answer *answer) {
  std::vector<float> grads = Normal(kNumel, 0x1p-30f, 5), divisor{3.0f}, clip{0}, found{0};
  std::vector<double> norm{0};
  grads[3] = 0x1p-80f;
  std::vector<int64_t> stats(TX_STATS_LEN);
  tx_error error = {};
  const tx_tensor grad = Tensor(&grads, TX_F32);
  answer->Status(tx_grad_stats(1, &grad, Tensor(&stats, TX_I64), {}, nullptr, &error), error);
  for (const double most :
       {0.1, 1e-300, 5.0, std::numeric_limits<double>::infinity(), -0.5, std::numeric_limits<double>::quiet_NaN()}) {
    answer->Status(tx_grad_norm(Tensor(&stats, TX_I64), Tensor(&divisor, TX_F32), most, Tensor(&norm, TX_F64),
                                Tensor(&clip, TX_F32), Tensor(&found, TX_F32), &error),
                   error);
    answer->Add(norm), answer->Add(clip), answer->Add(found);
  }
  answer->Add(stats);
}

inline void Buckets(Answer *answer) {
  std::vector<float> grads = Normal(kNumel, 0x1p-30f, 6), shard(kNumel), other(kNumel);
  std::vector<uint8_t> codes(kNumel), scales((kNumel + 127) / 128);
  const tx_tensor grad = Tensor(&grads, TX_F32);
  const int64_t offset = 0;
  tx_bucket_pack_args pack = TX_BUCKET_PACK_ARGS_INIT;
  pack.n = 1;
  pack.grads = &grad;
  pack.offsets = &offset;
  pack.bucket = Tensor(&codes, TX_U8);
  pack.scales = Tensor(&scales, TX_U8);
  tx_error error = {};
  answer->Status(tx_bucket_pack(&pack, nullptr, &error), error);
  const tx_tensor chunks[2] = {pack.bucket, pack.bucket}, chunk_scales[2] = {pack.scales, pack.scales};
  tx_bucket_reduce_args reduce = TX_BUCKET_REDUCE_ARGS_INIT;
  reduce.n = 2;
  reduce.chunks = chunks;
  reduce.scales = chunk_scales;
  reduce.shard = Tensor(&shard, TX_F32);
  reduce.scale = 1.0 / 3.0;
  answer->Status(tx_bucket_reduce(&reduce, nullptr, &error), error);
  const tx_tensor target = Tensor(&other, TX_F32);
  answer->Status(tx_bucket_unpack(pack.bucket, pack.scales, 1, &offset, &target, nullptr, &error), error);
  answer->Status(tx_bucket_accumulate(1, &target, &grad, nullptr, &error), error);
  std::vector<uint16_t> half(kNumel);
  const tx_tensor to = Tensor(&half, TX_F16);
  tx_cast_args cast = TX_CAST_ARGS_INIT;
  cast.n = 1;
  cast.srcs = &grad;
  cast.dsts = &to;
  answer->Status(tx_cast(&cast, nullptr, &error), error);
  answer->Add(codes), answer->Add(scales), answer->Add(shard), answer->Add(other), answer->Add(half);
  for (const double scale : {1e300, std::numeric_limits<double>::quiet_NaN()}) {
    reduce.scale = scale;
    answer->Status(tx_bucket_reduce(&reduce, nullptr, &error), error);
  }
}

inline void Messages(Answer *answer) {
  std::vector<float> values = Normal(3 * TX_PLANES_BLOCK + 77, 0x1p-28f, 7);
  std::vector<uint16_t> halves = Upper(values);
  halves.resize(kNumel / TX_BLOCK * TX_BLOCK);
  tx_error error = {};
  std::vector<uint8_t> message(static_cast<size_t>(tx_compressed_bytes(static_cast<int64_t>(halves.size()))));
  int64_t rest = 0;
  answer->Status(tx_compress(Tensor(&halves, TX_BF16), Tensor(&message, TX_U8), &rest, &error), error);
  std::vector<uint16_t> back(halves.size());
  answer->Status(tx_expand(Tensor(&message, TX_U8), Tensor(&back, TX_BF16), &rest, &error), error);
  answer->Add(message), answer->Add(back), answer->Add(rest);

  std::vector<uint8_t> planes(static_cast<size_t>(tx_planes_bound(TX_F32, static_cast<int64_t>(values.size()))));
  int64_t bytes = 0;
  answer->Status(tx_planes_encode(Tensor(&values, TX_F32), Tensor(&planes, TX_U8), &bytes, &error), error);
  planes.resize(static_cast<size_t>(bytes));
  std::vector<float> read(values.size());
  answer->Status(tx_planes_decode(Tensor(&planes, TX_U8), Tensor(&read, TX_F32), &error), error);
  answer->Add(planes), answer->Add(read);
}

template <tx_dtype dtype>
void Delta(Answer *answer) {
  static const std::vector<float> moves = Normal(3 * kNumel, 0x1p-40f, 8);
  std::vector<float> masters = Normal(3 * kNumel, 0x1p-28f, 9);
  std::vector<uint16_t> weights = Upper(masters), moved((3 * kNumel + 127) / 128);
  std::vector<uint16_t> engine = weights;
  std::vector<uint8_t> changed((3 * kNumel + 7) / 8);
  std::vector<int64_t> checksums((3 * kNumel + TX_CHECKSUM - 1) / TX_CHECKSUM);
  const tx_delta_param param = {"weight", 3 * kNumel, dtype, 0};
  const uint64_t id[2] = {1, 2};
  tx_delta_chain chain = TX_DELTA_CHAIN_INIT;
  tx_error error = {};
  answer->Status(tx_delta_chain_begin(1, &param, id, 0, 1, &chain, &error), error);
  const tx_delta_run run = {
      0, 0, Tensor(&weights, dtype), Tensor(&changed, TX_U8), Tensor(&moved, TX_BF16), {}, Tensor(&checksums, TX_I64)};
  answer->Status(tx_delta_renew(1, &run, nullptr, &error), error);
  for (size_t i = 0; i < weights.size(); i += 3) {
    weights[i] = static_cast<uint16_t>(weights[i] ^ (i % 5 == 0));
    if (i % 5 == 0) changed[i / 8] |= static_cast<uint8_t>(1 << i % 8);
    moved[i / TX_BLOCK] = 0x3a40;
  }
  tx_delta_encode_args args = TX_DELTA_ENCODE_ARGS_INIT;
  args.n_params = 1;
  args.params = &param;
  args.n_runs = 1;
  args.runs = &run;
  args.steps = 1;
  tx_delta_message message = {};
  answer->Status(tx_delta_encode(&args, &chain, nullptr, &message, &error), error);
  const tx_tensor bytes = {message.data, message.bytes, TX_U8, 0};
  answer->Add(std::string(static_cast<const char *>(message.data), static_cast<size_t>(message.bytes)));
  const tx_delta_piece piece = {0, 0, 1, 3 * kNumel, 0, engine.data(), 0, 1};
  tx_delta_receiver *receiver = nullptr;
  answer->Status(tx_delta_open(1, &param, 1, &piece, &receiver, &error), error);
  answer->Status(tx_delta_apply(receiver, 1, &bytes, TX_DELTA_FULL, nullptr, &error), error);
  tx_delta_close(receiver);
  tx_delta_free(&message);
  answer->Add(engine), answer->Add(chain);
  std::vector<tx_delta_written> written(1);
  written[0].weights = Tensor(&weights, dtype);
  written[0].masters = Tensor(&masters, TX_F32);
  written[0].moved = Tensor(&moved, TX_BF16);
  answer->Status(tx_delta_mark(1, written.data(), nullptr, &error), error);
  answer->Add(moved), answer->Add(written[0].marked);
}

inline void Policy(Answer *answer) {
  tx_setting settings[] = {
      {"lr", nullptr, 0.00015, 0, TX_VALUE_FLOAT, 0},
      {"min_lr", nullptr, 1e-5, 0, TX_VALUE_FLOAT, 0},
      {"adam_beta2", nullptr, 0.95, 0, TX_VALUE_FLOAT, 0},
      {"loss_scale_backoff_factor", nullptr, 0.75, 0, TX_VALUE_FLOAT, 0},
      {"exp_avg_dtype", "  BFloat16 ", 0, 0, TX_VALUE_TEXT, 0},
  };
  tx_policy_args args = TX_POLICY_ARGS_INIT;
  args.n_config = 5;
  args.config = settings;
  args.model_dtype = TX_BF16;
  tx_policy policy = TX_POLICY_INIT;
  std::vector<tx_origin> origins(TX_POLICY_FIELDS);
  tx_error error = {};
  answer->Status(tx_policy_resolve(&args, &policy, origins.data(), TX_POLICY_FIELDS, &error), error);
  answer->Add(policy), answer->Add(origins);
  char table[8192] = {};
  answer->Add(tx_policy_describe(&policy, origins.data(), table, sizeof table));
  answer->Add(std::string(table));
  for (const double wrong : {-0.5, 1.25, 1e-320, 0.5, 1.0, 4.5e9, std::numeric_limits<double>::quiet_NaN()}) {
    for (const char *key : {"lr", "adam_beta1", "loss_scale_growth_factor", "loss_scale_backoff_factor", "link_gbps",
                            "offload_fraction", "initial_loss_scale", "min_8bit_size"}) {
      settings[0].key = key;
      settings[0].number = wrong;
      tx_policy result = TX_POLICY_INIT;
      answer->Status(tx_policy_resolve(&args, &result, nullptr, 0, &error), error);
      answer->Add(std::string(key));
    }
  }
  tx_scale scale = TX_SCALE_INIT;
  answer->Status(tx_scale_from_policy(&policy, &scale, &error), error);
  scale.backoff_factor = 0.7;
  scale.growth_factor = 1.1;
  scale.growth_interval = 1;
  scale.clean_steps = 0;
  for (int i = 0; i < 40; i++)
    answer->Status(tx_scale_update(&scale, i % 3 == 0, &error), error);
  answer->Add(scale);
  scale.backoff_factor = 1.5;
  answer->Status(tx_scale_update(&scale, 0, &error), error);
}

// Sizes that use all digits of a double, many of them equal. Their sums are rounded, and the least loaded rank depends
// on the rounding. Computed once, on the plain thread.
inline const std::vector<double> &Sizes() {
  static const std::vector<double> sizes = [] {
    std::vector<double> made;
    for (int64_t i = 0; i < 400; i++)
      made.push_back(static_cast<double>(1 + i * i % 11) / 3.0);
    return made;
  }();
  return sizes;
}

inline void Owners(Answer *answer) {
  tx_error error = {};
  for (int64_t n = 5; n <= static_cast<int64_t>(Sizes().size()); n += 5) {
    for (int64_t ranks = 2; ranks < 9; ranks++) {
      std::vector<int64_t> room(static_cast<size_t>(tx_plan_owners_bytes(n, ranks) / 8 + 1));
      std::vector<int32_t> owners(static_cast<size_t>(n));
      int64_t fingerprint = 0;
      answer->Status(tx_plan_owners(n, Sizes().data(), ranks, room.data(), owners.data(), &fingerprint, &error), error);
      answer->Add(owners), answer->Add(fingerprint);
    }
  }
}

inline bool AreLegal(const tx_muon_group &group) {
  return tx_muon_check_group(&group, nullptr, nullptr) == TX_OK;
}

// The last legal value of ns_a before an illegal one.
inline double Edge(tx_muon_group group, double legal, double illegal) {
  while (std::nextafter(legal, illegal) != illegal) {
    group.ns_a = legal + (illegal - legal) / 2;
    (AreLegal(group) ? legal : illegal) = group.ns_a;
  }
  return legal;
}

inline void Coefficients(Answer *answer) {
  tx_muon_group group = {0.02, 0.1, 0.95, 3.4445, -4.7750, 2.0315, 1e-7, 5};
  static const double edge = Edge(group, 3.4445, 10.0);
  tx_error error = {};
  group.ns_a = edge;
  for (int i = 0; i < 40; i++) {
    answer->Status(tx_muon_check_group(&group, "group 0: ", &error), error);
    group.ns_a = std::nextafter(group.ns_a, i < 20 ? 10.0 : 0.0);
  }
  for (int64_t i = 1; i < 90; i++) {
    answer->Add(tx_muon_operations(64 + 37 * i, 1024, 5, TX_MUON_AUTO, 2, 0));
    // The product has more digits than a double.
    answer->Add(tx_muon_operations(1000003 + i, 10000019, 5, TX_MUON_AUTO, 2, 0));
    answer->Add(tx_muon_lr_ratio(i * 7, 13, i & 1));
    answer->Add(tx_muon_panel(i * 61, TX_F32, 1, 0));
    answer->Add(tx_muon_lanes(i * 61, 512, TX_F32, 8));
    answer->Add(tx_muon_stack(i * 61, 512));
  }
}

inline void Rates(Answer *answer) {
  std::vector<int64_t> took;
  for (int64_t i = 0; i < 3 * TX_LINK_ROUNDS; i++)
    took.push_back(1000003 + 7919 * i);
  answer->Add(tx_link_gbps(took.data(), nullptr, 3));
  for (const double gbps : {0.1, 0.7, 1.3, 10.1, 100.3, -1.5})
    answer->Add(tx_compresses(TX_COMPRESSION_AUTO, gbps));
}

// A link on which a message of `bytes` takes exactly the longest allowed time: whether one more byte fits depends on
// rounding.
struct Link {
  int64_t world, bytes;
  double gbps;
};

// Computed once, on the plain thread.
inline const std::vector<Link> &Links() {
  static const std::vector<Link> links = [] {
    std::vector<Link> made;
    for (int64_t world = 2; world < 10; world++)
      for (int64_t bytes = 100000; bytes < 8000000; bytes += 100000) {
        const double sent = 2.0 - 2.0 / static_cast<double>(world);
        made.push_back({world, bytes, static_cast<double>(bytes) * sent * 8e-3 / 16e3});
      }
    return made;
  }();
  return links;
}

inline void Cuts(Answer *answer) {
  tx_error error = {};
  std::vector<int64_t> bytes, buffer;
  for (int64_t i = 0; i < 50; i++)
    buffer.push_back(i / 20);
  for (const Link &link : Links()) {
    for (int64_t i = 3; i < 12; i++)
      answer->Add(tx_coalesce_cuts(i * link.bytes, link.world, link.gbps, 0));
    for (const int64_t parts : {8, 16}) {
      bytes.assign(50, link.bytes / parts);
      tx_coalesce_args args = TX_COALESCE_ARGS_INIT;
      args.n_buckets = 50;
      args.bytes = bytes.data();
      args.buffer = buffer.data();
      args.world = link.world;
      args.link_gbps = link.gbps;
      std::vector<int64_t> ends(50);
      int64_t messages = 0;
      answer->Status(tx_coalesce(&args, ends.data(), &messages, &error), error);
      answer->Add(ends), answer->Add(messages);
    }
  }
  for (const double fraction : {0.1, 0.3, 0.7, 1.5}) {
    std::vector<int64_t> heap(50);
    std::vector<int32_t> chosen(50);
    answer->Status(tx_offload_choose(bytes.data(), 50, fraction, heap.data(), chosen.data(), &error), error);
    answer->Add(chosen);
  }
}

// Numbers that become 0 if subnormals are flushed, and NaN, which may trap in a comparison: whether they are legal, and
// what they give.
constexpr double kTiny = std::numeric_limits<double>::denorm_min();
constexpr double kTinies[] = {kTiny, -kTiny, 0x1p-1040, -0x1p-1040, 0.0, std::numeric_limits<double>::quiet_NaN()};
constexpr float kTinyFloats[] = {0x1p-149f,  -0x1p-149f, 0x1p-130f,
                                 -0x1p-130f, 0.0f,       std::numeric_limits<float>::quiet_NaN()};

inline void TinySteps(Answer *answer) {
  const auto ask = [&](const tx_adamw_group &group, float step, float scale, float found, double decay, double lr) {
    std::vector<float> param(3, 1.0f), grad(3, 0x1p-126f), m(3), v(3), average(3), steps{step}, divisor{scale},
        skip{found};
    std::vector<double> rate{lr};
    std::vector<int64_t> skipped{0};
    const tx_tensor p = Tensor(&param, TX_F32), g = Tensor(&grad, TX_F32), avg = Tensor(&m, TX_F32),
                    sq = Tensor(&v, TX_F32), count = Tensor(&steps, TX_F32), ema = Tensor(&average, TX_F32),
                    rates = Tensor(&rate, TX_F64);
    tx_adamw_args args = TX_ADAMW_ARGS_INIT;
    args.n = args.n_groups = 1;
    args.params = &p;
    args.grads = &g;
    args.exp_avgs = &avg;
    args.exp_avg_sqs = &sq;
    args.steps = &count;
    args.groups = &group;
    args.lrs = &rates;
    args.grad_scale = Tensor(&divisor, TX_F32);
    args.found_inf = Tensor(&skip, TX_F32);
    args.skipped = Tensor(&skipped, TX_I64);
    args.emas = &ema;
    args.ema_decay = decay;
    tx_error error = {};
    answer->Status(tx_adamw_check(&args, &error), error);
    answer->Status(tx_adamw(&args, nullptr, &error), error);
    answer->Status(tx_adamw_check_groups(&group, 1, nullptr, &error), error);
    answer->Add(param), answer->Add(m), answer->Add(v), answer->Add(average), answer->Add(steps), answer->Add(skipped);
  };
  const tx_adamw_group plain = {1e-3, 0.9, 0.999, 1e-8, 0.1, 0, 1};
  double tx_adamw_group::*const kFields[] = {
      &tx_adamw_group::lr,           &tx_adamw_group::beta1,    &tx_adamw_group::beta2,    &tx_adamw_group::eps,
      &tx_adamw_group::weight_decay, &tx_adamw_group::maximize, &tx_adamw_group::decoupled};
  for (const double tiny : kTinies) {
    for (const auto field : kFields) {
      tx_adamw_group group = plain;
      group.*field = tiny;
      ask(group, 0, 1, 0, 0.5, 1e-3);
    }
    ask(plain, 0, 1, 0, tiny, 1e-3);
    ask(plain, 0, 1, 0, 0.5, tiny);
  }
  for (const float tiny : kTinyFloats)
    ask(plain, tiny, 1, 0, 0.5, 1e-3), ask(plain, 0, tiny, 0, 0.5, 1e-3), ask(plain, 0, 1, tiny, 0.5, 1e-3);
}

inline void TinyMuon(Answer *answer) {
  tx_error error = {};
  std::vector<float> param(3, 1.0f), grad(3, 0x1p-126f), m(3), u(3), steps(1);
  const tx_tensor p = Tensor(&param, TX_F32), g = Tensor(&grad, TX_F32), momentum = Tensor(&m, TX_F32),
                  work = Tensor(&u, TX_F32), count = Tensor(&steps, TX_F32);
  const tx_muon_part part = {0, 0};
  const tx_muon_group group = {0.02, 0.1, 0.95, 3.4445, -4.7750, 2.0315, 1e-7, 5};
  double tx_muon_group::*const kFields[] = {&tx_muon_group::lr, &tx_muon_group::weight_decay, &tx_muon_group::momentum,
                                            &tx_muon_group::eps, &tx_muon_group::ns_c};
  for (size_t i = 0; i < std::size(kTinies); i++) {
    tx_muon_momentum_args first = TX_MUON_MOMENTUM_ARGS_INIT;
    first.n = 1;
    first.grads = &g;
    first.momentums = &momentum;
    first.updates = &work;
    first.steps = &count;
    first.momentum = kTinies[i];
    answer->Status(tx_muon_momentum(&first, nullptr, &error), error);
    for (const bool decays : {false, true}) {
      const tx_muon_rate rate = {decays ? 1e-3 : kTinies[i], decays ? kTinies[i] : 1e-3};
      tx_muon_update_args second = TX_MUON_UPDATE_ARGS_INIT;
      second.n = second.n_parts = 1;
      second.params = &p;
      second.updates = &work;
      second.steps = &count;
      second.parts = &part;
      second.rates = &rate;
      answer->Status(tx_muon_update(&second, nullptr, &error), error);
    }
    for (const auto field : kFields) {
      tx_muon_group other = group;
      other.*field = kTinies[i];
      answer->Status(tx_muon_check_group(&other, nullptr, &error), error);
    }
    steps[0] = kTinyFloats[i];
  }
  answer->Add(param), answer->Add(m), answer->Add(u), answer->Add(steps);
}

inline void TinyDecisions(Answer *answer) {
  tx_error error = {};
  double tx_scale::*const kFields[] = {&tx_scale::growth_factor, &tx_scale::backoff_factor, &tx_scale::min_scale,
                                       &tx_scale::scale};
  std::vector<int64_t> stats(TX_STATS_LEN), bytes(9, 4000), buffer(9), ends(9), heap(9), room(100);
  std::vector<int32_t> chosen(9), owners(9);
  for (const double tiny : kTinies) {
    for (const auto field : kFields) {
      tx_scale scale = TX_SCALE_INIT;
      scale.*field = tiny;
      if (field == &tx_scale::min_scale) scale.scale = 0x1p-1030;
      answer->Status(tx_scale_update(&scale, 1, &error), error);
      answer->Status(tx_scale_update(&scale, 1, &error), error);
      answer->Add(scale);
    }
    std::vector<float> norm{-1}, clip{-1}, found{-1}, divisor{3.0f};
    answer->Status(tx_grad_norm(Tensor(&stats, TX_I64), Tensor(&divisor, TX_F32), tiny, Tensor(&norm, TX_F32),
                                Tensor(&clip, TX_F32), Tensor(&found, TX_F32), &error),
                   error);
    answer->Add(norm), answer->Add(clip), answer->Add(found);
    tx_coalesce_args args = TX_COALESCE_ARGS_INIT;
    args.n_buckets = 9;
    args.bytes = bytes.data();
    args.buffer = buffer.data();
    args.world = 2;
    args.link_gbps = tiny;
    int64_t messages = 0;
    answer->Status(tx_coalesce(&args, ends.data(), &messages, &error), error);
    answer->Add(messages);
    answer->Add(tx_coalesce_cuts(1 << 20, 2, tiny, 0));
    answer->Add(tx_compresses(TX_COMPRESSION_AUTO, tiny));
    answer->Status(tx_offload_choose(bytes.data(), 9, tiny, heap.data(), chosen.data(), &error), error);
    answer->Add(chosen);
    const std::vector<double> sizes(9, tiny);
    answer->Status(tx_plan_owners(9, sizes.data(), 2, room.data(), owners.data(), nullptr, &error), error);
    answer->Add(owners);
  }
}

struct Question {
  const char *id;
  void (*ask)(Answer *answer);
};
inline const Question kQuestions[] = {
    {"adamw_f32_moments", Adamw<TX_F32, false>},
    {"adamw_bf16_moments_remainders", Adamw<TX_BF16, true>},
    {"adamw_8bit_remainders", Adamw<TX_U8, true>},
    {"muon", Muon},
    {"statistics", Statistics},
    {"buckets", Buckets},
    {"messages", Messages},
    {"delta_bf16", Delta<TX_BF16>},
    {"delta_f16", Delta<TX_F16>},
    {"policy", Policy},
    {"owners", Owners},
    {"coefficients", Coefficients},
    {"rates", Rates},
    {"cuts", Cuts},
    {"tiny_steps", TinySteps},
    {"tiny_muon", TinyMuon},
    {"tiny_decisions", TinyDecisions},
};
inline void PrintTo(const Question &question, std::ostream *out) {
  *out << question.id;
}

}  // namespace environment

#endif
