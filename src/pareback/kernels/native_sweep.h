// One block of a pass, for LANES floats at a time. Included once per instruction set; see native.cpp.

namespace {
namespace SUFFIX {

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Int __attribute__((vector_size(4 * LANES)));
typedef uint32_t Unsigned __attribute__((vector_size(4 * LANES)));
typedef uint16_t Half __attribute__((vector_size(2 * LANES)));

template <typename To, typename From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline Vec load(const uint16_t* p) {  // bfloat16 is the upper half of a float
  Half h;
  std::memcpy(&h, p, sizeof h);
  return bits_as<Vec>(__builtin_convertvector(h, Unsigned) << 16);
}

inline void store(uint16_t* p, Vec v) {  // round to nearest, ties to even; NaN stays NaN
  const Unsigned bits = bits_as<Unsigned>(v);
  const Unsigned rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const Int nan = (v != v), nothing = bits_as<Int>(rounded << 17) == 0;  // −0.0 is stored as 0.0
  const Unsigned chosen = nan ? (Unsigned{} + 0x7FC0u) : nothing ? Unsigned{} : rounded;
  const Half h = __builtin_convertvector(chosen, Half);
  std::memcpy(p, &h, sizeof h);
}

inline Vec absolute(Vec v) { return bits_as<Vec>(bits_as<Int>(v) & 0x7FFFFFFF); }

// shrink._cubic, operation by operation.
inline Vec cubic(Vec magnitude, float threshold) {
  const int32_t exponent = bits_as<int32_t>(threshold) & 0x7F800000;
  const float down = bits_as<float>(exponent), up = bits_as<float>(0x7F000000 - exponent), t = threshold * up;
  const Vec a = magnitude * up;
  const Vec x = (a - t) * ((a + t) * a + t * t);
  const Int third = __builtin_convertvector(__builtin_convertvector(bits_as<Int>(x), Vec) * (1.0f / 3.0f), Int);
  Vec y = bits_as<Vec>(0x54A20000 - third);
  for (int step = 0; step < 3; ++step) {
    const Vec z = x * y * y * y;
    y = y * (z * (-1.0f / 3.0f) + (4.0f / 3.0f));
  }
  const Vec left = x * y * y * down;
  const Int untouched = (a > 1048576.0f) | (exponent == 0 ? -1 : 0);
  return untouched ? magnitude : left;
}

template <int kind>
inline Vec shrunk(Vec w, float threshold) {
  const Vec magnitude = absolute(w), zero{};
  const Int pruned = magnitude < threshold;
  if (kind == kHard) return pruned ? zero : w;
  const Vec left = kind == kSoft ? magnitude - threshold : cubic(magnitude, threshold);
  const Int sign = bits_as<Int>(w) & static_cast<int32_t>(0x80000000u);
  const Vec with_sign = bits_as<Vec>((bits_as<Int>(left) & 0x7FFFFFFF) | sign);
  return (pruned | (left == 0.0f)) ? zero : with_sign;
}

template <typename Element>
inline Vec rounded(Vec v) {  // to what the tensor can hold
  Element raw[LANES];
  store(raw, v);
  return load(raw);
}
template <>
inline Vec rounded<float>(Vec v) {
  return v;
}

template <typename Element>
struct Pointers {
  Element *weight, *latent, *grad;
};

struct Sums {
  Vec square{}, pull{}, peak{};
  Int kept{}, band{}, edited{};
};

// Which weights pruning leaves. Where the power shrink needs no value it need not be computed: above a threshold of
// ordinary size it is never zero. What a narrower type would round away has to be asked for.
template <typename Element, int kind>
inline Int stays(Vec latent, float threshold) {
  const Vec zero{};
  if (kind == kPower && sizeof(Element) == sizeof(float) && threshold > 1e-30f) {
    const Int gone = absolute(latent) <= threshold;
    return ~gone;  // NaN stays
  }
  return rounded<Element>(shrunk<kind>(latent, threshold)) != zero;
}

template <typename Element, int pass, int kind>
inline void step(const Pointers<Element>& at, const Tensor& tensor, float straight_through, Sums& sums) {
  const Vec zero{};
  if (pass == kShrink) {
    store(at.weight, shrunk<kind>(load(at.latent), tensor.threshold));
    return;
  }
  const Vec latent = load(at.latent);
  const Vec pruned = pass == kPrune || pass == kAdopt ? rounded<Element>(shrunk<kind>(latent, tensor.threshold)) : zero;
  if (pass == kPrune || pass == kCount) {
    const Int kept = pass == kPrune ? (pruned != zero) : stays<Element, kind>(latent, tensor.threshold);
    const Vec magnitude = absolute(latent);
    const float below = tensor.threshold + tensor.threshold - tensor.edge;
    sums.kept -= kept;
    sums.band -= (magnitude >= below) & (magnitude < tensor.edge) & (magnitude > zero);
    if (pass == kPrune) store(at.weight, pruned);
    return;
  }
  // Where the weight is not what pruning wrote, it was edited, and the edit is the new latent.
  const Vec written = pass == kAdopt ? load(at.weight) : zero;
  const Int edited = pass == kAdopt ? (written != pruned) : Int{};  // elsewhere a NaN alone would differ, from itself
  const Vec now = edited ? written : latent;
  sums.edited |= edited;
  const Vec magnitude = absolute(now);
  sums.square += now * now;
  sums.peak = (magnitude > sums.peak) ? magnitude : sums.peak;
  if (at.grad != nullptr) {
    const Vec grad = load(at.grad);
    const Int gone = pass == kAdopt ? (written == zero) : ~stays<Element, kind>(latent, tensor.threshold);
    if (straight_through > 0.0f) sums.pull += (gone ? -now : zero) * grad;
    if (straight_through < 1.0f) store(at.grad, gone ? (straight_through > 0.0f ? straight_through * grad : zero) : grad);
  }
}

// Stores the edits of a block. They are rare, so the sweep only looks for them and leaves the latents unwritten.
template <typename Element, int kind>
inline void take_over(const Pointers<Element>& at, const Tensor& tensor) {
  const Vec latent = load(at.latent), written = load(at.weight);
  store(at.latent, (written != rounded<Element>(shrunk<kind>(latent, tensor.threshold))) ? written : latent);
}

template <typename Element>
inline Element* offset(void* base, int64_t index) {
  return base == nullptr ? nullptr : static_cast<Element*>(base) + index;
}

template <typename Element>
inline Pointers<Element> pointers(const Tensor& tensor, int64_t index) {
  return {offset<Element>(tensor.weight, index), offset<Element>(tensor.latent, index),
          offset<Element>(tensor.grad, index)};
}

// Calls work on LANES elements at a time. The last few are padded with zeros, which add nothing to any sum.
template <typename Element, typename Work>
inline void walk(const Tensor& tensor, int64_t begin, int64_t end, const Work& work) {
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) work(pointers<Element>(tensor, i));
  if (i == end) return;
  const Pointers<Element> at = pointers<Element>(tensor, i);
  Element* real[3] = {at.weight, at.latent, at.grad};
  Element buffer[3][LANES] = {};
  for (int k = 0; k < 3; ++k)
    if (real[k] != nullptr) std::memcpy(buffer[k], real[k], (end - i) * sizeof(Element));
  work(Pointers<Element>{buffer[0], buffer[1], at.grad == nullptr ? nullptr : buffer[2]});
  for (int k = 0; k < 3; ++k)
    if (real[k] != nullptr) std::memcpy(real[k], buffer[k], (end - i) * sizeof(Element));
}

// Appends the numbers of the lanes that are set, from `first` on, and returns how many there are. May write LANES of them.
inline int append(Int set, int32_t first, int32_t* places) {
#if LANES == 16
  const __mmask16 mask = _mm512_movepi32_mask(bits_as<__m512i>(set));
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i numbers = _mm512_add_epi32(_mm512_set1_epi32(first), lanes);
  _mm512_storeu_si512(places, _mm512_maskz_compress_epi32(mask, numbers));
  return __builtin_popcount(mask);
#elif LANES == 8
  int count = 0;
  for (int mask = _mm256_movemask_ps(bits_as<__m256>(set)); mask != 0; mask &= mask - 1)
    places[count++] = first + __builtin_ctz(mask);
  return count;
#else
  int count = 0;
  for (int lane = 0; lane < LANES; ++lane) {
    places[count] = first + lane;
    count += set[lane] != 0;
  }
  return count;
#endif
}

inline Vec gathered(const float* from, const int32_t* places) {
  float values[LANES];
  for (int lane = 0; lane < LANES; ++lane) values[lane] = from[places[lane]];
  return load(values);
}

// Prunes float weights, or looks for edits of them, with cube roots of the few alone that stay: roots are most of the
// work. Returns where it ended, the last few elements being left, or `begin` where it should not be used.
template <int pass>
inline int64_t sweep_sparse(const Tensor& tensor, int64_t begin, int64_t end, Sums& sums) {
  constexpr int kChunk = 512;
  const float threshold = tensor.threshold, below = threshold + threshold - tensor.edge;
  const Vec zero{};
  int32_t places[kChunk + LANES];
  int64_t i = begin;
  for (; i + LANES <= end;) {
    const Pointers<float> at = pointers<float>(tensor, i);
    const int size = static_cast<int>(end - i < kChunk ? (end - i) / LANES * LANES : kChunk);
    int count = 0;
    for (int k = 0; k < size; k += LANES) {
      const Vec latent = load(at.latent + k), magnitude = absolute(latent);
      const Int gone = magnitude <= threshold;
      count += append(~gone, k, places + count);
      if (pass == kPrune) {
        sums.band -= (magnitude >= below) & (magnitude < tensor.edge) & (magnitude > zero);
        store(at.weight + k, zero);
        continue;
      }
      const Vec written = load(at.weight + k);
      sums.edited |= gone & (written != zero);
      sums.square += latent * latent;
      sums.peak = (magnitude > sums.peak) ? magnitude : sums.peak;
      if (at.grad != nullptr) sums.pull += ((written == zero) ? -latent : zero) * load(at.grad + k);
    }
    for (int lane = 0; lane < LANES; ++lane) places[count + lane] = count > 0 ? places[count - 1] : 0;
    for (int k = 0; k < count; k += LANES) {
      const Vec pruned = shrunk<kPower>(gathered(at.latent, places + k), threshold);
      if (pass == kAdopt) {
        sums.edited |= gathered(at.weight, places + k) != pruned;
      } else {
        float values[LANES];
        store(values, pruned);
        for (int lane = 0; lane < LANES; ++lane) at.weight[places[k + lane]] = values[lane];
      }
    }
    if (pass == kPrune) sums.kept[0] += count;
    i += size;
    if (3 * count > size) break;  // too many stay: the rest at once
  }
  return i;
}

template <typename Element, int pass, int kind>
Partial sweep(const Tensor& tensor, int64_t begin, int64_t end, float straight_through) {
  Sums sums;
  int64_t from = begin;
  if (kind == kPower && sizeof(Element) == sizeof(float) && tensor.threshold > 1e-30f &&
      (pass == kPrune || (pass == kAdopt && straight_through == 1.0f)))
    from = sweep_sparse<pass == kPrune ? kPrune : kAdopt>(tensor, begin, end, sums);
  if (pass == kAdopt) {  // an edit is rare, and what was added up knows nothing of it: once more from the start
    int32_t edited = 0;
    for (int lane = 0; lane < LANES; ++lane) edited |= sums.edited[lane];
    if (edited) sums = Sums{}, from = begin;
  }
  walk<Element>(tensor, from, end, [&](const Pointers<Element>& at) {
    step<Element, pass, kind>(at, tensor, straight_through, sums);
  });
  Partial partial;
  int32_t edited = 0;
  for (int lane = 0; lane < LANES; ++lane) {
    partial.square += sums.square[lane];
    partial.pull += sums.pull[lane];
    partial.kept += sums.kept[lane];
    partial.band += sums.band[lane];
    edited |= sums.edited[lane];
    if (sums.peak[lane] > partial.peak) partial.peak = sums.peak[lane];
  }
  if (edited)
    walk<Element>(tensor, begin, end, [&](const Pointers<Element>& at) { take_over<Element, kind>(at, tensor); });
  return partial;
}

template <typename Element, int pass>
Partial of_kind(const Tensor& tensor, int64_t begin, int64_t end, const Options& options) {
  const float share = options.straight_through;
  if (options.shrink == kHard) return sweep<Element, pass, kHard>(tensor, begin, end, share);
  if (options.shrink == kSoft) return sweep<Element, pass, kSoft>(tensor, begin, end, share);
  return sweep<Element, pass, kPower>(tensor, begin, end, share);
}

template <typename Element>
Partial block(const Tensor& tensor, int64_t begin, int64_t end, const Options& options) {
  switch (options.pass) {
    case kAdopt: return of_kind<Element, kAdopt>(tensor, begin, end, options);
    case kMeasure: return of_kind<Element, kMeasure>(tensor, begin, end, options);
    case kPrune: return of_kind<Element, kPrune>(tensor, begin, end, options);
    case kCount: return of_kind<Element, kCount>(tensor, begin, end, options);
    default: return of_kind<Element, kShrink>(tensor, begin, end, options);
  }
}

}  // namespace SUFFIX
}  // namespace
