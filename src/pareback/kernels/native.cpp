// The passes of reference.py over float32 and bfloat16 weights on the CPU, each in one sweep through memory.
//
// Same arithmetic, same bits: built without contraction into fused multiply-adds, every operation is rounded as PyTorch's
// own operators round it. Sums are taken per block of fixed size and added up in order, so they do not depend on the
// number of threads. The sweeps are compiled for several instruction sets and chosen at run time.

#define _USE_MATH_DEFINES
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "isa.h"
#include "pool.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#endif

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace {

constexpr int64_t kBlock = 16384;  // elements; 64 KiB of each operand, so a block stays in the second-level cache
constexpr int64_t kAlone = 65536;  // elements that one thread is through with before another one has woken up

enum Pass : int32_t { kAdopt, kMeasure, kPrune, kCount, kShrink };
enum Kind : int32_t { kHard, kSoft, kPower };

#include "gaps.h"

// Where a tensor is: a row of the table that native.py keeps. Pointers a pass does not use are null.
struct Row {
  void* weight;
  void* latent;
  void* grad;
  int64_t size;
};

// One tensor of a call.
struct Tensor : Row {
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

namespace {

// Runs one pass over tensors. `results` takes five doubles per tensor: square, peak, pull, kept, band.
void run_pass(const std::vector<Tensor>& tensors, bool bf16, const Options& options, int32_t threads, double* results) {
  static const Block best[2] = {best_block<false>(), best_block<true>()};
  const int64_t count = static_cast<int64_t>(tensors.size());
  std::vector<int64_t> first(count + 1, 0);
  for (int64_t i = 0; i < count; ++i) first[i + 1] = first[i] + (tensors[i].size + kBlock - 1) / kBlock;
  const int64_t blocks = first[count];
  std::vector<Partial> partials(blocks);
  std::vector<int64_t> owner(blocks);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t b = first[i]; b < first[i + 1]; ++b) owner[b] = i;
  std::atomic<int64_t> next{0};
  int64_t taken = 1;  // blocks at a time: small tensors have one each, and a thread should not ask for every one
  while (taken * 64 < blocks && taken < 16) taken *= 2;
  const std::function<void()> work = [&] {
    for (int64_t begin; (begin = next.fetch_add(taken, std::memory_order_relaxed)) < blocks;) {
      for (int64_t b = begin; b < std::min(begin + taken, blocks); ++b) {
        const Tensor& tensor = tensors[owner[b]];
        const int64_t from = (b - first[owner[b]]) * kBlock;
        const int64_t to = from + kBlock < tensor.size ? from + kBlock : tensor.size;
        partials[b] = best[bf16](tensor, from, to, options);
      }
    }
  };
  int64_t elements = 0;
  for (const Tensor& tensor : tensors) elements += tensor.size;
  if (threads > 1 && blocks > 1 && elements > kAlone)
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

float number(const void* at, int64_t i, bool wide) {
  return wide ? static_cast<float>(static_cast<const double*>(at)[i]) : static_cast<const float*>(at)[i];
}

}  // namespace

#include "control.h"

// Runs one pass over the `count` tensors of a table at `thresholds`; `edges` may be null where no band is counted.
EXPORT void pareback_pass(const Row* table, int64_t count, int32_t bf16, const void* thresholds, const void* edges,
                          int32_t wide, const Options* options, int32_t threads, double* results) {
  std::vector<Tensor> tensors(count);
  for (int64_t i = 0; i < count; ++i) {
    const float threshold = number(thresholds, i, wide != 0);
    tensors[i] = Tensor{table[i], threshold, edges == nullptr ? threshold : number(edges, i, wide != 0)};
    if (options->pass != kAdopt && options->pass != kMeasure) tensors[i].grad = nullptr;  // it may be gone by now
  }
  run_pass(tensors, bf16 != 0, *options, threads, results);
}

// Moves the thresholds by one step and prunes the tensors of a table (or only counts, where they have no weights of
// their own). Returns whether a tensor fell below its floor.
EXPORT int32_t pareback_step(const Row* table, int32_t bf16, const Control* control, const double* moments, int32_t go,
                             double scale, int32_t shrink, int32_t threads) {
  const int64_t count = control->count;
  const Controller::Sweep sweep = [&](const std::vector<double>& thresholds, const std::vector<double>& edges,
                                      const std::vector<char>& open, bool prune) {
    std::vector<Tensor> tensors;
    std::vector<int64_t> which;
    for (int64_t i = 0; i < count; ++i) {
      if (!open[i]) continue;
      which.push_back(i);
      tensors.push_back(Tensor{table[i], static_cast<float>(thresholds[i]), static_cast<float>(edges[i])});
      tensors.back().grad = nullptr;  // the optimizer's step may have let go of it
    }
    std::vector<double> results(5 * tensors.size());
    const bool write = prune && count > 0 && table[0].weight != nullptr;
    run_pass(tensors, bf16 != 0, Options{write ? kPrune : kCount, shrink, 1.0f}, threads, results.data());
    for (size_t at = 0; at < which.size(); ++at) {
      control->nonzero[which[at]] = static_cast<int64_t>(results[5 * at + 3]);
      control->band[which[at]] = static_cast<int64_t>(results[5 * at + 4]);
    }
  };
  Controller(*control, sweep).step(moments, go != 0, scale);
  for (int64_t i = 0; i < count; ++i)
    if (control->nonzero[i] < control->floor[i]) return 1;
  return 0;
}

// Puts `gaps.count` values of `item` bytes each into their places; without a target the code is only looked at.
// Returns what is wrong with it, 0 if nothing.
EXPORT int32_t pareback_put(const Gaps* gaps, const void* values, void* target, int64_t item) {
  if (target == nullptr) return each_position(*gaps, [](int64_t, int64_t) {});
  switch (item) {
    case 1:
      return put_values<uint8_t>(*gaps, values, target);
    case 2:
      return put_values<uint16_t>(*gaps, values, target);
    case 4:
      return put_values<uint32_t>(*gaps, values, target);
    case 8:
      return put_values<uint64_t>(*gaps, values, target);
    case 16:
      return put_values<Pair>(*gaps, values, target);
    default:
      return -1;
  }
}
