/* Muon's matrix products by torch: its addmm, called without Python.
 *
 * Note: lanes. Where the processor multiplies in tiles (AMX), torch multiplies bf16 matrices of these sizes on one
 * thread, however many there are; on other processors, threads that share a product are a few percent slower. Matrices
 * are independent, so each thread gets its own: inside a region of torch's pool every product is computed by the thread
 * that asks for it. A single matrix is multiplied in such a region too, because the number of threads that torch uses
 * can change a product's bits. */
#include "csrc/torch/torch_products.h"

#include <string.h>

#include "csrc/core/muon_iteration.h"
#include "csrc/core/status.h"
#include "csrc/ops/muon_square.h"
#include "csrc/ops/parallel.h"

typedef struct work {
  const tx_torch_abi *abi;
  const tx_parallel *pool; /* NULL: runs everything on this thread */
  tx_muon_job *job;
  tx_muon_iteration iteration;
  void *memory[TX_MUON_OPERANDS];
  int64_t small;
} work;

static int64_t rows_of(const work *w, int32_t operand) {
  return operand < TX_MUON_SQUARES ? w->iteration.rows : w->small;
}

static int64_t columns_of(const work *w, int32_t operand) {
  return operand < TX_MUON_SQUARES ? w->iteration.columns : w->small;
}

/* A block of an operand, or of its transpose. */
typedef struct block {
  int32_t operand, transposed;
  int64_t row, rows, column, columns;
} block;

/* A tensor that views the block; NULL: torch has no memory for a tensor. */
static AtenTensorHandle view_of(const work *w, const block *b) {
  const int64_t stride = columns_of(w, b->operand);
  const int64_t strides[2] = {b->transposed ? 1 : stride, b->transposed ? stride : 1};
  const int64_t sizes[2] = {b->rows, b->columns};
  char *data = w->memory[b->operand];
  data += (b->row * strides[0] + b->column * strides[1]) * (w->job->dtype == TX_BF16 ? 2 : 4);
  const int32_t dtype =
      w->job->dtype == TX_BF16 ? w->abi->aoti_torch_dtype_bfloat16() : w->abi->aoti_torch_dtype_float32();
  AtenTensorHandle view = NULL;
  if (w->abi->aoti_torch_create_tensor_from_blob(data, 2, sizes, strides, 0, dtype,
                                                 w->abi->aoti_torch_device_type_cpu(), -1, &view))
    return NULL;
  return view;
}

static int add_product(const work *w, const tx_muon_product *p) {
  const int64_t over = p->left_transposed ? rows_of(w, p->left) : columns_of(w, p->left);
  const block blocks[4] = {
      {p->out, 0, p->row, p->rows, p->column, p->columns},
      {p->added, 0, p->row, p->rows, p->column, p->columns},
      {p->left, p->left_transposed, p->row, p->rows, 0, over},
      {p->right, p->right_transposed, 0, over, p->column, p->columns},
  };
  AtenTensorHandle views[4];
  int failed = 0;
  for (int i = 0; i < 4; i++) {
    views[i] = view_of(w, &blocks[i]);
    failed |= !views[i];
  }
  failed = failed || w->abi->aoti_torch_cpu_addmm_out(views[0], views[1], views[2], views[3], p->beta, p->alpha) != 0;
  for (int i = 0; i < 4; i++) {
    if (views[i]) (void)w->abi->aoti_torch_delete_tensor_object(views[i]);
  }
  return failed;
}

static tx_tensor square_of(const work *w, int32_t operand) {
  return (tx_tensor){w->memory[operand], w->small * w->small, (tx_dtype)w->job->dtype, 0};
}

static int make(void *ctx, const tx_muon_product *p) {
  const work *w = ctx;
  if (p->kind == TX_MUON_ADD_PRODUCT) return add_product(w, p);
  if (p->kind == TX_MUON_MIRRORED)
    return tx_muon_mirror(square_of(w, p->out), w->small, w->iteration.panel, w->pool, NULL) != TX_OK;
  tx_muon_shift(square_of(w, p->out), w->small, p->alpha);
  return 0;
}

