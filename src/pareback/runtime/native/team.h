// The threads that run one program together. To wake a thread takes longer than many a step: they come once and look out
// for the next step while there is one, for a short while at most. Nobody waits for a thread that does not come.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "../../kernels/pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pareback {

// Looks out for something that another thread is about to do. At first without leaving the processor; then others may
// have it in between, as the one that is waited for might need it; and not for long.
using Clock = std::chrono::steady_clock;

template <typename Condition>
bool soon(const Condition& condition) {
  constexpr int at_once = 256;
  for (int i = 0; i < at_once; ++i) {
    if (condition()) return true;
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
  const auto until = Clock::now() + kPatience;
  do {
    if (condition()) return true;
    std::this_thread::yield();
  } while (Clock::now() < until);
  return condition();
}

class ThreadTeam : public Job, public std::enable_shared_from_this<ThreadTeam> {
 public:
  explicit ThreadTeam(int threads) : shares_(threads) {}

  // Calls work(first, last) for all items, in portions. Every thread has its own share of them, about the same in every
  // step so that it finds in its cache what it wrote before, and helps the others when it is done.
  template <typename Work>
  void divide(int64_t items, int64_t portion, double nanoseconds, const Work& work) {
    portion = std::max(portion, items / kMostPortions + 1);
    const int64_t portions = (items + portion - 1) / portion;
    if (portions < 2 || !worth_sharing(nanoseconds)) {
      work(0, items);
      return;
    }
    step_ = {[](const void* what, int64_t first, int64_t last) { (*static_cast<const Work*>(what))(first, last); }, &work,
             items, portion};
    left_.store(portions, std::memory_order_relaxed);
    ++number_;
    const int64_t threads = shares_.size();
    for (int64_t i = 0; i < threads; ++i)
      shares_[i].left.store(packed(number_, i * portions / threads, (i + 1) * portions / threads),
                            std::memory_order_release);
    published_.store(number_, std::memory_order_release);
    const Clock::time_point began = Clock::now();
    const int64_t mine = work_from(0);
    wait(began, mine);
  }

  void end() {
    published_.store(kOver, std::memory_order_release);
    if (lent_) shared_pool().recall(*this);
  }

  void help() override {
    const size_t mine = 1 + joined_.fetch_add(1, std::memory_order_relaxed) % (shares_.size() - 1);
    uint32_t seen = 0, next = 0;
    const auto more = [&] { return (next = published_.load(std::memory_order_acquire)) != seen; };
    while (soon(more) && next != kOver) {
      seen = next;
      work_from(mine);
    }
    present_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  static constexpr int64_t kMostPortions = 0xFFFF;
  static constexpr uint32_t kOver = ~uint32_t{0};

  struct Step {
    void (*call)(const void*, int64_t, int64_t);
    const void* what;
    int64_t items, portion;
  };

  // Portions not yet begun, from first to before last, of the step with this number: in one word, so that whoever takes
  // one knows that the step is still going on.
  struct alignas(128) Share {
    std::atomic<uint64_t> left{0};
  };

  static uint64_t packed(uint64_t number, uint64_t first, uint64_t last) { return number << 32 | first << 16 | last; }

  // Threads that are there share anything that takes longer than to tell them. To wake them has to pay.
  bool worth_sharing(double nanoseconds) {
    if (alone_) return false;
    if (present_.load(std::memory_order_relaxed) > 0) return nanoseconds > 3'000;
    if (nanoseconds < (lent_ ? 400'000 : 40'000)) return false;
    if (!lent_ && Clock::now().time_since_epoch().count() < alone_until().load(std::memory_order_relaxed)) {
      alone_ = true;
      return false;
    }
    const int wanted = static_cast<int>(shares_.size()) - 1;
    present_.fetch_add(wanted, std::memory_order_relaxed);
    const int sent = shared_pool().lend(wanted, shared_from_this());
    present_.fetch_sub(wanted - sent, std::memory_order_relaxed);
    lent_ = lent_ || sent > 0;
    return sent > 0;
  }

  // Takes portions until none are left: one's own from the first, then those of others from the last.
  // Returns how many.
  int64_t work_from(size_t mine) {
    int64_t taken = 0;
    while (work_on(shares_[mine], true)) ++taken;
    for (size_t i = 1; i < shares_.size(); ++i)
      while (work_on(shares_[(mine + i) % shares_.size()], false)) ++taken;
    return taken;
  }

  bool work_on(Share& share, bool own) {
    uint64_t left = share.left.load(std::memory_order_relaxed), after, portion;
    do {
      const uint64_t first = left >> 16 & 0xFFFF, last = left & 0xFFFF;
      if (first >= last) return false;
      portion = own ? first : last - 1;
      after = own ? left + (1 << 16) : left - 1;
    } while (!share.left.compare_exchange_weak(left, after, std::memory_order_acquire, std::memory_order_relaxed));
    // The step cannot end before this portion is done.
    const int64_t begin = portion * step_.portion;
    step_.call(step_.what, begin, std::min(step_.items, begin + step_.portion));
    if (left_.fetch_sub(1) == 1 && waiting_.load()) {
      std::lock_guard<std::mutex> lock(mutex_);
      done_.notify_one();
    }
    return true;
  }

  // Waits for portions that others are at. One that takes far longer than the caller's own did has lost its processor to
  // another program: where there are not enough of them, to go on alone is faster for a while.
  void wait(Clock::time_point began, int64_t mine) {
    const auto done = [this] { return left_.load() == 0; };
    const Clock::time_point worked = Clock::now();
    if (soon(done)) return;
    shared_pool().set_free(*this);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      waiting_ = true;
      done_.wait(lock, done);
      waiting_ = false;
    }
    const Clock::duration waited = Clock::now() - worked;
    if (waited < 2 * (worked - began) / std::max<int64_t>(mine, 1) + 2 * kPatience) return;
    alone_ = true;
    alone_until().store((worked + 10 * waited).time_since_epoch().count(), std::memory_order_relaxed);
  }

  // Until when, on the steady clock, new teams have no other threads.
  static std::atomic<Clock::rep>& alone_until() {
    static std::atomic<Clock::rep> until{0};
    return until;
  }

  std::vector<Share> shares_;
  alignas(128) std::atomic<uint32_t> published_{0};
  alignas(128) std::atomic<int64_t> left_{0};
  alignas(128) Step step_{};
  uint32_t number_ = 0;
  bool lent_ = false, alone_ = false;
  std::atomic<int> present_{0}, joined_{0};
  std::atomic<bool> waiting_{false};
  std::mutex mutex_;
  std::condition_variable done_;
};

}  // namespace pareback
