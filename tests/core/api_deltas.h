// Makes legal random calls of the functions for weight deltas (see api_call.h).
#ifndef TESTS_CORE_API_DELTAS_H
#define TESTS_CORE_API_DELTAS_H

#include "csrc/torch_ext_delta.h"
#include "tests/core/api_call.h"

namespace api {

// A model of up to three parameters, each in one or two runs, and what a publisher tracks about them.
struct Model {
  int64_t n_params, n_runs = 0;
  tx_delta_param *params;
  tx_delta_run *runs;
  tx_delta_chain *chain;
  std::vector<std::vector<uint8_t>> version_0;  // the weights of each run

  // changed: as after some steps; otherwise as tx_delta_renew leaves it.
  Model(Call *call, bool changed) : n_params(1 + call->random.Below(3)) {
    Random &random = call->random;
    params = call->New<tx_delta_param>(n_params);
    runs = call->New<tx_delta_run>(2 * n_params);
    for (int64_t p = 0; p < n_params; p++) {
      params[p] = {call->Text("weight" + std::to_string(p)), Numel(random), random.Of({TX_BF16, TX_F16, TX_F32}), 0};
      const int64_t numel = params[p].numel, cut = random.OneIn(2) ? numel : numel / 2;
      if (cut) AddRun(call, p, 0, cut);
      if (cut < numel) AddRun(call, p, cut, numel - cut);
    }
    chain = call->New<tx_delta_chain>(1, TX_DELTA_CHAIN_INIT);
    const uint64_t id[2] = {3, 4};
    EXPECT_EQ(tx_delta_chain_begin(n_params, params, id, 0, 1, chain, nullptr), TX_OK);
    EXPECT_EQ(tx_delta_renew(n_runs, runs, nullptr, nullptr), TX_OK);
    for (int64_t r = 0; r < n_runs; r++) {
      const auto *data = static_cast<uint8_t *>(runs[r].weights.data);
      version_0.emplace_back(data, data + runs[r].weights.numel * (runs[r].weights.dtype == TX_F32 ? 4 : 2));
      if (changed) Change(call, &runs[r]);
    }
  }
  void NameParams(Call *call, const tx_delta_param **list, int64_t *n) const {
    call->Needed("param", list);
    call->Never<int64_t>("n_params", n, {-1});
    call->Must("weight0", "negative", [p = params] { p[0].numel = -1; });
    call->Never<int32_t>("weight0", &params[0].dtype, {TX_I16, 77, -1});
    call->Must("name", "no name", [p = params] { p[0].name = nullptr; });
    if (n_params > 1) call->Must("weight", "names in another order", [p = params] { std::swap(p[0].name, p[1].name); });
  }
  void NameRuns(Call *call, const tx_delta_run **list, int64_t *n) const {
    if (list) call->Needed("runs", list);
    if (n) call->Never<int64_t>("n is", n, {-1});
    for (int64_t r = 0; r < n_runs; r++) {
      const std::string name = "runs[" + std::to_string(r) + "]";
      tx_delta_run *run = &runs[r];
      for (tx_tensor *t : {&run->weights, &run->changed, &run->moved, &run->distances, &run->checksums})
        call->Of(name, t);
    }
  }

