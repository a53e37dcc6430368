// Makes legal random calls for gradient statistics, buckets, casts, masters and messages (see api_call.h).
#ifndef TESTS_CORE_API_BUCKETS_H
#define TESTS_CORE_API_BUCKETS_H

#include "tests/core/api_call.h"

namespace api {

inline void GradStats(Call *call) {
  struct Values {
    int64_t n;
    const tx_tensor *grads;
    tx_tensor stats, first_bad;
  };
  auto *a = call->New<Values>();
  const int64_t n = call->random.Below(4);
  auto *grads = call->New<tx_tensor>(n);
  for (int64_t i = 0; i < n; i++)
    grads[i] = call->Tensor(Numel(call->random), call->random.Of(kPlain));
  *a = {n, grads, call->Tensor(TX_STATS_LEN, TX_I64), call->Tensor(1, TX_I64)};
  call->OfList("grads", grads, n);
  call->Of("stats", &a->stats), call->Of("first_bad", &a->first_bad);
  call->Overlaps("first_bad", &a->first_bad, &a->stats);
  call->Never<int64_t>("n is", &a->n, {-1});
  if (n) call->Needed("grads", &a->grads);
  call->run = [=](tx_error *error) {
    return tx_grad_stats(a->n, a->grads, a->stats, a->first_bad, call->parallel, error);
  };
}

inline void GradNorm(Call *call) {
  struct Values {
    tx_tensor stats, scale, norm, clip, found;
    double most;
  };
  auto *a = call->New<Values>();
  *a = {call->Tensor(TX_STATS_LEN, TX_I64), call->F32(2.0f), call->F32(0), call->F32(0), call->F32(0), 1.0};
  if (call->random.OneIn(2)) a->norm = call->Tensor(1, TX_I64), a->norm.dtype = TX_F64;
  for (const auto &[name, t] : {std::pair{"stats", &a->stats},
                                {"grad_scale", &a->scale},
                                {"norm", &a->norm},
                                {"clip_coef", &a->clip},
                                {"found_inf", &a->found}})
    call->Of(name, t);
  call->Never<double>("max_norm", &a->most, {kNan, 0.0, -kTiny, -kInf});
  call->Other<double>("max_norm", &a->most, {kInf, kTiny, 1e300});
  call->run = [=](tx_error *error) {
    return tx_grad_norm(a->stats, a->scale, a->most, a->norm, a->clip, a->found, error);
  };
}

// Gradients at ascending offsets in a bucket; the bucket may have 8-bit codes with block scales.
struct Bucket {
  int64_t n;
  tx_tensor *grads, bucket, scales;
  int64_t *offsets;