/* Orthogonalises one matrix. The kind of iteration is the same on every machine; the panels are those that are fastest
 * on this one. */
static void orthogonalise(const tx_torch_abi *abi, const tx_parallel *pool, tx_muon_job *job,
                          const tx_muon_workspace *in) {
  work w = {.abi = abi,
            .pool = pool,
            .job = job,
            .iteration = tx_muon_chosen(job->iteration),
            .memory = {job->x, in->other, in->g, in->q, in->p, in->t}};
  w.small = w.iteration.rows < w.iteration.columns ? w.iteration.rows : w.iteration.columns;
  if (job->iteration->panel == 0)
    w.iteration.panel = tx_muon_panel(w.small, job->dtype, pool ? tx_threads_of(pool) : 1, tx_isa_has_tiles());
  const tx_muon_made made = tx_muon_iterate(&w.iteration, make, &w);
  job->outcome = TX_MUON_REFUSED;
  if (made.stopped) return;
  job->outcome = tx_muon_is_finite(square_of(&w, made.last_square)) ? TX_MUON_ORTHOGONAL : TX_MUON_NOT_FINITE;
  const size_t elements = (size_t)(w.iteration.rows * w.iteration.columns);
  if (made.result == TX_MUON_OTHER) memcpy(job->x, in->other, elements * (job->dtype == TX_BF16 ? 2 : 4));
}

typedef struct region {
  const tx_torch_abi *abi;
  tx_muon_job *jobs;
  int64_t n;
  const tx_muon_workspace *workspaces;
  int64_t n_workspaces;
  int64_t next; /* atomic */
} region;

static void orthogonalise_lane(void *arg, int64_t lane) {
  region *r = arg;
  if (lane >= r->n_workspaces) return;
  for (int64_t i; (i = __atomic_fetch_add(&r->next, 1, __ATOMIC_RELAXED)) < r->n;) {
    if (r->jobs[i].one_thread) orthogonalise(r->abi, NULL, &r->jobs[i], &r->workspaces[lane]);
  }
}

static int is_workspace(const tx_muon_workspace *w) {
  return w->other && w->g && w->q && w->p && w->t;
}

static tx_status check(const tx_muon_job *jobs, int64_t n, const tx_muon_workspace *workspaces, int64_t n_workspaces,
                       tx_error *error) {
  int legal = n >= 0 && (n == 0 || jobs) && workspaces && n_workspaces >= 1;
  for (int64_t i = 0; legal && i < n_workspaces; i++)
    legal = is_workspace(&workspaces[i]);
  for (int64_t i = 0; legal && i < n; i++) {
    const tx_muon_job *j = &jobs[i];
    legal = tx_muon_is_iteration(j->iteration) && j->x && (j->dtype == TX_F32 || j->dtype == TX_BF16);
  }
  if (legal) return TX_OK;
  return tx_fail(
      error, TX_ERROR_INVALID_ARGUMENT,
      "tx_torch_orthogonalise: %lld jobs in %lld workspaces; jobs of fp32 or bf16 with a legal iteration and "
      "memory, and one workspace at least with memory of all operands are legal",
      (long long)n, (long long)n_workspaces);
}

tx_status tx_torch_orthogonalise_with(const tx_torch_abi *abi, const tx_parallel *pool, tx_muon_job *jobs, int64_t n,
                                      const tx_muon_workspace *workspaces, int64_t n_workspaces, tx_error *error) {
  TX_FORWARD(check(jobs, n, workspaces, n_workspaces, error));
  int64_t in_lanes = 0;
  for (int64_t i = 0; i < n; i++)
    in_lanes += jobs[i].one_thread != 0;
  region r = {abi, jobs, n, workspaces, n_workspaces, 0};
  const int64_t lanes = n_workspaces < 2 ? 2 : n_workspaces; /* for a single task torch's pool opens no region */
  if (in_lanes > 0) pool->run(pool->ctx, lanes, orthogonalise_lane, &r);
  for (int64_t i = 0; i < n; i++) {
    if (!jobs[i].one_thread) orthogonalise(abi, pool, &jobs[i], workspaces);
  }
  return TX_OK;
}
