// Group norms over images in lanes, for registers of WIDTH floats. Included by lanes.h.
//
// Statistics are those of a channel first: its mean, then the squares of what is left. Channels are put together in
// float64 by settle_group in engine.cpp, so that any number of threads may share them and the bits are the same.

typedef double DoubleRegister __attribute__((vector_size(8 * WIDTH)));

// So many lane vectors are added in float32 before they go to totals in float64.
constexpr int64_t kAddedTogether = 64;

// Adds up N sums over the lanes of a plane. `terms` adds what it makes of a lane vector, given its position, to them;
// there are several of each, as an addition waits for the one before.
template <int N, typename Terms>
inline __attribute__((always_inline)) void lane_totals(const GroupNorm& op, const float* plane, const Terms& terms,
                                                       double (*totals)[kLanes]) {
  constexpr int chains = std::max(1, 4 / kRegisters);
  Vec sums[chains][N] = {};
  DoubleRegister wide[N][kRegisters] = {};
  const auto settle = [&] {
    for (int n = 0; n < N; ++n) {
      for (int i = 1; i < chains; ++i) add(sums[0][n], sums[i][n]);
      EACH_PART wide[n][k] += __builtin_convertvector(sums[0][n].part[k], DoubleRegister);
      for (int i = 0; i < chains; ++i) sums[i][n] = Vec{};
    }
  };
  int64_t waiting = 0;
  for (int64_t row = 0; row < op.height; ++row) {
    const float* in = plane + row * op.in_row * kLanes;
    for (int64_t column = 0; column < op.width;) {
      const int64_t last = std::min(op.width, column + kAddedTogether);
      waiting += last - column;
      for (; column + chains <= last; column += chains)
#pragma GCC unroll 4
        for (int i = 0; i < chains; ++i)
          terms(load(in + (column + i) * kLanes), row * op.width + column + i, sums[i]);
#pragma GCC unroll 4
      for (int i = 0; i + 1 < chains; ++i)
        if (column < last) {
          terms(load(in + column * kLanes), row * op.width + column, sums[i]);
          ++column;
        }
      if (waiting < kAddedTogether) continue;
      settle();
      waiting = 0;
    }
  }
  settle();
  std::memcpy(totals, wide, sizeof wide);
}

// A number for each image, in its lanes. Of one image in all of them, as to write single lanes and read them together
// takes as long as many a plane does.
inline Vec over_images(const GroupNorm& op, const float* numbers) {
  if (op.images == 1) return broadcast(numbers[0]);
  alignas(64) float lanes[kLanes] = {};
  for (int64_t image = 0; image < op.images; ++image) std::fill_n(lanes + image * op.tiles, op.tiles, numbers[image]);
  return load(lanes);
}

// The moments of a channel in every image. Positions outside are zero, and count for nothing in the first sum.
inline void group_moments(const GroupNorm& op, const Arena& arena, int64_t channel) {
  const float* plane = arena.at(op.in) + channel * op.in_plane * kLanes;
  const double share = 1.0 / static_cast<double>(op.pixels);
  double sums[1][kLanes], apart[2][kLanes];
  lane_totals<1>(op, plane, [](const Vec& x, int64_t, Vec* to) { add(to[0], x); }, sums);
  float means[kLanes];
  for (int64_t image = 0; image < op.images; ++image)
    means[image] = static_cast<float>(sum_of_image(op, sums[0], image) * share);
  const Vec mean = over_images(op, means);
  const uint16_t* valid = op.valid;
  const auto distances = [&mean, valid](Vec x, int64_t position, Vec* to) {
    EACH_PART x.part[k] -= mean.part[k];
    if (valid != nullptr) keep_valid(x, valid[position]);
    add(to[0], x);
    EACH_PART to[1].part[k] += x.part[k] * x.part[k];
  };
  lane_totals<2>(op, plane, distances, apart);
  for (int64_t image = 0; image < op.images; ++image) {
    // A mean far from zero was rounded: what is left has one as well.
    const double rest = sum_of_image(op, apart[0], image), squares = sum_of_image(op, apart[1], image);
    const double spread = squares - rest * rest * share;
    const Moments found = {means[image] + rest * share, spread < 0.0 ? 0.0 : spread};
    put_moments(op, arena, channel * op.images + image, found);
  }
}

// out = activation((in − mean)/deviation·scale + shift + residual) for a channel whose groups are settled.
inline void group_normalize(const GroupNorm& op, const Arena& arena, int64_t channel) {
  float means[kLanes], factors[kLanes], offsets[kLanes];
  const int64_t group = channel / (op.channels / op.groups);
  for (int64_t image = 0; image < op.images; ++image) {
    const Moments found = moments_at(op, arena, (op.channels + group) * op.images + image);
    const double factor = found.spread * op.scale[channel];
    means[image] = static_cast<float>(found.mean);
    factors[image] = static_cast<float>(factor);
    offsets[image] = static_cast<float>(op.shift[channel] + (means[image] - found.mean) * factor);
  }
  const Vec mean = over_images(op, means), factor = over_images(op, factors), offset = over_images(op, offsets);
  for (int64_t row = 0; row < op.height; ++row) {
    const float* in = arena.at(op.in) + (channel * op.in_plane + row * op.in_row) * kLanes;
    float* out = arena.at(op.out) + (channel * op.out_plane + row * op.out_row) * kLanes;
    const float* residual = op.residual < 0 ? nullptr
                                            : arena.at(op.residual) +
                                                  (channel * op.residual_plane + row * op.residual_row) * kLanes;
    const uint16_t* valid = op.valid == nullptr ? nullptr : op.valid + row * op.width;
    write_row(in, out, residual, valid, op.width, op.activation, op.slope, [&](Vec& v) {
      EACH_PART v.part[k] = (v.part[k] - mean.part[k]) * factor.part[k] + offset.part[k];
    });
  }
}
