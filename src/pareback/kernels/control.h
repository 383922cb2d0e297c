// The thresholds' step in C++: thresholds/controller.py and its rules for tensors on the CPU, in one call per step.
//
// A step of a small network is over in microseconds, of which a hundred operators on fifteen numbers each would take
// most. Here they are loops. The formulas are those of the Python files, where they are explained; a test holds the two
// side by side. Everything is calculated in double; the state is stored in the type that PyTorch has it in.

namespace {

enum RuleKind : int32_t { kGaussian, kSearched, kPenalty, kExact };
enum PenaltyForm : int32_t { kLinear, kSquared, kHinge };

// How a goal moves thresholds; mirrored by a ctypes structure in thresholds/native.py, like the next two.
struct Rule {
  int32_t kind;  // a RuleKind
  int32_t form;  // a PenaltyForm
  int64_t limits;
  const double* shares;   // [limits][tensors]
  const double* budgets;  // [limits]
  const double* weights;  // [limits], the penalties' λ
  const double* target;   // [tensors], the sparsity asked for
  double tolerance;
  int64_t passes;
};

struct Constants {
  double band, stride, gain, recovery, near, reloaded, first_beta, second_beta;
};

// The state of a controller, as thresholds/controller.py has it.
struct Control {
  int64_t count;
  int64_t wide;  // whether the state is stored in double rather than float
  void *r, *threshold, *spread, *peak, *velocity, *square, *drift, *missed, *damping;
  int64_t *nonzero, *band, *step, *normalised;
  const double *sizes, *least, *most;
  const int64_t* floor;
  const void *lr, *multiple, *momentum;
  const uint8_t* adaptive;
  const double* sense;  // null where nothing is maximised
  double ramp_steps;
  Constants constants;
  Rule rule;
};

class Controller {
 public:
  // Sweeps the tensors that are open at given thresholds and writes non-zeros and band to the state.
  using Sweep = std::function<void(const std::vector<double>& thresholds, const std::vector<double>& edges,
                                   const std::vector<char>& open, bool prune)>;

  Controller(const Control& control, const Sweep& sweep) : c(control), k(control.constants), n(control.count), sweep(sweep) {}

  // Moves the thresholds by one optimizer step from `moments` (five numbers per tensor, of which square, peak and pull
  // are read), then prunes. Where `go` is false the optimizer skipped its step, and nothing moves.
  void step(const double* moments, bool go, double scale) {
    if (go) {
      advance(moments, scale);
      if (c.rule.kind == kExact && refine_exact()) return;
      if (c.rule.kind == kSearched) refine_searched();
    }
    prune();
  }

 private:
  const Control& c;
  const Constants& k;
  const int64_t n;
  const Sweep& sweep;
  std::vector<double> sparsity, slope;
  std::vector<char> can_tighten, can_loosen;

  double get(const void* at, int64_t i) const {
    return c.wide ? static_cast<const double*>(at)[i] : static_cast<const float*>(at)[i];
  }
  void set(void* at, int64_t i, double value) const {
    if (c.wide)
      static_cast<double*>(at)[i] = value;
    else
      static_cast<float*>(at)[i] = static_cast<float>(value);
  }

  double share(int64_t step) const {
    if (c.ramp_steps == 0.0) return 1.0;
    const double left = 1.0 - std::min(static_cast<double>(step) / c.ramp_steps, 1.0);
    return 1.0 - left * left * left;
  }
  double budget(int64_t limit, double share) const { return 1.0 - share * (1.0 - c.rule.budgets[limit]); }
  static double gaussian_slope(double r) { return std::sqrt(2.0 / M_PI) * std::exp(-0.5 * r * r); }
  static double predicted(double r) { return std::erf(r / std::sqrt(2.0)); }

  void look() {  // Controller.room
    sparsity.resize(n), slope.resize(n), can_tighten.resize(n), can_loosen.resize(n);
    for (int64_t i = 0; i < n; ++i) {
      const double r = get(c.r, i), kept = static_cast<double>(c.nonzero[i]);
      const double inside = std::max(static_cast<double>(c.band[i]), 0.5);
      sparsity[i] = 1.0 - kept / c.sizes[i];
      slope[i] = inside / (c.sizes[i] * (k.band + std::min(r, k.band)));
      can_tighten[i] = kept > c.least[i];
      can_loosen[i] = kept < c.most[i] && r > 0.0;
    }
  }

