// A tx_copy_ops for the tests of tx_adamw_offloaded that copies as late as possible: a copy is made when something
// waits for it. Until then its destination contains garbage, so that reading it too early gives wrong bits.
#ifndef TESTS_CORE_LATE_COPIES_H
#define TESTS_CORE_LATE_COPIES_H

#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "csrc/torch_ext_advanced.h"

class LateCopies {
 public:
  LateCopies() {
    copy_ops_.ctx = this;
    copy_ops_.copy = [](void *ctx, int32_t up, void *to, const void *from, int64_t bytes, tx_error *error) {
      return static_cast<LateCopies *>(ctx)->Copy(up, to, from, bytes, error);
    };
    copy_ops_.mark = [](void *ctx, int32_t up, int64_t slot, tx_error *error) {
      return static_cast<LateCopies *>(ctx)->Mark(up, slot, error);
    };
    copy_ops_.wait = [](void *ctx, int32_t up, int64_t slot, tx_error *error) {
      return static_cast<LateCopies *>(ctx)->Wait(up, slot, error);
    };
    copy_ops_.follow = [](void *ctx, int64_t slot, tx_error *error) {
      return static_cast<LateCopies *>(ctx)->Follow(slot, error);
    };
  }
  tx_copy_ops *copy_ops() { return &copy_ops_; }

  // Makes all outstanding copies.
  void End() {
    for (int way : {0, 1})
      RunTasksUpTo(way, ways_[way].asked());
  }

  // Injects failures: which function fails ("copy", "mark", "wait", "follow"), in which direction, from which of its
  // calls on, and for how many calls.
  std::string fails;
  int fails_up = 0;
  int64_t fails_from = 0, fails_for = INT64_MAX;

  int64_t copies[2] = {0, 0};                        // by direction: [0] down to the host, [1] up to the device
  int64_t bytes[2] = {0, 0};                         // by direction
  int64_t marks[2] = {0, 0};                         // by direction
  std::map<int64_t, std::set<std::thread::id>> who;  // the threads that marked a slot
  int64_t most_under_way = 0;  // of a slot: the largest number of marks on the way down without one on the way up

 private:
  struct Way {
    std::deque<std::function<void()>> tasks;
    int64_t done = 0;
    int64_t asked() const { return done + static_cast<int64_t>(tasks.size()); }
  };

  // Counts a call and returns an error if it has to fail. The caller holds the mutex.
  tx_status Called(const std::string &name, int up, tx_error *error) {
    if (name != fails || up != fails_up) return TX_OK;
    const int64_t call = calls_++ - fails_from;
    if (call < 0 || call >= fails_for) return TX_OK;
    std::snprintf(error->message, sizeof error->message, "%s %s failed", name.c_str(), up ? "up" : "down");
    return TX_ERROR_UNAVAILABLE;
  }

  tx_status Copy(int up, void *to, const void *from, int64_t n, tx_error *error) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (Called("copy", up, error) != TX_OK) return TX_ERROR_UNAVAILABLE;
    copies[up]++;
    bytes[up] += n;
    // A copy down after Follow may still have readers of its destination, so the destination keeps its bytes until
    // then.
    if (up || !follows_.count(std::this_thread::get_id())) std::memset(to, 0xb3, static_cast<size_t>(n));
    ways_[up].tasks.push_back([=] { std::memcpy(to, from, static_cast<size_t>(n)); });
    return TX_OK;
  }

  tx_status Mark(int up, int64_t slot, tx_error *error) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (Called("mark", up, error) != TX_OK) return TX_ERROR_UNAVAILABLE;
    marks[up]++;
    who[slot].insert(std::this_thread::get_id());
    follows_.erase(std::this_thread::get_id());
    marked_[{up, slot}] = ways_[up].asked();
    under_way_[slot] += up ? -1 : 1;
    if (under_way_[slot] > most_under_way) most_under_way = under_way_[slot];
    return TX_OK;
  }

  tx_status Wait(int up, int64_t slot, tx_error *error) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (Called("wait", up, error) != TX_OK) return TX_ERROR_UNAVAILABLE;
    RunTasksUpTo(up, marked_[{up, slot}]);
    return TX_OK;
  }

  tx_status Follow(int64_t slot, tx_error *error) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (Called("follow", 0, error) != TX_OK) return TX_ERROR_UNAVAILABLE;
    follows_.insert(std::this_thread::get_id());
    const int64_t upto = marked_[{1, slot}];
    ways_[0].tasks.push_back([=, this] { RunTasksUpTo(1, upto); });
    return TX_OK;
  }

  void RunTasksUpTo(int way, int64_t upto) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    while (ways_[way].done < upto) {
      const std::function<void()> task = std::move(ways_[way].tasks.front());
      ways_[way].tasks.pop_front();
      ways_[way].done++;
      task();
    }
  }

  tx_copy_ops copy_ops_ = TX_COPY_OPS_INIT;
  std::recursive_mutex mutex_;
  Way ways_[2];
  std::map<std::pair<int, int64_t>, int64_t> marked_;
  std::map<int64_t, int64_t> under_way_;
  std::set<std::thread::id> follows_;
  int64_t calls_ = 0;
};

#endif