 private:
  void AddRun(Call *call, int64_t p, int64_t offset, int64_t numel) {
    const auto dtype = static_cast<tx_dtype>(params[p].dtype);
    tx_delta_run *run = &runs[n_runs++];
    *run = {p, offset, call->Tensor(numel, dtype), {}, {}, {}, {}};
    Random &random = call->random;
    if (!random.OneIn(6)) run->changed = call->Tensor((numel + 7) / 8, TX_U8);
    if (run->changed.numel && random.OneIn(2)) run->moved = call->Tensor(Blocks(numel), TX_BF16);
    if (run->changed.numel && dtype != TX_F32 && random.OneIn(3)) run->distances = call->Tensor((numel + 1) / 2, TX_U8);
    if (random.OneIn(2)) run->checksums = call->Tensor(Blocks(numel, TX_CHECKSUM), TX_I64);
  }
  static void Change(Call *call, tx_delta_run *run) {
    if (!run->changed.numel) return;
    auto *weights = static_cast<uint8_t *>(run->weights.data), *bits = static_cast<uint8_t *>(run->changed.data);
    auto *far = static_cast<uint8_t *>(run->distances.data);
    const int64_t item = run->weights.dtype == TX_F32 ? 4 : 2;
    for (int64_t i = 0; i < run->weights.numel; i += 1 + call->random.Below(60)) {
      const bool up = !(weights[i * item] & 1), negative = weights[i * item + item - 1] & 0x80;
      weights[i * item] ^= 1;
      bits[i / 8] = static_cast<uint8_t>(bits[i / 8] | 1 << i % 8);
      if (far) far[i / 2] = static_cast<uint8_t>(far[i / 2] | (up != negative ? 1 : 15) << i % 2 * 4);
      if (!run->moved.numel) continue;
      static const uint8_t kOne[] = {0x80, 0x3f};
      std::memcpy(static_cast<uint8_t *>(run->moved.data) + 2 * (i / TX_BLOCK), kOne, 2);
    }
  }
};

// Moves a message's bytes to call->extra, since their address differs from call to call, and frees the message.
inline tx_status Taken(Call *call, tx_status status, tx_delta_message *message) {
  if (status != TX_OK) return status;
  call->extra.assign(static_cast<const char *>(message->data), static_cast<size_t>(message->bytes));
  tx_delta_free(message);
  tx_delta_free(message);
  return status;
}

inline void ChainBegin(Call *call) {
  struct Values {
    int64_t n;
    const tx_delta_param *params;
    const uint64_t *id;
    int32_t part, parts;
    tx_delta_chain *chain;
  };
  const Model model(call, false);
  auto *a = call->New<Values>();
  auto *id = call->New<uint64_t>(2, 9);
  *a = {model.n_params, model.params, id, 1, 3, model.chain};
  model.NameParams(call, &a->params, &a->n);
  call->Needed("id", &a->id), call->Needed("chain", &a->chain);
  call->Size("chain", &model.chain->size);
  call->Must("id", "zeros", [=] { id[0] = id[1] = 0; });
  call->Never<int32_t>("part", &a->part, {-1, 3});
  call->Never<int32_t>("part", &a->parts, {0, -1, 1});
  call->run = [=](tx_error *error) {
    return tx_delta_chain_begin(a->n, a->params, a->id, a->part, a->parts, a->chain, error);
  };
}

inline void Renew(Call *call) {
  struct Values {
    int64_t n;
    const tx_delta_run *runs;
  };
  const Model model(call, true);
  auto *a = call->New<Values>();
  *a = {model.n_runs, model.runs};
  model.NameRuns(call, &a->runs, &a->n);
  call->run = [=](tx_error *error) { return tx_delta_renew(a->n, a->runs, call->parallel, error); };
}

inline void Mark(Call *call) {
  struct Values {
    int64_t n;
    tx_delta_written *tensors;
  };
  auto *a = call->New<Values>();
  a->n = call->random.Below(4);
  a->tensors = call->New<tx_delta_written>(a->n);
  for (int64_t i = 0; i < a->n; i++) {
    tx_delta_written *one = &a->tensors[i];
    const int64_t numel = Numel(call->random);
    one->weights = call->Tensor(numel, call->random.OneIn(2) ? TX_BF16 : TX_F16);
    if (call->random.OneIn(2)) {
      one->masters = call->Tensor(numel, TX_F32);
    } else {
      one->checksums = call->Tensor(Blocks(numel, TX_CHECKSUM), TX_I64);
    }
    one->moved = call->Tensor(Blocks(numel), TX_BF16);
    for (tx_tensor *t : {&one->weights, &one->masters, &one->checksums, &one->moved})
      call->Of("[" + std::to_string(i) + "]", t);
  }
  if (a->n) call->Needed("tensors", &a->tensors);
  call->Never<int64_t>("n is", &a->n, {-1});
  call->run = [=](tx_error *error) { return tx_delta_mark(a->n, a->tensors, call->parallel, error); };
}

inline void Encode(Call *call) {
  struct Values {
    const tx_delta_encode_args *args;
    tx_delta_chain *chain;
    tx_delta_message *message;
  };
  auto *args = call->New<tx_delta_encode_args>(1, TX_DELTA_ENCODE_ARGS_INIT);
  const bool whole = call->random.OneIn(3);
  const Model model(call, !whole);
  auto *a = call->New<Values>();
  *a = {args, model.chain, call->New<tx_delta_message>()};
  args->n_params = model.n_params, args->params = model.params;
  args->n_runs = model.n_runs, args->runs = model.runs;
  args->steps = static_cast<int64_t>(call->random.Below(2));
  args->kind = whole ? TX_DELTA_WHOLE : TX_DELTA_CHANGES;
  args->sliceable = static_cast<int32_t>(call->random.Below(2));
  call->Size("size", &args->size), call->Size("chain", &model.chain->size);
  call->Needed("args", &a->args), call->Needed("chain", &a->chain), call->Needed("message", &a->message);
  model.NameParams(call, &args->params, &args->n_params);
  model.NameRuns(call, &args->runs, &args->n_runs);
  call->Must("chain", "no id", [c = model.chain] { c->id[0] = c->id[1] = 0; });
  call->Other<int64_t>("steps", &args->steps, {-1, 2});
  call->Never<int32_t>("kind", &args->kind, {-1, 2});
  call->Other<int32_t>("sliceable", &args->sliceable, {-1, 2});
  call->Never<int64_t>("runs[0]", &model.runs[0].param, {-1, model.n_params});
  call->Never<int64_t>("runs[0]", &model.runs[0].offset, {-1});
  call->Never<int64_t>("weight0", &model.runs[0].offset, {1 << 20, std::numeric_limits<int64_t>::max()});
  call->Never<int64_t>("chain", &model.chain->version, {-1, std::numeric_limits<int64_t>::max()});
  call->Never<int32_t>("chain", &model.chain->part, {-1, 1});
  call->Never<int32_t>("chain", &model.chain->parts, {-1, 0});
  call->Must("parameters", "another model", [c = model.chain] { c->model ^= 1; });
  call->run = [=](tx_error *error) {
    return Taken(call, tx_delta_encode(a->args, a->chain, call->parallel, a->message, error), a->message);
  };
}

// A message of a model: changes, or whole weights.
struct Sent {
  int64_t n;
  tx_tensor *messages;
  Model model;