  void advance(const double* moments, double scale) {
    const double before = share(*c.step);
    *c.step += 1;
    const double now = share(*c.step);
    observe(moments);
    look();
    std::vector<double> gradient(n);
    for (int64_t i = 0; i < n; ++i) {
      const double pull = moments[5 * i + 2] * scale * (c.sense ? c.sense[i] : 1.0);
      gradient[i] = pull / std::max(get(c.r, i), 1e-3);
      if (!std::isfinite(gradient[i])) gradient[i] = 0.0;
    }
    move_within(wanted(gradient, before, now));
  }

  void observe(const double* moments) {  // Controller.observe
    for (int64_t i = 0; i < n; ++i) {
      // A spread that overflowed would prune everything; the last good one serves until weights are finite again.
      const double spread = std::sqrt(moments[5 * i] / c.sizes[i]);
      if (!std::isfinite(spread)) continue;
      const bool trained = spread > 0.0 && spread >= k.reloaded * get(c.spread, i);
      if (c.rule.kind == kExact && trained) set(c.r, i, get(c.threshold, i) / spread);
      set(c.spread, i, spread);
      set(c.peak, i, moments[5 * i + 1]);
    }
  }

  std::vector<double> wanted(std::vector<double>& gradient, double before, double now) {
    std::vector<double> move(n);
    switch (c.rule.kind) {
      case kGaussian:
        for (int64_t i = 0; i < n; ++i) move[i] = gaussian_bound(c.rule.target[i] * now) - get(c.r, i);
        return move;
      case kSearched:
        for (int64_t i = 0; i < n; ++i) move[i] = bounded((c.rule.target[i] * now - sparsity[i]) / slope[i]);
        return move;
      case kPenalty:
        add_penalty(gradient, now);
        return descended(gradient);
      default:
        return exact_move(gradient, before, now);
    }
  }

  double bounded(double move) const { return std::max(-k.stride, std::min(k.stride, move)); }

  void move_within(const std::vector<double>& move) {  // Controller.within, and the move itself
    for (int64_t i = 0; i < n; ++i) {
      const double per_r = c.sizes[i] * slope[i], kept = static_cast<double>(c.nonzero[i]);
      const double up = std::max((kept - c.least[i]) / per_r, -k.stride);
      const double down = std::min((kept - c.most[i]) / per_r, k.stride);
      set(c.r, i, std::max(get(c.r, i) + std::max(std::min(move[i], up), down), 0.0));
    }
  }

  void ends(std::vector<double>& thresholds, std::vector<double>& edges) const {
    thresholds.resize(n), edges.resize(n);
    for (int64_t i = 0; i < n; ++i) {
      const double spread = get(c.spread, i);
      double threshold = std::min(get(c.r, i) * spread, 0.999 * get(c.peak, i));
      if (!c.wide) threshold = static_cast<float>(threshold);  // as it will be stored
      thresholds[i] = threshold;
      edges[i] = threshold + k.band * spread;
    }
  }

  std::vector<double> descended(const std::vector<double>& gradient) {  // View.descend
    *c.normalised += 1;
    const double count = static_cast<double>(*c.normalised);
    const double first = 1.0 - std::pow(k.first_beta, count), second = 1.0 - std::pow(k.second_beta, count);
    std::vector<double> move(n);
    for (int64_t i = 0; i < n; ++i) {
      const bool adaptive = c.adaptive[i];
      const double decay = adaptive ? k.first_beta : get(c.momentum, i);
      const double fresh = adaptive ? gradient[i] * (1.0 - k.first_beta) : gradient[i];
      const double velocity = decay * get(c.velocity, i) + fresh;
      const double square = k.second_beta * get(c.square, i) + (1.0 - k.second_beta) * gradient[i] * gradient[i];
      set(c.velocity, i, velocity);
      set(c.square, i, square);
      const double along = adaptive ? velocity / first / (std::sqrt(square / second) + 1e-12) : velocity;
      move[i] = -get(c.lr, i) * get(c.multiple, i) * along;
    }
    return move;
  }

  // -- penalties: Eq. 7, 10 and 11 ------------------------------------------------------------------------------------

