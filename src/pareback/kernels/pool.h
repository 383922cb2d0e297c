// A few sleeping threads, shared by everything in one library that divides its work.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace pareback {

// Threads wait on a condition variable rather than spin: the machine is busy with PyTorch's own.
class Pool {
 public:
  void run(int threads, const std::function<void()>& work) {
    std::lock_guard<std::mutex> one_caller(calls_);
    grow(threads - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work;
      wanted_ = threads - 1;
      running_ = threads - 1;
      ++round_;
    }
    wake_.notify_all();
    work();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
    work_ = nullptr;
  }

 private:
  void grow(int workers) {
    while (static_cast<int>(threads_) < workers) {
      const int index = static_cast<int>(threads_++);
      uint64_t seen = round_;
      std::thread([this, index, seen] { loop(index, seen); }).detach();
    }
  }

  void loop(int index, uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      if (index >= wanted_) continue;
      const std::function<void()>* work = work_;
      lock.unlock();
      (*work)();
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex calls_, mutex_;
  std::condition_variable wake_, done_;
  const std::function<void()>* work_ = nullptr;
  size_t threads_ = 0;
  int wanted_ = 0, running_ = 0;
  uint64_t round_ = 0;
};

// Never destroyed: its threads may outlive static destructors.
inline Pool*& current_pool() {
  static Pool* pool = new Pool;
  return pool;
}

inline Pool& shared_pool() {
#if !defined(_WIN32)
  // A forked child has none of the parent's threads, and perhaps a mutex one of them held.
  static const int registered = pthread_atfork(nullptr, nullptr, [] { current_pool() = new Pool; });
  (void)registered;
#endif
  return *current_pool();
}

}  // namespace pareback
