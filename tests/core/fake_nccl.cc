// A fake libnccl.so.2 for the tests of the code that calls NCCL. Ranks are threads, "device" memory is host memory, and
// an operation takes place when the last rank has issued it. Tests request faults by the fake_nccl_* functions. NCCL's
// declarations are written out here, independently of the code under test.
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#ifndef FAKE_NCCL_VERSION
#define FAKE_NCCL_VERSION 22809
#endif

namespace {

enum { kSuccess = 0, kSystemError = 2, kInvalidArgument = 4, kRemoteError = 6, kInProgress = 7 };

std::mutex lock;
std::condition_variable changed;

struct Part {
  const char *from;
  char *to;
  size_t bytes;
  int peer;
};
struct Operation {
  std::vector<Part> sends, receives;
};
struct Clique {
  int n_ranks = 0, came = 0;
  std::map<int, std::deque<Operation>> queues;
  int done = 0;
};
struct Id {
  char internal[128];
};

// Faults that tests request, and counters that they read.
int slow_polls, init_result = kSuccess, async_error = kSuccess, group_result = kSuccess, issue_result = kSuccess;
int aborts, destroys, finalizes, windows, memories, groups;
long ids;
int error_of, failing_id;  // the communicator to which a fault applies; 0: all of them
std::string calls;         // log of the calls, one line each; a communicator is named by the number of its id
std::map<std::string, std::shared_ptr<Clique>> cliques;

}  // namespace

struct ncclComm {
  std::shared_ptr<Clique> clique;
  int rank, n_ranks, polls;
  int id;
  void **late_window = nullptr;  // written when the registration is done
  void *late_value = nullptr;
};

namespace {

thread_local Operation group;
thread_local ncclComm *group_comm;
thread_local void *group_stream;
thread_local bool in_group;

void note(const char *what, const ncclComm *comm, const std::string &more = "") {
  calls += std::string(what) + " " + std::to_string(comm->id) + more + "\n";
}

// Performs the operations that all ranks have issued. The caller holds the lock.
void progress(Clique &clique) {
  for (;;) {
    for (int r = 0; r < clique.n_ranks; r++)
      if (clique.queues[r].empty()) return;
    for (int r = 0; r < clique.n_ranks; r++)
      for (const Part &receive : clique.queues[r].front().receives) {
        std::deque<Operation> &theirs = clique.queues[receive.peer];
        std::vector<Part> &sends = theirs.front().sends;
        for (size_t i = 0; i < sends.size(); i++)
          if (sends[i].peer == r && sends[i].bytes == receive.bytes) {
            memmove(receive.to, sends[i].from, receive.bytes);
            sends.erase(sends.begin() + static_cast<long>(i));
            break;
          }
      }
    for (int r = 0; r < clique.n_ranks; r++)
      clique.queues[r].pop_front();
    clique.done++;
    changed.notify_all();
  }
}

// Whether what the communicator did last is done, as the last poll said. NCCL rejects other calls before.
bool ready(const ncclComm *comm) {
  return comm->polls == 0;
}

bool took(int result) {
  return result == kSuccess || result == kInProgress;
}

void end_group() {
  if (!group_comm) return;
  note("group", group_comm, " stream " + std::to_string(reinterpret_cast<size_t>(group_stream)));
  Clique &clique = *group_comm->clique;
  clique.queues[group_comm->rank].push_back(group);
  group = {};
  group_comm = nullptr;
  progress(clique);
}

}  // namespace