  void add_penalty(std::vector<double>& gradient, double now) const {
    for (int64_t j = 0; j < c.rule.limits; ++j) {
      const double* shares = c.rule.shares + j * n;
      double density = 0.0;
      for (int64_t i = 0; i < n; ++i) density += shares[i] * (1.0 - predicted(get(c.r, i)));
      const double over = density - budget(j, now);
      const double form = c.rule.form == kLinear ? 1.0 : c.rule.form == kSquared ? 2.0 * over : over > 0.0 ? 1.0 : 0.0;
      for (int64_t i = 0; i < n; ++i)
        gradient[i] -= form * c.rule.weights[j] * shares[i] * gaussian_slope(get(c.r, i));
    }
  }

  // -- the exact budget -----------------------------------------------------------------------------------------------

  std::vector<double> errors(double share) const {
    std::vector<double> error(c.rule.limits);
    for (int64_t j = 0; j < c.rule.limits; ++j) {
      double density = 0.0;
      for (int64_t i = 0; i < n; ++i)
        density += c.rule.shares[j * n + i] * static_cast<double>(c.nonzero[i]) / c.sizes[i];
      error[j] = density - budget(j, share);
    }
    return error;
  }

  std::vector<double> exact_move(const std::vector<double>& gradient, double before, double now) {
    const std::vector<double> error = errors(before);
    std::vector<std::vector<double>> slopes(c.rule.limits, std::vector<double>(n));
    for (int64_t j = 0; j < c.rule.limits; ++j)
      for (int64_t i = 0; i < n; ++i) slopes[j][i] = c.rule.shares[j * n + i] * gaussian_slope(get(c.r, i));
    std::vector<double> learned = descended(projected(gradient, slopes, error));
    for (auto& row : slopes)
      for (double& value : row) value = -value;
    learned = projected(learned, slopes, error);
    const double gain = k.gain * damping(*std::max_element(error.begin(), error.end()));
    std::vector<double> excess(c.rule.limits);
    for (int64_t j = 0; j < c.rule.limits; ++j) excess[j] = gain * error[j] + budget(j, before) - budget(j, now);
    const double shift = restoring(excess);
    for (double& move : learned) move = bounded(move) + shift;
    return learned;
  }

  double damping(double error) const {
    if (std::abs(error) < 1e-12) error = 0.0;
    const double last = get(c.missed, 0), before = get(c.missed, 1), damped = get(c.damping, 0);
    const bool swings = error * last < 0.0 && last * before < 0.0 && std::abs(error) >= 0.9 * std::abs(before);
    const double overshot = 1.0 + std::abs(error) / std::max(std::abs(last), 1e-12);
    const double fresh = swings ? damped * k.gain / overshot : std::min(damped / k.recovery, 1.0);
    set(c.damping, 0, fresh);
    set(c.missed, 0, error);
    set(c.missed, 1, last);
    return fresh;
  }

  double restoring(const std::vector<double>& excess) const {
    double shift = -std::numeric_limits<double>::infinity();
    for (int64_t j = 0; j < c.rule.limits; ++j) {
      double measured = 0.0, gaussian = 0.0;
      for (int64_t i = 0; i < n; ++i) {
        const double share = c.rule.shares[j * n + i];
        if (excess[j] > 0.0 ? can_tighten[i] : can_loosen[i]) measured += share * slope[i];
        gaussian += share * gaussian_slope(get(c.r, i));
      }
      shift = std::max(shift, excess[j] / std::max(std::max(measured, 0.02 * gaussian), 1e-4));
    }
    return bounded(shift);
  }

  static double dot(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0.0;
    for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
  }
  static void subtract(std::vector<double>& a, double factor, const std::vector<double>& b) {
    for (size_t i = 0; i < a.size(); ++i) a[i] -= factor * b[i];
  }
  static std::vector<double> unit(std::vector<double> row, const std::vector<double>& original) {
    const double left = dot(row, row);
    const double factor = left > 1e-6 * dot(original, original) ? 1.0 / std::sqrt(std::max(left, 1e-30)) : 0.0;
    for (double& value : row) value *= factor;
    return row;
  }

