/* A program without Python, torch or C++: it needs the headers, libtorch_ext.so and a C11 compiler.
 *
 * It asks the library for the dtypes of a bf16 model (the policy) and for the places of gradients in buckets shared by
 * two ranks (the layout). Then it fits y = W x + b by AdamW: bf16 weights, gradients and moments, with and without fp32
 * master weights. With them the fit becomes as good as bf16 weights can be; without, rounded to nearest, small updates
 * are lost.
 *
 *     bazel run //examples/c:fit
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "torch_ext_advanced.h"

enum { INPUTS = 64, OUTPUTS = 16, SAMPLES = 256, WEIGHTS = OUTPUTS * INPUTS, STEPS = 800, WORLD = 2 };

static tx_tensor f32(float *data, int64_t numel) {
  return (tx_tensor){.data = data, .numel = numel, .dtype = TX_F32};
}

static tx_tensor bf16(uint16_t *data, int64_t numel) {
  return (tx_tensor){.data = data, .numel = numel, .dtype = TX_BF16};
}

/* Whether a call failed; prints its message. The library prints nothing itself: the program decides what to do. */
static int failed(tx_status status, const tx_error *error) {
  if (status != TX_OK) {
    fprintf(stderr, "%s: %s\n", tx_status_name(status), error->message);
  }
  return status != TX_OK;
}

/* -- decisions ----------------------------------------------------------------------------------------------------- */

static int show_policy(tx_policy *policy) {
  tx_error error;
  tx_origin origins[TX_POLICY_FIELDS];
  tx_policy_args args = TX_POLICY_ARGS_INIT;
  args.model_dtype = TX_BF16;
  if (failed(tx_policy_resolve(&args, policy, origins, TX_POLICY_FIELDS, &error), &error)) {
    return 1;
  }
  const struct {
    const char *name;
    int32_t dtype;
    int field;
  } rows[] = {
      {"param_dtype", policy->param_dtype, TX_POLICY_param_dtype},
      {"main_params_dtype", policy->main_params_dtype, TX_POLICY_main_params_dtype},
      {"exp_avg_dtype", policy->exp_avg_dtype, TX_POLICY_exp_avg_dtype},
      {"exp_avg_sq_dtype", policy->exp_avg_sq_dtype, TX_POLICY_exp_avg_sq_dtype},
      {"main_grads_dtype", policy->main_grads_dtype, TX_POLICY_main_grads_dtype},
      {"grad_comm_dtype", policy->grad_comm_dtype, TX_POLICY_grad_comm_dtype},
  };
  printf("policy of a bf16 model\n");
  for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) {
    const tx_origin origin = origins[rows[i].field];
    printf("  %-18s %-5s (%s)\n", rows[i].name, tx_dtype_name((tx_dtype)rows[i].dtype),
           tx_source_name((tx_source)origin.source));
  }
  return 0;
}

static int show_layout(const tx_policy *policy) {
  tx_error error;
  const int64_t weight_shape[] = {OUTPUTS, INPUTS}, bias_shape[] = {OUTPUTS};
  tx_layout_param params[] = {
      {.name = "weight", .shape = weight_shape, .ndim = 2, .numel = WEIGHTS, .tied = -1},
      {.name = "bias", .shape = bias_shape, .ndim = 1, .numel = OUTPUTS, .tied = -1},
  };
  for (int i = 0; i < 2; ++i) {
    params[i].param_dtype = policy->param_dtype;
    params[i].grad_dtype = policy->main_grads_dtype;
    params[i].wire_dtype = policy->grad_comm_dtype;
  }
  tx_layout_args args = TX_LAYOUT_ARGS_INIT;
  args.n = 2;
  args.params = params;
  args.world = WORLD;
  tx_layout_place places[2];
  tx_layout_bucket buckets[2];
  tx_layout_summary summary;
  if (failed(tx_layout_plan(&args, places, buckets, 2, &summary, &error), &error)) {
    return 1;
  }
  printf("layout on %d ranks, fingerprint %016llx\n", WORLD, (unsigned long long)summary.fingerprint);
  for (int64_t b = 0; b < summary.n_buckets; ++b) {
    printf("  bucket %lld: %lld elements, %lld of them used\n", (long long)b, (long long)buckets[b].size,
           (long long)buckets[b].used);
  }
  for (int i = 0; i < 2; ++i) {
    printf("  %-6s in bucket %lld from element %lld\n", params[i].name, (long long)places[i].bucket,
           (long long)places[i].start);
  }
  return 0;
}