extern "C" {

void fake_nccl_reset() {
  std::lock_guard<std::mutex> hold(lock);
  slow_polls = 0;
  init_result = async_error = group_result = issue_result = kSuccess;
  aborts = destroys = finalizes = windows = memories = groups = 0;
  cliques.clear();
  error_of = failing_id = 0;
  calls.clear();
}
// Restricts init_result and async_error to the communicator with this number.
void fake_nccl_errors_of(int id) {
  std::lock_guard<std::mutex> hold(lock);
  error_of = failing_id = id;
}
// The log so far, with lines such as "init 1 ctas 33", "group 2 stream 7", "window 1", "abort 1 grouped", "finalize 1",
// "destroy 1".
const char *fake_nccl_calls() {
  std::lock_guard<std::mutex> hold(lock);
  return strdup(calls.c_str());
}
void fake_nccl_slow_init(int polls) {
  slow_polls = polls;
}
void fake_nccl_init_error(int result) {
  init_result = result;
}
void fake_nccl_async_error(int result) {
  std::lock_guard<std::mutex> hold(lock);
  async_error = result;
}
void fake_nccl_group_result(int result) {
  std::lock_guard<std::mutex> hold(lock);
  group_result = result;
}
// The result of every accepted operation inside a group. ncclInProgress: the group has not started yet.
void fake_nccl_issue_result(int result) {
  std::lock_guard<std::mutex> hold(lock);
  issue_result = result;
}
// aborts, destroys, finalizes, registered windows, allocated memories, groups
void fake_nccl_counts(int *counts) {
  std::lock_guard<std::mutex> hold(lock);
  const int found[] = {aborts, destroys, finalizes, windows, memories, groups};
  memcpy(counts, found, sizeof found);
}
// Waits until the only clique has performed this many operations; returns 0 after 20 seconds.
int fake_nccl_wait(int operations) {
  std::unique_lock<std::mutex> hold(lock);
  return changed.wait_for(hold, std::chrono::seconds(20),
                          [&] { return !cliques.empty() && cliques.begin()->second->done >= operations; });
}

// The same for all cliques.
int fake_nccl_wait_all(int operations) {
  std::unique_lock<std::mutex> hold(lock);
  return changed.wait_for(hold, std::chrono::seconds(20), [&] {
    for (const auto &[name, clique] : cliques)
      if (clique->done < operations) return false;
    return true;
  });
}

int ncclGetVersion(int *version) {
  *version = FAKE_NCCL_VERSION;
  return kSuccess;
}
const char *ncclGetErrorString(int result) {
  return result == kRemoteError ? "remote error" : result == kSystemError ? "unhandled system error" : "some result";
}
const char *ncclGetLastError(ncclComm *) {
  return "the fake's last words";
}
int ncclGetUniqueId(Id *id) {
  std::lock_guard<std::mutex> hold(lock);
  memset(id, 0, sizeof *id);
  const std::string text = "id " + std::to_string(++ids);
  memcpy(id->internal, text.c_str(), text.size());
  return kSuccess;
}
int ncclCommInitRankConfig(ncclComm **comm, int n_ranks, Id id, int rank, void *config) {
  std::lock_guard<std::mutex> hold(lock);
  struct {
    size_t size;
    unsigned magic, version;
    int blocking, cga, min_ctas, max_ctas;
  } head;
  memcpy(&head, config, sizeof head);
  if (head.magic != 0xcafebeef || head.blocking != 0) return kInvalidArgument;
  const int number = id.internal[0] ? atoi(id.internal + 3) : 0;
  if (init_result != kSuccess && (!failing_id || failing_id == number)) return init_result;
  std::shared_ptr<Clique> &clique = cliques[std::string(id.internal)];
  if (!clique) clique = std::make_shared<Clique>();
  clique->n_ranks = n_ranks;
  clique->came++;
  *comm = new ncclComm{clique, rank, n_ranks, slow_polls, number};
  note("init", *comm, head.max_ctas > 0 ? " ctas " + std::to_string(head.max_ctas) : "");
  return kInProgress;
}
int ncclCommGetAsyncError(ncclComm *comm, int *result) {
  std::lock_guard<std::mutex> hold(lock);
  if (comm->polls > 0 && --comm->polls == 0 && comm->late_window) {
    *comm->late_window = comm->late_value;
    comm->late_window = nullptr;
  }
  const bool waits = comm->polls > 0 || comm->clique->came < comm->n_ranks;
  const bool fails = async_error != kSuccess && (!error_of || error_of == comm->id);
  *result = fails ? async_error : waits ? kInProgress : kSuccess;
  return kSuccess;
}
#ifndef FAKE_NCCL_LACKS
int ncclCommFinalize(ncclComm *comm) {
  std::lock_guard<std::mutex> hold(lock);
  if (!ready(comm)) return kInvalidArgument;
  finalizes++;
  note("finalize", comm);
  return kInProgress;
}
#endif
int ncclCommDestroy(ncclComm *comm) {
  std::lock_guard<std::mutex> hold(lock);
  destroys++;
  note("destroy", comm);
  delete comm;
  return kSuccess;
}
int ncclCommAbort(ncclComm *comm) {
  std::lock_guard<std::mutex> hold(lock);
  aborts++;
  note("abort", comm, in_group ? " grouped" : "");
  delete comm;
  return kSuccess;
}
int ncclGroupStart() {
  in_group = true;
  return kSuccess;
}
int ncclGroupEnd() {
  std::lock_guard<std::mutex> hold(lock);
  in_group = false;
  groups++;
  if (group_result != kSuccess && group_result != kInProgress) return group_result;
  end_group();
  return group_result;
}
int ncclSend(const void *data, size_t count, int dtype, int peer, ncclComm *comm, void *stream) {
  if (dtype != 1 || !in_group || !ready(comm) || (group_comm && group_comm != comm)) return kInvalidArgument;
  group_comm = comm;
  group_stream = stream;
  group.sends.push_back({static_cast<const char *>(data), nullptr, count, peer});
  return issue_result;
}
int ncclRecv(void *data, size_t count, int dtype, int peer, ncclComm *comm, void *stream) {
  if (dtype != 1 || !in_group || !ready(comm) || (group_comm && group_comm != comm)) return kInvalidArgument;
  group_comm = comm;
  group_stream = stream;
  group.receives.push_back({nullptr, static_cast<char *>(data), count, peer});
  return issue_result;
}
int ncclAllGather(const void *sent, void *received, size_t count, int dtype, ncclComm *comm, void *stream) {
  int result = kSuccess;
  for (int r = 0; r < comm->n_ranks && took(result); r++) {
    result = ncclSend(sent, count, dtype, r, comm, stream);
    if (took(result))
      result = ncclRecv(static_cast<char *>(received) + static_cast<size_t>(r) * count, count, dtype, r, comm, stream);
  }
  return result;
}
int ncclMemAlloc(void **memory, size_t bytes) {
  std::lock_guard<std::mutex> hold(lock);
  memories++;
  *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return kSuccess;
}
int ncclMemFree(void *memory) {
  std::lock_guard<std::mutex> hold(lock);
  memories--;
  free(memory);
  return kSuccess;
}
#if FAKE_NCCL_VERSION >= 22700
// As in NCCL 2.28.9: a thread registers, but the call says that it was done.
int ncclCommWindowRegister(ncclComm *comm, void *memory, size_t, void **window, int flags) {
  std::lock_guard<std::mutex> hold(lock);
  if (flags != 1 || *window || !ready(comm)) return kInvalidArgument;
  windows++;
  note("window", comm);
  comm->late_window = window;
  comm->late_value = memory;
  comm->polls = 3;
  return kSuccess;
}
int ncclCommWindowDeregister(ncclComm *, void *) {
  std::lock_guard<std::mutex> hold(lock);
  windows--;
  return kSuccess;
}
#endif
#if FAKE_NCCL_VERSION >= 22800
int ncclAlltoAll(const void *sent, void *received, size_t count, int dtype, ncclComm *comm, void *stream) {
  int result = kSuccess;
  for (int r = 0; r < comm->n_ranks && took(result); r++) {
    const size_t at = static_cast<size_t>(r) * count;
    result = ncclSend(static_cast<const char *>(sent) + at, count, dtype, r, comm, stream);
    if (took(result)) result = ncclRecv(static_cast<char *>(received) + at, count, dtype, r, comm, stream);
  }
  return result;
}
#endif

}  // extern "C"
