// A thread that helps and does not get done until it may run wherever the caller may: as if its processor were taken.
#include "team.h"

namespace {

int processors() {
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof allowed, &allowed);
  return CPU_COUNT(&allowed);
}

class Work {
 public:
  void operator()() {
    const bool helps = std::this_thread::get_id() != caller_;
    if (helps) begun_ = true;
    while (helps ? processors() < all_ : !begun_) std::this_thread::yield();
  }

 private:
  const std::thread::id caller_ = std::this_thread::get_id();
  const int all_ = processors();
  std::atomic<bool> begun_{false};
};

}  // namespace

int main() {
  Work whole, divided;
  pareback::shared_pool().run(2, [&] { whole(); });
  const auto team = std::make_shared<pareback::ThreadTeam>(3);  // the first thread may not be back yet
  team->divide(3, 1, 1e6, [&](int64_t, int64_t) { divided(); });
  team->end();
}
