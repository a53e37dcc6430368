#include "csrc/core/policy_states.h"

#include "csrc/core/dtype.h"
#include "csrc/core/status.h"

/* Indexed by tx_states. */
static const struct {
  tx_dtype moments;
  int32_t remainders; /* for bf16 weights that are not computed from fp32 shards */
} kStates[] = {{TX_NONE, 0}, {TX_F32, 0}, {TX_BF16, 0}, {TX_BF16, 1}, {TX_U8, 1}};

tx_dtype tx_states_moments(int32_t states) {
  return kStates[states].moments;
}

int tx_states_remainders(int32_t states, const tx_policy *policy) {
  return kStates[states].remainders && policy->param_dtype == TX_BF16 && policy->shard_dtype == TX_NONE;
}

tx_status tx_policy_moments(const tx_policy *row, int64_t numel, int32_t keep_32bit, tx_dtype *exp_avg,
                            tx_dtype *exp_avg_sq, tx_error *error) {
  if (!row || row->size != sizeof *row || numel < 0 || (keep_32bit != 0 && keep_32bit != 1) || !exp_avg ||
      !exp_avg_sq) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_policy_moments: row must begin with TX_POLICY_INIT, numel=%lld must be >= 0, keep_32bit=%d must "
                   "be 0 or 1, and no pointer may be NULL",
                   (long long)numel, (int)keep_32bit);
  }
  const int of_8_bits = row->exp_avg_dtype == TX_U8 || row->exp_avg_sq_dtype == TX_U8;
  const int kept = keep_32bit || (of_8_bits && numel < row->min_8bit_size);
  *exp_avg = kept ? TX_F32 : (tx_dtype)row->exp_avg_dtype;
  *exp_avg_sq = kept ? TX_F32 : (tx_dtype)row->exp_avg_sq_dtype;
  return TX_OK;
}