  std::vector<double> projected(std::vector<double> gradient, const std::vector<std::vector<double>>& slopes,
                                const std::vector<double>& error) const {
    const auto tightest = std::max_element(error.begin(), error.end()) - error.begin();
    std::vector<std::vector<double>> directions{unit(slopes[tightest], slopes[tightest])};
    subtract(gradient, dot(directions[0], gradient), directions[0]);
    for (int64_t j = 0; c.rule.limits > 1 && j < c.rule.limits; ++j) {
      std::vector<double> rest = slopes[j];
      for (const auto& direction : directions) subtract(rest, dot(rest, direction), direction);
      rest = unit(rest, slopes[j]);
      if (!(error[j] > -k.near && dot(rest, gradient) > 0.0)) std::fill(rest.begin(), rest.end(), 0.0);
      subtract(gradient, dot(rest, gradient), rest);
      directions.push_back(rest);
    }
    return gradient;
  }

  double worst(double share) const {
    const std::vector<double> error = errors(share);
    return std::abs(*std::max_element(error.begin(), error.end()));
  }

  void prune() const {
    std::vector<double> thresholds, edges;
    ends(thresholds, edges);
    sweep(thresholds, edges, std::vector<char>(n, 1), true);
    for (int64_t i = 0; i < n; ++i) set(c.threshold, i, thresholds[i]);
  }

  void count(const std::vector<char>& open) const {
    std::vector<double> thresholds, edges;
    ends(thresholds, edges);
    sweep(thresholds, edges, open, false);
  }

  // Counts by pruning, as it is seldom necessary to correct; returns whether what was pruned last can stay.
  bool refine_exact() {
    const double missed = worst(share(*c.step - 1));
    const double drifted = get(c.drift, 0);
    const bool calm = std::max(missed, drifted) <= c.rule.tolerance;
    set(c.drift, 0, missed);
    if (calm) return false;
    const double now = share(*c.step);
    for (int64_t number = 0; number < c.rule.passes; ++number) {
      prune();
      const double found = worst(now);
      // Halved, not forgotten: a step may come out right by chance between others that do not.
      if (number == 0) set(c.drift, 0, std::max(found, 0.5 * drifted));
      if (found <= c.rule.tolerance) return true;
      look();
      move_within(std::vector<double>(n, restoring(errors(now))));
    }
    return false;
  }

  // -- fixed-BS, Eq. 2 ------------------------------------------------------------------------------------------------

  void refine_searched() {
    const double now = share(*c.step), infinity = std::numeric_limits<double>::infinity();
    std::vector<double> low(n, 0.0), high(n, infinity), missing(c.rule.target, c.rule.target + n), surplus(n, 0.0);
    std::vector<char> open(n, 1);
    for (int64_t number = 0; number < c.rule.passes; ++number) {
      count(open);
      look();
      bool any = false;
      for (int64_t i = 0; i < n; ++i) {
        const double miss = c.rule.target[i] * now - sparsity[i];
        open[i] = std::abs(miss) > std::max(0.5 / c.sizes[i], c.rule.tolerance);
        if (!open[i]) continue;
        any = true;
        narrow(i, number, miss, low[i], high[i], missing[i], surplus[i]);
      }
      if (!any) return;
    }
  }

  void narrow(int64_t i, int64_t number, double miss, double& low, double& high, double& missing, double& surplus) const {
    const double r = get(c.r, i);
    if (miss > 0.0) low = r, missing = miss;
    if (miss < 0.0) high = r, surplus = -miss;
    double guess;
    if (number < 2)
      guess = r + bounded(miss / slope[i]);
    else if (number % 2)
      guess = low + 0.5 * (high - low);
    else
      guess = low + (high - low) * (missing / (missing + surplus));
    if (!(guess > low && guess < high)) guess = std::isfinite(high) ? low + 0.5 * (high - low) : r + k.stride;
    set(c.r, i, guess);
  }

  // -- fixed-GA, Eq. 3 ------------------------------------------------------------------------------------------------

  // √2·erfinv(sparsity): a guess (Winitzki) and three of Newton's steps on erf, which end at its last digits.
  static double gaussian_bound(double sparsity) {
    if (sparsity <= 0.0) return 0.0;
    const double a = 0.147, log = std::log1p(-sparsity * sparsity), b = 2.0 / (M_PI * a) + 0.5 * log;
    double x = std::sqrt(std::sqrt(b * b - log / a) - b);
    for (int number = 0; number < 3; ++number)
      x -= (std::erf(x) - sparsity) * 0.5 * std::sqrt(M_PI) * std::exp(x * x);
    return std::sqrt(2.0) * x;
  }
};

}  // namespace
