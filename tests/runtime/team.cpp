// Several callers whose teams share one pool. Each step reads what all threads wrote in the one before.
#include "team.h"

#include <cstdio>
#include <numeric>

namespace {

bool one_program(int threads, int steps, int64_t items) {
  std::vector<int64_t> now(items, 1), next(items);
  const auto team = std::make_shared<pareback::ThreadTeam>(threads);
  for (int step = 0; step < steps; ++step) {
    const double nanoseconds = step % 7 == 6 ? 100 : 1e6;  // some steps are the caller's alone
    team->divide(items, 1 + step % 3, nanoseconds, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) next[i] = now[i] + now[(i + items / 2) % items] - now[items - 1 - i];
    });
    std::swap(now, next);
    if (step % 50 == 49) std::this_thread::sleep_for(std::chrono::microseconds(300));  // long enough to lose patience
  }
  team->end();
  return std::accumulate(now.begin(), now.end(), int64_t{0}) == items;
}

bool one_run(int threads, int64_t items) {
  std::atomic<int64_t> next{0};
  std::vector<int64_t> done(items);
  pareback::shared_pool().run(threads, [&] {
    for (int64_t i; (i = next.fetch_add(1)) < items;) done[i] += 1;
  });
  return std::all_of(done.begin(), done.end(), [](int64_t n) { return n == 1; });
}

}  // namespace

int main() {
  std::atomic<bool> right{true};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&right, caller] {
      for (int i = 0; i < 30; ++i)
        if (!one_program(2 + caller % 3, 100, 1 + (i * 37 + caller) % 200) || !one_run(3, 50)) right = false;
    });
  for (std::thread& caller : callers) caller.join();
  std::puts(right ? "right" : "wrong");
  std::fflush(stdout);
  std::_Exit(right ? 0 : 1);  // the pool's threads are never joined
}
