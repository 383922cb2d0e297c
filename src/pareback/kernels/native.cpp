// The passes of reference.py over float32 and bfloat16 weights on the CPU, each in one sweep through memory.
//
// Same arithmetic, same bits: built without contraction into fused multiply-adds, every operation is rounded as PyTorch's
// own operators round it. Sums are taken per block of fixed size and added up in order, so they do not depend on the
// number of threads. The sweeps are compiled for several instruction sets and chosen at run time.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "isa.h"
#include "pool.h"

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace {

constexpr int64_t kBlock = 16384;  // elements; 64 KiB of each operand, so a block stays in the second-level cache

enum Pass : int32_t { kAdopt, kMeasure, kPrune, kCount, kShrink };
enum Kind : int32_t { kHard, kSoft, kPower };

// One tensor of a call; mirrored by a ctypes structure in native.py. Pointers a pass does not use are null.
struct Tensor {
  void* weight;
  void* latent;
  void* grad;
  int64_t size;
  float threshold;
  float edge;
};

// What a block adds to its tensor's results.
struct Partial {
  double square = 0.0, pull = 0.0;
  float peak = 0.0f;
  int64_t kept = 0, band = 0;
};

struct Options {
  int32_t pass;    // a Pass
  int32_t shrink;  // a Kind
  float straight_through;  // the share of its gradient that a pruned weight keeps
};

using Block = Partial (*)(const Tensor&, int64_t begin, int64_t end, const Options&);

}  // namespace

#define LANES 4
#define SUFFIX portable
#include "native_sweep.h"
#undef LANES
#undef SUFFIX

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAVE_X86 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define LANES 8
#define SUFFIX avx2
#include "native_sweep.h"
#undef LANES
#undef SUFFIX
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define LANES 16
#define SUFFIX avx512
#include "native_sweep.h"
#undef LANES
#undef SUFFIX
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace {

template <bool bf16>
Block best_block() {
#ifdef HAVE_X86
  const pareback::Isa isa = pareback::widest_isa();
  if (isa == pareback::Isa::avx512) return bf16 ? avx512::block<uint16_t> : avx512::block<float>;
  if (isa == pareback::Isa::avx2) return bf16 ? avx2::block<uint16_t> : avx2::block<float>;
#endif
  return bf16 ? portable::block<uint16_t> : portable::block<float>;
}

}  // namespace

// Runs one pass over `count` tensors. `results` takes five doubles per tensor: square, peak, pull, kept, band.
EXPORT void pareback_pass(const Tensor* tensors, int64_t count, int32_t bf16, const Options* options, int32_t threads,
                          double* results) {
  static const Block best[2] = {best_block<false>(), best_block<true>()};
  std::vector<int64_t> first(count + 1, 0);
  for (int64_t i = 0; i < count; ++i) first[i + 1] = first[i] + (tensors[i].size + kBlock - 1) / kBlock;
  const int64_t blocks = first[count];
  std::vector<Partial> partials(blocks);
  std::vector<int64_t> owner(blocks);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t b = first[i]; b < first[i + 1]; ++b) owner[b] = i;
  std::atomic<int64_t> next{0};
  const std::function<void()> work = [&] {
    for (int64_t b; (b = next.fetch_add(1, std::memory_order_relaxed)) < blocks;) {
      const Tensor& tensor = tensors[owner[b]];
      const int64_t begin = (b - first[owner[b]]) * kBlock;
      const int64_t end = begin + kBlock < tensor.size ? begin + kBlock : tensor.size;
      partials[b] = best[bf16 != 0](tensor, begin, end, *options);
    }
  };
  if (threads > 1 && blocks > 1)
    pareback::shared_pool().run(static_cast<int64_t>(threads) < blocks ? threads : static_cast<int>(blocks), work);
  else
    work();
  for (int64_t i = 0; i < count; ++i) {
    Partial total;
    for (int64_t b = first[i]; b < first[i + 1]; ++b) {
      total.square += partials[b].square;
      total.pull += partials[b].pull;
      total.kept += partials[b].kept;
      total.band += partials[b].band;
      if (partials[b].peak > total.peak) total.peak = partials[b].peak;
    }
    double* row = results + 5 * i;
    row[0] = total.square, row[1] = total.peak, row[2] = total.pull;
    row[3] = static_cast<double>(total.kept), row[4] = static_cast<double>(total.band);
  }
}
