/* A program without torch and Python that loads the library with dlopen: library_life LIFE LIBRARY COPY. LIFE names a
 * scenario, COPY a copy of the library's file. Returns 0 if all is well; prints errors only. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "torch_ext.h"

#define N 3000

static const char *library, *copy;

static int wrong(const char *what) {
  fprintf(stderr, "%s\n", what);
  return 1;
}

static void *symbol(void *handle, const char *name) {
  void *found = dlsym(handle, name);
  if (!found) abort();
  return found;
}

/* Whether the library, loaded as `handle`, makes a correct step and rejects an illegal argument. */
static int works(void *handle) {
  static const tx_adamw_group group = {1e-3, 0.9, 0.999, 1e-8, 0.1, 0, 1};
  tx_status (*adamw)(const tx_adamw_args *, const tx_parallel *, tx_error *);
  *(void **)&adamw = symbol(handle, "tx_adamw");
  float *memory = calloc(4 * N, sizeof *memory), steps = 0;
  for (int i = 0; i < N; i++)
    memory[i] = memory[N + i] = 1;
  const tx_tensor param = {memory, N, TX_F32, 0}, grad = {memory + N, N, TX_F32, 0},
                  exp_avg = {memory + 2 * N, N, TX_F32, 0}, exp_avg_sq = {memory + 3 * N, N, TX_F32, 0},
                  count = {&steps, 1, TX_F32, 0};
  tx_adamw_args args = TX_ADAMW_ARGS_INIT;
  args.n = args.n_groups = 1;
  args.params = &param;
  args.grads = &grad;
  args.exp_avgs = &exp_avg;
  args.exp_avg_sqs = &exp_avg_sq;
  args.steps = &count;
  args.groups = &group;
  tx_error error = {""};
  int good = adamw(&args, NULL, &error) == TX_OK && steps == 1 && memory[0] == memory[N - 1] && memory[0] < 0.999f;
  args.seed = 1;
  args.moment_rounding = 7;
  good &= adamw(&args, NULL, &error) == TX_ERROR_ILLEGAL_VALUE && strstr(error.message, "moment_rounding is 7") &&
          steps == 1;
  free(memory);
  return good;
}

static long resident_pages(void) {
  long all = 0, resident = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  if (!file || fscanf(file, "%ld %ld", &all, &resident) != 2) abort();
  fclose(file);
  return resident;
}

static int loaded_again_and_again(void) {
  long before = 0;
  for (int i = 0; i < 300; i++) {
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!handle || !works(handle) || dlclose(handle)) return wrong("it did not load, work and close");
    if (i == 20) before = resident_pages();
  }
  return resident_pages() - before > 64 ? wrong("each time takes memory") : 0;
}

static int several_copies(void) {
  void *handles[] = {dlopen(library, RTLD_NOW | RTLD_LOCAL), dlopen(copy, RTLD_NOW | RTLD_GLOBAL),
                     dlmopen(LM_ID_NEWLM, library, RTLD_NOW)};
  for (int i = 0; i < 6; i++)
    if (!handles[i % 3] || !works(handles[i % 3])) return wrong("a copy does not work beside others");
  return 0;
}

static void *a_thread(void *handle) {
  return works(handle) ? handle : NULL;
}

static int threads_that_come_and_go(void) {
  void *handle = dlopen(library, RTLD_NOW), *done = NULL;
  pthread_attr_t small;
  long before = 0;
  if (pthread_attr_init(&small) || pthread_attr_setstacksize(&small, 80 << 10)) abort();
  for (int i = 0; i < 3000; i++) {
    pthread_t thread;
    if (pthread_create(&thread, &small, a_thread, handle) || pthread_join(thread, &done)) abort();
    if (!done) return wrong("it does not work on a thread");
    if (i == 100) before = resident_pages();
  }
  return resident_pages() - before > 64 ? wrong("a thread leaves memory behind") : 0;
}

static void *of_this_process;

static void at_the_end(void) {
  if (!works(of_this_process)) _Exit(3);
}

static int calls_at_the_end(void) {
  of_this_process = dlopen(library, RTLD_NOW);
  return !of_this_process || atexit(at_the_end);
}

__attribute__((destructor)) static void after_the_end(void) {
  if (of_this_process && !works(of_this_process)) _Exit(4);
}

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    int (*run)(void);
  } lives[] = {{"loaded_again_and_again", loaded_again_and_again},
               {"several_copies", several_copies},
               {"threads_that_come_and_go", threads_that_come_and_go},
               {"calls_at_the_end", calls_at_the_end}};
  if (argc != 4) return wrong("usage: library_life LIFE LIBRARY COPY");
  library = argv[2];
  copy = argv[3];
  for (size_t i = 0; i < sizeof lives / sizeof *lives; i++)
    if (strcmp(argv[1], lives[i].name) == 0) return lives[i].run();
  return wrong("no such life");
}