/* -- the problem --------------------------------------------------------------------------------------------------- */

/* Inputs, targets and the weights they come from; the last OUTPUTS parameters are the bias. */
static float inputs[SAMPLES][INPUTS], targets[SAMPLES][OUTPUTS], truth[WEIGHTS + OUTPUTS];

/* Uniform in [-1, 1): a 64-bit linear congruential generator (Knuth's constants), its upper 24 bits. */
static float uniform(uint64_t *state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return (float)(*state >> 40) * 0x1p-23f - 1.0f;
}

static float predict(const float *params, int sample, int output) {
  float sum = params[WEIGHTS + output];
  for (int i = 0; i < INPUTS; ++i) {
    sum += params[output * INPUTS + i] * inputs[sample][i];
  }
  return sum;
}

static void make_problem(void) {
  uint64_t state = 1;
  for (int i = 0; i < WEIGHTS + OUTPUTS; ++i) {
    truth[i] = uniform(&state);
  }
  for (int s = 0; s < SAMPLES; ++s) {
    for (int i = 0; i < INPUTS; ++i) {
      inputs[s][i] = uniform(&state);
    }
    for (int o = 0; o < OUTPUTS; ++o) {
      targets[s][o] = predict(truth, s, o);
    }
  }
}

/* Mean squared error and, where `grads` is given, its derivative. */
static double loss_of(const float *params, float *grads) {
  double loss = 0.0;
  if (grads != NULL) {
    memset(grads, 0, sizeof(float) * (WEIGHTS + OUTPUTS));
  }
  for (int s = 0; s < SAMPLES; ++s) {
    for (int o = 0; o < OUTPUTS; ++o) {
      const float error = predict(params, s, o) - targets[s][o];
      loss += (double)error * (double)error / (SAMPLES * OUTPUTS);
      if (grads != NULL) {
        const float slope = 2.0f * error / (SAMPLES * OUTPUTS);
        grads[WEIGHTS + o] += slope;
        for (int i = 0; i < INPUTS; ++i) {
          grads[o * INPUTS + i] += slope * inputs[s][i];
        }
      }
    }
  }
  return loss;
}

/* -- training ------------------------------------------------------------------------------------------------------ */

/* Converts to bf16, with rounding, or from it: tx_cast reads the dtypes of the tensors. */
static int cast(tx_tensor from, tx_tensor to) {
  tx_error error;
  tx_cast_args args = TX_CAST_ARGS_INIT;
  args.n = 1;
  args.srcs = &from;
  args.dsts = &to;
  return failed(tx_cast(&args, NULL, &error), &error);
}