  explicit Bucket(Call *call) : n(call->random.Below(4)) {
    const bool scaled = call->random.OneIn(2);
    grads = call->New<tx_tensor>(n);
    offsets = call->New<int64_t>(n);
    int64_t end = 0;
    for (int64_t i = 0; i < n; i++) {
      grads[i] = call->Tensor(Numel(call->random), call->random.Of(kPlain));
      offsets[i] = end;
      end += Blocks(grads[i].numel) * TX_BLOCK + TX_BLOCK * static_cast<int64_t>(call->random.Below(2));
    }
    bucket = call->Tensor(end + TX_BLOCK, scaled ? TX_U8 : call->random.Of(kPlain));
    scales = scaled ? call->Tensor(Blocks(bucket.numel), TX_U8) : tx_tensor{};
    for (int64_t i = 0; scaled && i < scales.numel; i++)
      static_cast<uint8_t *>(scales.data)[i] = static_cast<uint8_t>(100 + call->random.Below(40));
    for (int64_t i = 0; i < n; i++) {
      const std::string name = "offsets[" + std::to_string(i) + "]";
      call->Never<int64_t>(name, &offsets[i], {-1, -128, bucket.numel + 128, std::numeric_limits<int64_t>::max()});
      if (scaled) call->Never<int64_t>(name, &offsets[i], {offsets[i] + 1});
    }
  }
};

inline void BucketPack(Call *call) {
  auto *args = call->New<tx_bucket_pack_args>(1, TX_BUCKET_PACK_ARGS_INIT);
  const Bucket of(call);
  args->n = of.n, args->grads = of.grads, args->offsets = of.offsets, args->bucket = of.bucket;
  args->scales = of.scales, args->step = call->random.I64(), args->seed = 5;
  args->rounding = static_cast<int32_t>(call->random.Below(3));
  call->OfList("grads", of.grads, of.n);
  for (int64_t i = 0; i < of.n; i++)
    call->Overlaps("share memory", &of.grads[i], &args->bucket);
  call->Of("bucket", &args->bucket), call->Of("scales", &args->scales);
  call->Size("size", &args->size);
  call->Never<int32_t>("rounding", &args->rounding, {-1, 3});
  call->Never<int64_t>("n is", &args->n, {-1});
  if (of.n) call->Needed("grads", &args->grads), call->Needed("offsets", &args->offsets);
  call->run = [=](tx_error *error) { return tx_bucket_pack(args, call->parallel, error); };
}

inline void BucketUnpack(Call *call) {
  struct Values {
    tx_tensor bucket, scales;
    int64_t n;
    const int64_t *offsets;
    const tx_tensor *tensors;
  };
  auto *a = call->New<Values>();
  const Bucket of(call);
  *a = {of.bucket, of.scales, of.n, of.offsets, of.grads};
  call->OfList("tensors", of.grads, of.n);
  for (int64_t i = 0; i < of.n; i++)
    call->Overlaps("share memory", &of.grads[i], &a->bucket),
        call->Overlaps("share memory", &of.grads[i], &of.grads[0]);
  call->Of("bucket", &a->bucket), call->Of("scales", &a->scales);
  call->Never<int64_t>("n is", &a->n, {-1});
  if (of.n) call->Needed("tensors", &a->tensors), call->Needed("offsets", &a->offsets);
  call->run = [=](tx_error *error) {
    return tx_bucket_unpack(a->bucket, a->scales, a->n, a->offsets, a->tensors, call->parallel, error);
  };
}

inline void BucketReduce(Call *call) {
  auto *args = call->New<tx_bucket_reduce_args>(1, TX_BUCKET_REDUCE_ARGS_INIT);
  const int64_t n = 1 + call->random.Below(4), numel = Numel(call->random);
  const bool scaled = call->random.OneIn(2);
  const tx_dtype wire = scaled ? TX_U8 : call->random.Of(kPlain);
  auto *chunks = call->New<tx_tensor>(n), *scales = call->New<tx_tensor>(n);
  for (int64_t i = 0; i < n; i++) {
    chunks[i] = call->Tensor(numel, wire);
    if (scaled) scales[i] = call->Tensor(Blocks(numel), TX_U8);
    for (int64_t k = 0; scaled && k < numel; k++)  // no NaN codes
      static_cast<uint8_t *>(chunks[i].data)[k] &= 0xbf;
    for (int64_t k = 0; k < scales[i].numel; k++)
      static_cast<uint8_t *>(scales[i].data)[k] = static_cast<uint8_t>(100 + call->random.Below(40));
  }
  args->n = n, args->chunks = chunks, args->scales = scaled ? scales : nullptr;
  args->shard = call->Tensor(numel, call->random.Of(kPlain));
  if (call->random.OneIn(2)) args->stats = call->Tensor(TX_STATS_LEN, TX_I64);
  args->scale = 0.25;
  args->accumulate = static_cast<int32_t>(call->random.Below(2));
  call->OfList("chunks", chunks, n), call->OfList("scales", scales, scaled ? n : 0);
  call->Of("shard", &args->shard), call->Of("stats", &args->stats);
  call->Size("size", &args->size);
  call->Needed("chunks", &args->chunks);
  if (args->accumulate) call->Overlaps("shard", &args->shard, &chunks[0]);
  call->Never<double>("scale", &args->scale, {kNan, kInf, 1e300});
  call->Other<double>("scale", &args->scale, {0.0, -1.0, kTiny});
  call->Never<int32_t>("accumulate", &args->accumulate, {-1, 2});
  call->Never<int64_t>("chunks has", &args->n, {0, -1});
  call->run = [=](tx_error *error) { return tx_bucket_reduce(args, call->parallel, error); };
}

inline void Cast(Call *call) {
  Random &random = call->random;
  auto *args = call->New<tx_cast_args>(1, TX_CAST_ARGS_INIT);
  const int64_t n = random.Below(4);
  auto *srcs = call->New<tx_tensor>(n), *dsts = call->New<tx_tensor>(n), *src_scales = call->New<tx_tensor>(n),
       *dst_scales = call->New<tx_tensor>(n);
  auto *meta = call->New<tx_meta>(n);
  static const tx_dtype kScaled[] = {TX_U8, TX_F16};
  args->format = static_cast<int32_t>(random.Below(3));
  const auto make = [&](int64_t numel, tx_tensor *side, tx_tensor *scales) {
    const bool scaled = random.OneIn(2);
    *side = call->Tensor(numel, scaled ? random.Of(kScaled) : random.Of(kPlain));
    for (int64_t k = 0; side->dtype != TX_U8 && k < numel; k++)  // not negative, for the formats of squares
      static_cast<uint8_t *>(side->data)[(k + 1) * (side->dtype == TX_F32 ? 4 : 2) - 1] &= 0x7f;
    if (scaled) *scales = call->Tensor(Blocks(numel), TX_U8);
    for (int64_t k = 0; k < scales->numel; k++)
      static_cast<uint8_t *>(scales->data)[k] = static_cast<uint8_t>(110 + random.Below(20));
  };
  for (int64_t i = 0; i < n; i++) {
    const int64_t numel = Numel(random);
    make(numel, &srcs[i], &src_scales[i]);
    make(numel, &dsts[i], &dst_scales[i]);
    meta[i] = {random.I64(), 0, 0};
    call->Never<int64_t>("meta[" + std::to_string(i) + "]", &meta[i].start, {-1});
    call->Overlaps("dsts[" + std::to_string(i) + "]", &dsts[i], &srcs[i]);
  }
  args->n = n, args->srcs = srcs, args->dsts = dsts, args->src_scales = src_scales, args->dst_scales = dst_scales;
  args->meta = meta, args->seed = 3, args->step = random.I64();
  args->rounding = static_cast<int32_t>(random.Below(3));
  call->OfList("srcs", srcs, n), call->OfList("dsts", dsts, n);
  call->OfList("src_scales", src_scales, n), call->OfList("dst_scales", dst_scales, n);
  call->Size("size", &args->size);
  if (n) call->Needed("srcs", &args->srcs), call->Needed("dsts", &args->dsts);
  call->Absent("src_scales", &args->src_scales), call->Absent("meta", &args->meta);
  call->Never<int32_t>("format", &args->format, {-1, 3});
  call->Never<int32_t>("rounding", &args->rounding, {-1, 3});
  call->Never<int64_t>("n is", &args->n, {-1});
  call->run = [=](tx_error *error) { return tx_cast(args, call->parallel, error); };
}

// -- parallel lists of tensors: accumulate, masters -------------------------------------------------------------------

struct Lists {
  int64_t n;
  const tx_tensor *a, *b, *c;
  int32_t mode;
  tx_tensor counts;
};

inline Lists *MakeLists(Call *call, const char *a_name, const char *b_name, const char *c_name) {
  auto *lists = call->New<Lists>();
  lists->n = call->random.Below(4);
  const auto named = [&](const char *name, const tx_tensor **list) {
    if (!name) return;
    auto *made = call->New<tx_tensor>(lists->n);
    *list = made;
    if (lists->n) call->Needed(name, list);
  };
  named(a_name, &lists->a), named(b_name, &lists->b), named(c_name, &lists->c);
  call->Never<int64_t>("n is", &lists->n, {-1});
  return lists;
}

inline void Fill(Call *call, const char *name, const tx_tensor *list, int64_t i, int64_t numel, tx_dtype dtype) {
  auto *t = const_cast<tx_tensor *>(list) + i;
  *t = dtype == TX_NONE ? tx_tensor{} : call->Tensor(numel, dtype);
  call->Of(std::string(name) + "[" + std::to_string(i) + "]", t);
}

// Overlaps element i of each pair of lists. At least one tensor of each pair is written, so these calls have to fail.
inline void Share(Call *call, const std::vector<const tx_tensor *> &lists, int64_t i) {
  for (const tx_tensor *one : lists)
    for (const tx_tensor *other : lists)
      call->Overlaps("share memory", const_cast<tx_tensor *>(one) + i, other + i);
}

inline void BucketAccumulate(Call *call) {
  Lists *l = MakeLists(call, "main_grads", "grads", nullptr);
  for (int64_t i = 0; i < l->n; i++) {
    const int64_t numel = Numel(call->random);
    Fill(call, "main_grads", l->a, i, numel, call->random.Of(kPlain));
    Fill(call, "grads", l->b, i, numel, call->random.Of(kPlain));
    call->Overlaps("grads[" + std::to_string(i) + "]", const_cast<tx_tensor *>(l->b) + i, l->a + i);
  }
  call->run = [=](tx_error *error) { return tx_bucket_accumulate(l->n, l->a, l->b, call->parallel, error); };
}

inline void MasterEncode(Call *call) {
  Lists *l = MakeLists(call, "masters", "params", "remainders");
  for (int64_t i = 0; i < l->n; i++) {
    const int64_t numel = Numel(call->random);
    Fill(call, "masters", l->a, i, numel, TX_F32), Fill(call, "params", l->b, i, numel, TX_BF16);
    Fill(call, "remainders", l->c, i, numel, TX_I16);
    Share(call, {l->a, l->b, l->c}, i);
  }
  call->run = [=](tx_error *error) { return tx_master_encode(l->n, l->a, l->b, l->c, call->parallel, error); };
}

inline void MasterDecode(Call *call) {
  Lists *l = MakeLists(call, "params", "remainders", "masters");
  for (int64_t i = 0; i < l->n; i++) {
    const int64_t numel = Numel(call->random);
    Fill(call, "params", l->a, i, numel, TX_BF16), Fill(call, "remainders", l->b, i, numel, TX_I16);
    Fill(call, "masters", l->c, i, numel, TX_F32);
    Share(call, {l->a, l->c}, i), Share(call, {l->b, l->c}, i);
  }
  call->run = [=](tx_error *error) { return tx_master_decode(l->n, l->a, l->b, l->c, call->parallel, error); };
}

inline Lists *MakeMasters(Call *call, bool checked, const char *counts) {
  Lists *l = MakeLists(call, "params", "masters", checked ? "checksums" : nullptr);
  for (int64_t i = 0; i < l->n; i++) {
    const int64_t numel = Numel(call->random);
    const bool remainder = call->random.OneIn(2);
    const tx_dtype dtype = remainder || call->random.OneIn(2) ? TX_BF16 : TX_F16;
    Fill(call, "params", l->a, i, numel, dtype), Fill(call, "masters", l->b, i, numel, remainder ? TX_I16 : TX_F32);
    const int64_t sums = Blocks(numel, remainder ? TX_CHECKSUM : TX_SAMPLED);
    if (checked) Fill(call, "checksums", l->c, i, sums, call->random.OneIn(3) ? TX_NONE : TX_I64);
  }
  if (call->random.OneIn(2)) l->counts = call->Tensor(l->n, TX_I64);
  call->Of(counts, &l->counts);
  l->mode = static_cast<int32_t>(call->random.Below(3));
  call->Never<int32_t>("mode", &l->mode, {-1, 3});
  return l;
}

inline void MasterResync(Call *call) {
  Lists *l = MakeMasters(call, false, "changed");
  call->run = [=](tx_error *error) {
    return tx_master_resync(l->n, l->a, l->b, l->mode, l->counts, call->parallel, error);
  };
}

inline void MasterChecksum(Call *call) {
  Lists *l = MakeMasters(call, true, "stale");
  call->run = [=](tx_error *error) {
    return tx_master_checksum(l->n, l->a, l->b, l->c, l->mode, l->counts, call->parallel, error);
  };
}

// -- messages

struct Message {
  tx_tensor values, bytes;
  int64_t *number, begin, end;
};

inline Message *MakeCompressed(Call *call) {
  auto *m = call->New<Message>();
  const int64_t numel = TX_BLOCK * (1 + static_cast<int64_t>(call->random.Below(20)));
  *m = {call->Tensor(numel, TX_BF16), call->Tensor(tx_compressed_bytes(numel), TX_U8), call->New<int64_t>(), 0, 0};
  call->Of("values", &m->values), call->Of("message", &m->bytes);
  call->Overlaps("share memory", &m->bytes, &m->values);
  call->Needed("rest", &m->number);
  return m;
}

inline void Compress(Call *call) {
  Message *m = MakeCompressed(call);
  call->run = [=](tx_error *error) { return tx_compress(m->values, m->bytes, m->number, error); };
}

inline void Expand(Call *call) {
  Message *m = MakeCompressed(call);
  int64_t rest;
  EXPECT_EQ(tx_compress(m->values, m->bytes, &rest, nullptr), TX_OK);
  auto *data = static_cast<uint8_t *>(m->bytes.data);
  const int64_t at = call->random.Below(static_cast<uint32_t>(m->bytes.numel));
  call->May("message", "damaged", [=] { data[at] ^= 0x10; });
  call->run = [=](tx_error *error) { return tx_expand(m->bytes, m->values, m->number, error); };
}

inline constexpr tx_dtype kPlanes[] = {TX_F32, TX_BF16, TX_F16, TX_I16, TX_U8};

inline void PlanesEncode(Call *call) {
  auto *m = call->New<Message>();
  const int64_t numel = call->random.OneIn(9) ? 66000 : static_cast<int64_t>(call->random.Below(3000));
  const tx_dtype dtype = call->random.Of(kPlanes);
  *m = {call->Tensor(numel, dtype), {}, call->New<int64_t>(), 0, 0};
  m->bytes = call->Tensor(tx_planes_bound(dtype, numel), TX_U8);
  call->Of("values", &m->values), call->Of("out", &m->bytes);
  call->Overlaps("share memory", &m->values, &m->bytes);
  call->Must("out", "a byte less", [=] { m->bytes.numel--; });
  call->Needed("bytes", &m->number);
  char *data = static_cast<char *>(m->bytes.data);
  call->run = [=](tx_error *error) {
    const tx_status status = tx_planes_encode(m->values, m->bytes, m->number, error);
    if (status != TX_OK) return status;
    call->extra.assign(data, static_cast<size_t>(*m->number));  // the bytes after the message are unspecified
    std::memset(data, 0, static_cast<size_t>(m->bytes.numel));
    return status;
  };
}

// An encoded message, and a tensor to decode it into.
inline Message *MakePlanes(Call *call) {
  auto *m = call->New<Message>();
  const int64_t numel = call->random.OneIn(9) ? 140000 : static_cast<int64_t>(call->random.Below(3000));
  const tx_dtype dtype = call->random.Of(kPlanes);
  *m = {call->Tensor(numel, dtype), call->Tensor(tx_planes_bound(dtype, numel), TX_U8), nullptr, 0,
        Blocks(numel, TX_PLANES_BLOCK)};
  int64_t bytes = 0;
  EXPECT_EQ(tx_planes_encode(m->values, m->bytes, &bytes, nullptr), TX_OK);
  m->bytes.numel = bytes;
  std::memset(m->values.data, 0, static_cast<size_t>(numel));
  call->Of("message", &m->bytes);
  auto *data = static_cast<uint8_t *>(m->bytes.data);
  const int64_t at = call->random.Below(static_cast<uint32_t>(bytes));
  call->May("message", "damaged", [=] { data[at] ^= 0x10; });
  return m;
}

inline void PlanesRead(Call *call) {
  Message *m = MakePlanes(call);
  auto *planes = call->New<tx_planes>(1, TX_PLANES_INIT);
  auto **to = call->New<tx_planes *>(1, planes);
  call->Needed("planes", to), call->Size("planes", &planes->size);
  call->run = [=](tx_error *error) { return tx_planes_read(m->bytes, *to, error); };
}
inline void PlanesCheck(Call *call) {
  Message *m = MakePlanes(call);
  call->Never<int64_t>("blocks", &m->begin, {-1, m->end + 1});
  call->Never<int64_t>("blocks", &m->end, {-1, m->end + 1, std::numeric_limits<int64_t>::max()});
  call->run = [=](tx_error *error) { return tx_planes_check(m->bytes, m->begin, m->end, error); };
}
inline void PlanesDecode(Call *call) {
  Message *m = MakePlanes(call);
  call->Of("values", &m->values);
  call->run = [=](tx_error *error) { return tx_planes_decode(m->bytes, m->values, error); };
}
inline void PlanesDecodeRange(Call *call) {
  Message *m = MakePlanes(call);
  const int64_t all = m->values.numel;
  if (all > 2) m->begin = 1 + call->random.Below(static_cast<uint32_t>(all - 1)), m->values.numel = all - m->begin;
  call->Of("values", &m->values);
  call->Never<int64_t>("elements", &m->begin, {-1, all + 1, std::numeric_limits<int64_t>::max()});
  call->run = [=](tx_error *error) { return tx_planes_decode_range(m->bytes, m->begin, m->values, error); };
}

}  // namespace api

#endif
