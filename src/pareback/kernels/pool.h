// A few sleeping threads, shared by everything in one library that divides its work.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#if !defined(_WIN32)
#include <pthread.h>
#endif
#if defined(__linux__) && !defined(__ANDROID__)
#define PAREBACK_PLACES_THREADS
#include <sched.h>
#endif

namespace pareback {

// How long to wait for a thread before it might have lost its processor to another program.
constexpr auto kPatience = std::chrono::microseconds(200);

// What threads can be lent to. It may be over before one of them comes, which then finds nothing to do.
class Job {
 public:
  virtual ~Job() = default;
  virtual void help() = 0;
};

// Where threads may run that are to work beside the caller. In a virtual machine Linux takes a processor that sleeps for
// one that its host has taken away, and leaves a thread that is woken where the one is that woke it: one after the other.
class Elsewhere {
 public:
#if defined(PAREBACK_PLACES_THREADS)
  // All that the caller may use, but for the one it is on unless `here_too`.
  explicit Elsewhere(bool here_too = false) {
    known_ = sched_getaffinity(0, sizeof allowed_, &allowed_) == 0;
    const int here = sched_getcpu();
    if (!here_too && known_ && here >= 0 && here < CPU_SETSIZE) CPU_CLR(here, &allowed_);
  }
  bool exists() const { return !known_ || CPU_COUNT(&allowed_) > 0; }
  bool operator==(const Elsewhere& other) const {
    return known_ == other.known_ && (!known_ || CPU_EQUAL(&allowed_, &other.allowed_));
  }
  void send(std::thread& thread) const {
    if (known_) pthread_setaffinity_np(thread.native_handle(), sizeof allowed_, &allowed_);
  }

 private:
  cpu_set_t allowed_;
  bool known_;
#else
  explicit Elsewhere(bool = false) {}
  bool exists() const { return true; }
  bool operator==(const Elsewhere&) const { return true; }
  void send(std::thread&) const {}
#endif
};

// Threads wait on condition variables rather than spin: the machine is busy with PyTorch's own. Whoever calls works
// too, and never waits for a thread that has not begun: several callers share the threads there are.
class Pool {
 public:
  // Sends up to `number` threads that have nothing to do to a job, and returns how many.
  int lend(int number, const std::shared_ptr<Job>& job) {
    std::vector<Worker*> sent;
    const Elsewhere elsewhere;
    if (!elsewhere.exists()) return 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      most_ = std::max(most_, number);
      while (static_cast<int>(sent.size()) < number && (!idle_.empty() || threads_ < most_)) {
        Worker* worker = idle_.empty() ? grown() : idle_.back();
        if (worker == nullptr) break;
        if (!idle_.empty()) idle_.pop_back();
        if (!(worker->place == elsewhere)) elsewhere.send(worker->thread);
        worker->place = elsewhere;
        worker->job = job;
        coming_.push_back(worker);
        sent.push_back(worker);
      }
    }
    for (Worker* worker : sent) worker->wake.notify_one();
    return static_cast<int>(sent.size());
  }

  // Calls back threads that were sent to a job and have not begun.
  void recall(const Job& job) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto sent = std::partition(coming_.begin(), coming_.end(), [&](Worker* one) { return one->job.get() != &job; });
    for (auto worker = sent; worker != coming_.end(); ++worker) {
      (*worker)->job = nullptr;
      idle_.push_back(*worker);
    }
    coming_.erase(sent, coming_.end());
  }

  // Lets threads at a job run wherever the caller may, as it is about to sleep: one of them may have lost its processor.
  void set_free(const Job& job) {
    const Elsewhere anywhere(true);
    std::lock_guard<std::mutex> lock(mutex_);
    for (Worker* worker : all_) {
      if (worker->at != &job) continue;
      anywhere.send(worker->thread);
      worker->place.reset();
    }
  }

  // Has `work` called by up to so many threads, the caller among them, which share what there is to do.
  void run(int threads, const std::function<void()>& work) {
    const auto job = std::make_shared<Shared>(&work);
    lend(threads - 1, job);
    work();
    recall(*job);
    if (job->is_over_soon()) return;
    set_free(*job);
    job->wait();
  }

 private:
  // Never destroyed: threads may outlive static destructors.
  struct Worker {
    std::condition_variable wake;
    std::shared_ptr<Job> job;
    const Job* at = nullptr;
    std::thread thread;
    std::optional<Elsewhere> place;
  };

  class Shared : public Job {
   public:
    explicit Shared(const std::function<void()>* work) : work_(work) {}

    void help() override {
      const std::function<void()>* work;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (work_ == nullptr) return;
        work = work_;
        ++helping_;
      }
      (*work)();
      std::lock_guard<std::mutex> lock(mutex_);
      if (--helping_ == 0) done_.notify_one();
    }

    // Lets nobody begin any more, and returns whether those who have are done before long.
    bool is_over_soon() {
      std::unique_lock<std::mutex> lock(mutex_);
      work_ = nullptr;
      return done_.wait_for(lock, kPatience, [this] { return helping_ == 0; });
    }

    void wait() {
      std::unique_lock<std::mutex> lock(mutex_);
      done_.wait(lock, [this] { return helping_ == 0; });
    }

   private:
    const std::function<void()>* work_;
    std::mutex mutex_;
    std::condition_variable done_;
    int helping_ = 0;
  };

  // Returns null where the system has no room for another thread.
  Worker* grown() {
    auto worker = std::make_unique<Worker>();
    try {
      worker->thread = std::thread([this, one = worker.get()] { loop(*one); });
    } catch (const std::system_error&) {
      return nullptr;
    }
    all_.push_back(worker.get());
    ++threads_;
    return worker.release();
  }

  void loop(Worker& worker) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      worker.wake.wait(lock, [&] { return worker.job != nullptr; });
      std::shared_ptr<Job> job = std::move(worker.job);
      worker.at = job.get();
      coming_.erase(std::find(coming_.begin(), coming_.end(), &worker));
      lock.unlock();
      job->help();
      job.reset();
      lock.lock();
      worker.job = nullptr;
      worker.at = nullptr;
      idle_.push_back(&worker);
    }
  }

  std::mutex mutex_;
  std::vector<Worker*> all_, idle_, coming_;
  int threads_ = 0;
  int most_ = static_cast<int>(std::thread::hardware_concurrency()) - 1;
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