/* Weight and bias from zero, STEPS steps; *loss is that of the bf16 weights afterwards. */
static int train(int with_masters, double *loss) {
  static uint16_t weights[WEIGHTS + OUTPUTS], grads[WEIGHTS + OUTPUTS], exp_avg[WEIGHTS + OUTPUTS],
      exp_avg_sq[WEIGHTS + OUTPUTS];
  static float masters[WEIGHTS + OUTPUTS], wide[WEIGHTS + OUTPUTS], wide_grads[WEIGHTS + OUTPUTS];
  memset(weights, 0, sizeof weights);
  memset(masters, 0, sizeof masters);
  memset(exp_avg, 0, sizeof exp_avg);
  memset(exp_avg_sq, 0, sizeof exp_avg_sq);
  float steps[2] = {0.0f, 0.0f};

  /* Two parameters in one array: the weight, and from element WEIGHTS on the bias. */
  const tx_tensor params[] = {bf16(weights, WEIGHTS), bf16(weights + WEIGHTS, OUTPUTS)};
  const tx_tensor gradients[] = {bf16(grads, WEIGHTS), bf16(grads + WEIGHTS, OUTPUTS)};
  const tx_tensor exp_avgs[] = {bf16(exp_avg, WEIGHTS), bf16(exp_avg + WEIGHTS, OUTPUTS)};
  const tx_tensor exp_avg_sqs[] = {bf16(exp_avg_sq, WEIGHTS), bf16(exp_avg_sq + WEIGHTS, OUTPUTS)};
  const tx_tensor fp32_masters[] = {f32(masters, WEIGHTS), f32(masters + WEIGHTS, OUTPUTS)};
  const tx_tensor counters[] = {f32(steps, 1), f32(steps + 1, 1)};
  const tx_meta meta[] = {{.id = tx_param_id("weight")}, {.id = tx_param_id("bias")}};
  tx_adamw_group group = {.beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .decoupled = 1.0};

  tx_adamw_args args = TX_ADAMW_ARGS_INIT;
  args.n = 2;
  args.params = params;
  args.grads = gradients;
  args.exp_avgs = exp_avgs;
  args.exp_avg_sqs = exp_avg_sqs;
  args.masters = with_masters ? fp32_masters : NULL;
  args.steps = counters;
  args.n_groups = 1;
  args.groups = &group;
  args.meta = meta;
  args.weight_rounding = TX_NEAREST;

  tx_error error;
  const int64_t all = WEIGHTS + OUTPUTS;
  for (int step = 0; step < STEPS; ++step) {
    if (cast(bf16(weights, all), f32(wide, all))) {
      return 1;
    }
    loss_of(wide, wide_grads);
    group.lr = 1e-2 * (1.0 - (double)step / STEPS);
    if (cast(f32(wide_grads, all), bf16(grads, all)) || failed(tx_adamw(&args, NULL, &error), &error)) {
      return 1;
    }
  }
  if (cast(bf16(weights, all), f32(wide, all))) {
    return 1;
  }
  *loss = loss_of(wide, NULL);
  return 0;
}

int main(void) {
  const uint32_t version = tx_version();
  printf("torch_ext %u.%u.%u, %s kernels\n", version >> 16, version >> 8 & 255u, version & 255u, tx_isa_selected());
  tx_policy policy = TX_POLICY_INIT;
  if (show_policy(&policy) || show_layout(&policy)) {
    return 1;
  }

  make_problem();
  uint16_t rounded[WEIGHTS + OUTPUTS];
  float best[WEIGHTS + OUTPUTS];
  if (cast(f32(truth, WEIGHTS + OUTPUTS), bf16(rounded, WEIGHTS + OUTPUTS)) ||
      cast(bf16(rounded, WEIGHTS + OUTPUTS), f32(best, WEIGHTS + OUTPUTS))) {
    return 1;
  }
  const double floor_loss = loss_of(best, NULL);
  double loss_with = 0.0, loss_without = 0.0;
  if (train(1, &loss_with) || train(0, &loss_without)) {
    return 1;
  }
  printf("mean squared error after %d steps\n", STEPS);
  printf("  bf16 weights, fp32 masters  %.2e\n", loss_with);
  printf("  bf16 weights alone          %.2e\n", loss_without);
  printf("  the true weights in bf16    %.2e\n", floor_loss);
  if (!(loss_with < 2.0 * floor_loss && loss_with < loss_without)) {
    fprintf(stderr, "the fit did not converge\n");
    return 1;
  }
  return 0;
}