  Sent(Call *call, bool whole) : n(1), messages(call->New<tx_tensor>()), model(call, !whole) {
    tx_delta_encode_args args = TX_DELTA_ENCODE_ARGS_INIT;
    args.n_params = model.n_params, args.params = model.params;
    args.n_runs = model.n_runs, args.runs = model.runs;
    args.kind = whole ? TX_DELTA_WHOLE : TX_DELTA_CHANGES;
    args.sliceable = 1;
    tx_delta_message message = {};
    EXPECT_EQ(tx_delta_encode(&args, model.chain, nullptr, &message, nullptr), TX_OK);
    messages[0] = call->Tensor(message.bytes, TX_U8);
    std::memcpy(messages[0].data, message.data, static_cast<size_t>(message.bytes));
    tx_delta_free(&message);
    call->Of("message", messages);
    auto *data = static_cast<uint8_t *>(messages[0].data);
    const int64_t at = call->random.Below(static_cast<uint32_t>(messages[0].numel));
    call->Must("message", "damaged", [=] { data[at] ^= 0x10; });
  }
};

inline void Merge(Call *call) {
  struct Values {
    int64_t n;
    const tx_tensor *messages;
    tx_delta_message *merged;
  };
  const Sent sent(call, call->random.OneIn(2));
  auto *a = call->New<Values>();
  *a = {1, sent.messages, call->New<tx_delta_message>()};
  call->Needed("messages", &a->messages), call->Needed("merged", &a->merged);
  call->Never<int64_t>("messages", &a->n, {0, -1});
  call->run = [=](tx_error *error) {
    return Taken(call, tx_delta_merge(a->n, a->messages, a->merged, error), a->merged);
  };
}

inline void InfoOf(Call *call) {
  const Sent sent(call, call->random.OneIn(2));
  auto *info = call->New<tx_delta_info>(1, TX_DELTA_INFO_INIT);
  auto **to = call->New<tx_delta_info *>(1, info);
  call->Needed("info", to), call->Size("info", &info->size);
  call->run = [=, m = sent.messages](tx_error *error) { return tx_delta_info_of(*m, *to, error); };
}

inline void ParamsOf(Call *call) {
  struct Values {
    int64_t n;
    tx_delta_param *params;
  };
  const Sent sent(call, true);
  auto *a = call->New<Values>();
  *a = {sent.model.n_params, call->New<tx_delta_param>(sent.model.n_params)};
  call->Needed("params", &a->params);
  call->Never<int64_t>("n", &a->n, {-1, 0, a->n - 1});
  call->run = [=, m = sent.messages](tx_error *error) { return tx_delta_params_of(*m, a->n, a->params, error); };
}

// The arguments of tx_delta_open: an engine's weights in pieces.
struct Opened {
  int64_t n_params;
  const tx_delta_param *params;
  int64_t n_pieces;
  const tx_delta_piece *pieces;
  tx_delta_receiver **receiver;
};

inline Opened *MakePieces(Call *call, const Model &model) {
  auto *a = call->New<Opened>();
  auto *pieces = call->New<tx_delta_piece>(2 * model.n_params);
  *a = {model.n_params, model.params, 0, pieces, call->New<tx_delta_receiver *>()};
  for (int64_t r = 0; r < model.n_runs; r++) {  // one piece per run of the publisher, with the weights of version 0
    const tx_delta_run &run = model.runs[r];
    const tx_tensor own = call->Tensor(run.weights.numel, run.weights.dtype);
    const auto &was = model.version_0[static_cast<size_t>(r)];
    std::memcpy(own.data, was.data(), was.size());
    pieces[a->n_pieces++] = {run.param, run.offset, 1, own.numel, 0, own.data, 0, 1};
  }
  return a;
}

inline void Open(Call *call) {
  const Model model(call, false);
  Opened *a = MakePieces(call, model);
  auto *pieces = const_cast<tx_delta_piece *>(a->pieces);
  model.NameParams(call, &a->params, &a->n_params);
  call->Needed("pieces", &a->pieces), call->Needed("receiver", &a->receiver);
  call->Never<int64_t>("pieces", &a->n_pieces, {-1});
  call->Never<int64_t>("piece", &pieces[0].param, {-1, model.n_params});
  call->Never<int64_t>("weight0", &pieces[0].first, {-1, 1, std::numeric_limits<int64_t>::max()});
  call->Never<int64_t>("weight0", &pieces[0].rows, {0, -1, 3});
  call->Never<int64_t>("weight0", &pieces[0].columns, {0, -1, std::numeric_limits<int64_t>::max()});
  if (pieces[0].columns > 1) call->Never<int64_t>("weight0", &pieces[0].column_stride, {0});
  call->May("weight0", "without memory", [=] { pieces[0].data = nullptr; });
  call->Other<int64_t>("weight0", &pieces[0].column_stride, {0, 2, -1, std::numeric_limits<int64_t>::min()});
  call->run = [=](tx_error *error) {
    const tx_status status = tx_delta_open(a->n_params, a->params, a->n_pieces, a->pieces, a->receiver, error);
    if (status != TX_OK) return status;
    uint64_t id[2] = {1, 1};
    tx_delta_chain_id(*a->receiver, id);
    EXPECT_EQ(tx_delta_version(*a->receiver) + static_cast<int64_t>(id[0] + id[1]), 0);
    tx_delta_close(*a->receiver);
    tx_delta_close(nullptr);
    *a->receiver = nullptr;
    return status;
  };
}

inline void Apply(Call *call) {
  struct Values {
    tx_delta_receiver *none, **receiver;
    int64_t n;
    const tx_tensor *messages;
    int32_t verify;
  };
  const bool whole = call->random.OneIn(2);
  const Sent sent(call, whole);
  auto *a = call->New<Values>();
  Opened *opened = MakePieces(call, sent.model);
  *a = {nullptr, opened->receiver, 1, sent.messages, 0};
  call->Needed("messages", &a->messages);
  call->Must("receiver", "NULL", [=] { a->receiver = &a->none; });
  call->Never<int64_t>("messages", &a->n, {0, -1});
  call->Never<int32_t>("verify", &a->verify, {-1, 2});
  call->run = [=](tx_error *error) {
    tx_delta_receiver *receiver = nullptr;
    EXPECT_EQ(tx_delta_open(opened->n_params, opened->params, opened->n_pieces, opened->pieces, &receiver, nullptr),
              TX_OK);
    const tx_status status = tx_delta_apply(a->receiver == &a->none ? nullptr : receiver, a->n, a->messages, a->verify,
                                            call->parallel, error);
    EXPECT_EQ(tx_delta_version(receiver), status == TX_OK && !whole ? 1 : 0);
    tx_delta_close(receiver);
    return status;
  };
}

}  // namespace api

#endif
