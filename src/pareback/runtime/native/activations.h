// What follows a layer, for registers of WIDTH floats. Included by lanes.h. NaN goes through all of it, as in PyTorch: a
// number is replaced where a comparison with it holds, which for NaN none does.

inline Register at_least(Register x, float least) { return x < least ? least - Register{} : x; }
inline Register at_most(Register x, float most) { return x > most ? most - Register{} : x; }

// 2^x for x up to 126, to about one unit in the last place; 2^-127 and less, whose exponent would be no more than zero,
// are 0. N at once, as each waits for its own last product.
template <int N>
inline __attribute__((always_inline)) void power_of_two(Register* x) {
  constexpr float terms[] = {1.5353353e-4f, 1.3398875e-3f, 9.6184378e-3f, 5.5503324e-2f,
                             2.4022648e-1f, 6.9314718e-1f, 1.0f};
  Register rest[N], sum[N], scale[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    const Register above = at_least(x[n], -127.0f);
    const Register nearest = (above + 12582912.0f) - 12582912.0f;  // 1.5·2^23 leaves no bits for a fraction
    const IntRegister exponent = (__builtin_convertvector(nearest, IntRegister) + 127) << 23;
    std::memcpy(&scale[n], &exponent, sizeof scale[n]);
    rest[n] = above - nearest;
    sum[n] = rest[n] * terms[0] + terms[1];
  }
#pragma GCC unroll 8
  for (int i = 2; i < 7; ++i)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sum[n] = sum[n] * rest[n] + terms[i];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) x[n] = sum[n] * scale[n];
}

// 1/x for numbers from 1 to 2^127: an estimate and a step of Newton's method, a quarter of the time of a division.
inline Register one_by(Register x) {
#if WIDTH == 16
  __m512 of, y;
  std::memcpy(&of, &x, sizeof of);
  y = _mm512_rcp14_ps(of);
  y = _mm512_mul_ps(y, _mm512_fnmadd_ps(of, y, _mm512_set1_ps(2.0f)));
  Register result;
  std::memcpy(&result, &y, sizeof result);
  return result;
#else
  return 1.0f / x;
#endif
}

// 1/(1 + e^-x).
template <int N>
inline __attribute__((always_inline)) void sigmoid(Register* x) {
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) x[n] = at_most(x[n] * -1.44269504f, 126.0f);
  power_of_two<N>(x);
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) x[n] = one_by(1.0f + x[n]);
}

// x·Φ(x) with Φ(x) = 1/2 + x·P(x²), where P was fitted up to |x| = 5.4, beyond which Φ is 0 or 1 to seven digits. The
// error is that of float32 itself: 6e-8 of the norm, 7e-7 at most. N at once, as each waits for its own last product.
template <int N>
inline __attribute__((always_inline)) void gelu(Register* x) {
  constexpr float terms[] = {0.00039620715f, -0.00103098468f, 0.000864914095f, -0.00117892365f, 0.00367051456f,
                             -0.00672349334f, 0.00964467414f, -0.0139591089f, 0.0196469817f, -0.0257474985f,
                             0.0321163572f, -0.039206706f, 0.0484996028f, -0.0653280616f, 0.130928114f};
  Register above[N], within[N], t[N], sum[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    above[n] = at_least(x[n], -5.4f);
    within[n] = at_most(above[n], 5.4f);
    t[n] = within[n] * within[n] * 0.0685871056f - 1.0f;
    sum[n] = t[n] * terms[0] + terms[1];
  }
#pragma GCC unroll 16
  for (int i = 2; i < 15; ++i)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sum[n] = sum[n] * t[n] + terms[i];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) x[n] = above[n] * (within[n] * sum[n] + 0.5f);
}

// x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2, which is x times a sigmoid.
template <int N>
inline __attribute__((always_inline)) void tanh_gelu(Register* x) {
  Register gate[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) gate[n] = x[n] * (1.59576912f + 0.0713548163f * x[n] * x[n]);
  sigmoid<N>(gate);
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) x[n] *= gate[n];
}

template <int N>
inline __attribute__((always_inline)) void silu(Register* x) {
  Register gate[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) gate[n] = x[n];
  sigmoid<N>(gate);
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) x[n] *= gate[n];
}

inline void relu(Vec& v) { EACH_PART v.part[k] = at_least(v.part[k], 0.0f); }

// Applies `work` to lane vectors in memory, a few registers at once.
template <typename Few, typename One>
inline __attribute__((always_inline)) void in_fours(float* values, int64_t number, const Few& few, const One& one) {
  constexpr int together = 4;
  int64_t i = 0;
  for (; i + together * WIDTH <= number * kLanes; i += together * WIDTH) {
    Register x[together];
#pragma GCC unroll 4
    for (int n = 0; n < together; ++n) std::memcpy(&x[n], values + i + n * WIDTH, sizeof x[n]);
    few(x);
#pragma GCC unroll 4
    for (int n = 0; n < together; ++n) std::memcpy(values + i + n * WIDTH, &x[n], sizeof x[n]);
  }
  for (; i < number * kLanes; i += WIDTH) {
    Register x;
    std::memcpy(&x, values + i, sizeof x);
    one(&x);
    std::memcpy(values + i, &x, sizeof x);
  }
}

template <typename Work>
inline __attribute__((always_inline)) void one_by_one(float* values, int64_t number, const Work& work) {
  for (int64_t i = 0; i < number * kLanes; i += WIDTH) {
    Register x;
    std::memcpy(&x, values + i, sizeof x);
    x = work(x);
    std::memcpy(values + i, &x, sizeof x);
  }
}

// Not inlined: there are some hundred shapes of tiles, and ReLU is what most layers end with.
__attribute__((noinline)) void activate_all(float* values, int64_t number, int32_t activation, float slope) {
  switch (activation) {
    case kRelu:
      return one_by_one(values, number, [](Register x) { return at_least(x, 0.0f); });
    case kGelu:
      return in_fours(values, number, [](Register* x) { gelu<4>(x); }, [](Register* x) { gelu<1>(x); });
    case kRelu6:
      return one_by_one(values, number, [](Register x) { return at_most(at_least(x, 0.0f), 6.0f); });
    case kSilu:
      return in_fours(values, number, [](Register* x) { silu<4>(x); }, [](Register* x) { silu<1>(x); });
    case kHardswish:
      return one_by_one(values, number, [](Register x) {
        return x * (at_most(at_least(x + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f));
      });
    case kHardsigmoid:
      return one_by_one(values, number,
                        [](Register x) { return at_most(at_least(x + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f); });
    case kSigmoid:
      return in_fours(values, number, [](Register* x) { sigmoid<4>(x); }, [](Register* x) { sigmoid<1>(x); });
    case kTanhGelu:
      return in_fours(values, number, [](Register* x) { tanh_gelu<4>(x); }, [](Register* x) { tanh_gelu<1>(x); });
    case kLeakyRelu:
      return one_by_one(values, number, [slope](Register x) { return x < 0.0f ? x * slope : x; });
    default:
      return;
  }
}

// One lane vector, in registers.
inline void activate(Vec& v, int32_t activation) {
  if (activation == kRelu) return relu(v);
  if (activation == kNone) return;
  alignas(64) float values[kLanes];
  store(values, v);
  activate_all(values, 1, activation, 0.0f);
  v = load(values);
}
