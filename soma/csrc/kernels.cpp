// The perturbed forward on a CPU: room 04's `Objective` for the paper's LSTM expert, and room 04a's for the EGGROLL control, with nothing stacked.
// Notebook 05_kernels tells how and why. vector.h: lanes and functions of them · random.h: Philox · model.h: packed weights, layers, loss ·
// noise.h: activation noise · forward.h: the expert on one tile · lanes.h: between an update's passes · gru.h: the control on one tile.
#include <atomic>
#include <functional>
#include <system_error>
#include <thread>
#include "forward.h"
#include "gru.h"
#include "lanes.h"

namespace {

// fn(job) for every job, on threads that live as long as the call: nothing spins while others work, nothing is left behind by a fork.
void parallel(long jobs, int threads, const std::function<void(long)>& fn) {
  std::atomic<long> next(0);
  std::atomic<bool> failed(false);
  auto work = [&] {
    FlushSubnormals flush;
    try { for (long j; !failed && (j = next++) < jobs;) fn(j); }
    catch (...) { failed = true; }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < std::min<long>(threads, jobs); i++) try { others.emplace_back(work); } catch (const std::system_error&) { break; }
  work();
  for (auto& t : others) t.join();
  if (failed) throw std::bad_alloc();
}

// Sequences in tiles as wide as there are sequences for; the last ones in the narrowest tile that holds them.
struct Tiles {
  long wide, rest;  // tiles of WIDEST vectors, and sequences after them
  explicit Tiles(long n) : wide(n / (WIDEST * W)), rest(n % (WIDEST * W)) {
    if (rest > WIDEST / 2 * W) wide++, rest = 0;
  }
  long all() const { return wide + (rest > 0); }
  template <class F> void run(long i, F f) const {  // f(vectors, first sequence): vectors is a type that carries a number
    const long first = i * WIDEST * W;
    if (i < wide) f(std::integral_constant<int, WIDEST>(), first);
    else if (WIDEST > 2 && rest > W) f(std::integral_constant<int, 2>(), first);
    else f(std::integral_constant<int, 1>(), first);
  }
  template <class F> void each(int threads, long repeats, F f) const {  // f(vectors, first sequence, repeat) for all of them
    parallel(repeats * all(), threads, [&](long job) { run(job % all(), [&](auto nv, long first) { f(nv, first, job / all()); }); });
  }
};

struct Probes {  // what room 03 calls a family, a key and directions
  int family;
  Key key;
  uint32_t stream;
  const int64_t* directions;
  const float* given;  // [P][M]
  const std::vector<uint64_t>& gains;  // which of each 64 coordinates are gains

  // theta + step · z of direction j
  void perturb(const Shape& s, const float* theta, long j, float step, float* to) const {
    const size_t M = s.M();
    if (family == GIVEN) { for (size_t i = 0; i < M; i++) to[i] = theta[i] + step * given[j * M + i]; return; }
    for (size_t i = 0; i < M; i += 64) {
      Block b = block_of(key, family, stream, (uint32_t)(i / 64), (uint32_t)directions[j]);
      uint32_t size;
      float z[64];
      memcpy(&size, &step, sizeof size);
      for (int k = 0; k < 64; k++) {
        const uint32_t minus = (uint32_t)(~b.plus >> k & 1) << 31, on = -(uint32_t)((b.active | gains[i / 64]) >> k & 1), bits = (size ^ minus) & on;
        memcpy(z + k, &bits, sizeof bits);
      }
      for (size_t k = i; k < std::min(i + 64, M); k++) to[k] = theta[k] + z[k - i];
    }
  }
};

struct Ready {  // one model, packed, and the batch it reads
  Shape s;
  Text text;
  Head head;
  Tiles tiles;
  Model model;
  Table table;
  Ready(Shape s, const float* theta, const float* E, const uint8_t* windows, long B, long T)
      : s(s), text(windows, B, T), head(E, s.dE), tiles(B), model(s), table(s, text.present) {
    model.load(theta);
    Array<vf> space(table_space(s));
    table.fill(model, head, text, space.get());
  }
};

template <int NV> void forward(const Shape& s, const Model& m, const Head& head, const Table& table, const Text& text, const int32_t* order, long first, long end, const Outputs& out) {
  Tile<NV> tile(text, order, first, end);
  Forward<NV> pass(s);
  pass.run(m, head, &table, tile, out);
}

// Rows [B][T][width] of a tile's sequences at one byte: to lanes and back. Lanes without a sequence are given the last one's, and give nothing.
template <int NV> struct Rows {
  static constexpr int L = NV * W;
  long first, T;
  int used, K;
  Array<float> local;   // the rows of one byte, close together: their own places are so far apart that they would push each other out of the cache
  Rows(long first, long B, long T, int K) : first(first), T(T), used((int)std::min<long>(L, B - first)), K(K), local((size_t)L * K) {}
  size_t place(int b, long t) const { return ((first + b) * T + t) * K; }

  void load(const float* rows, long t, vf* lanes) const {
    const float* from[L];
    for (int b = 0; b < L; b++) {
      from[b] = local.get() + (size_t)b * K;
      memcpy(local.get() + (size_t)b * K, rows + place(std::min(b, used - 1), t), K * sizeof(float));
    }
    int k = 0;
    for (; k + 4 <= K; k += 4)
      for (int v = 0; v < NV; v++) {
        vf four[4];
        gather4(from + v * W, k, four);
        UNROLL for (int c = 0; c < 4; c++) lanes[(size_t)(k + c) * NV + v] = four[c];
      }
    for (float* to = (float*)lanes; k < K; k++) for (int b = 0; b < L; b++) to[(size_t)k * L + b] = from[b][k];
  }
  void store(const float* lanes, long t, float* rows) const {
    float* to[L];
    for (int b = 0; b < L; b++) to[b] = local.get() + (size_t)b * K;
    int k = 0;
    for (; k + 4 <= K; k += 4)
      for (int v = 0; v < NV; v++) {
        vf four[4];
        UNROLL for (int c = 0; c < 4; c++) memcpy(four + c, lanes + ((size_t)(k + c) * NV + v) * W, sizeof(vf));
        scatter4(four, to + v * W, k);
      }
    for (; k < K; k++) for (int b = 0; b < L; b++) to[b][k] = lanes[(size_t)k * L + b];
    for (int b = 0; b < used; b++) memcpy(rows + place(b, t), to[b], K * sizeof(float));
  }
};

template <class F> int guarded(F f) {
  try { f(); return 0; }
  catch (const std::bad_alloc&) { return 1; }
  catch (...) { return 2; }
}

}  // namespace

extern "C" {

// How many sequences' worth of room each tile of B sequences takes; the number of tiles.
long soma_tiles(long B, int64_t* room) {
  const Tiles tiles(B);
  for (long i = 0; i < tiles.all(); i++) tiles.run(i, [&](auto nv, long) { room[i] = decltype(nv)::value * W; });
  return tiles.all();
}

// losses [S][P][B]: nats of each sequence, added over its T bytes, at theta + sign·eps·z.
int soma_losses(int d, int D, int dE, const float* theta, const float* E, const uint8_t* windows, long B, long T, int family, uint32_t seed, uint32_t step,
                uint32_t stream, const int64_t* directions, const float* given, long P, float eps, const int32_t* signs, long S, double* losses, int threads) {
  return guarded([&] {
    const Shape s{d, D, dE};
    const Text text(windows, B, T);
    const Head head(E, dE);
    const Tiles tiles(B);
    const std::vector<uint64_t> gains = s.gains();
    const Probes probes{family, {seed, step}, stream, directions, given, gains};
    const long parts = std::min(tiles.all(), std::max(1L, 2 * threads / std::max(1L, S * P)));  // a model's tiles are dealt out when there are few models
    parallel(S * P * parts, threads, [&](long job) {
      const long part = job % parts, model = job / parts, j = model % P, sign = signs[model / P];
      Array<float> flat(s.M());
      if (sign) probes.perturb(s, theta, j, eps * sign, flat.get());
      else memcpy(flat.get(), theta, s.M() * sizeof(float));
      Model m(s);
      m.load(flat.get());
      Table table(s, text.present);
      Array<vf> space(table_space(s));
      table.fill(m, head, text, space.get());
      for (long i = part; i < tiles.all(); i += parts)
        tiles.run(i, [&](auto nv, long first) {
          Outputs out;
          out.sum = losses + model * B + first;
          forward<decltype(nv)::value>(s, m, head, table, text, nullptr, first, B, out);
        });
    });
  });
}

// total [M]: Σ_j coefficient_j z_j, added in the order of the directions.
int soma_combine(int d, int D, int dE, int family, uint32_t seed, uint32_t step, uint32_t stream, const int64_t* directions, const double* coefficients, long P, double* total, int threads) {
  return guarded([&] {
    const Shape s{d, D, dE};
    const size_t M = s.M();
    const std::vector<uint64_t> gains = s.gains();
    const long chunk = 64;  // blocks of 64 coordinates in one job
    parallel((long)((M + 64 * chunk - 1) / (64 * chunk)), threads, [&](long job) {
      for (size_t i = job * 64 * chunk; i < std::min(M, (job + 1) * 64 * (size_t)chunk); i += 64) {
        double sum[64] = {};
        for (long j = 0; j < P; j++) {
          Block b = block_of({seed, step}, family, stream, (uint32_t)(i / 64), (uint32_t)directions[j]);
          const uint64_t active = b.active | gains[i / 64];
          const double c[2] = {-coefficients[j], coefficients[j]}, on[2] = {0.0, 1.0};
          for (int k = 0; k < 64; k++) sum[k] += c[b.plus >> k & 1] * on[active >> k & 1];
        }
        memcpy(total + i, sum, std::min<size_t>(64, M - i) * sizeof(double));
      }
    });
  });
}

// Several models, each on its own list of windows: nats of every byte [pairs][T], and what the decoder reads [pairs][T][dE], where asked.
// Pairs of model e are windows order[begin[e]] … order[begin[e+1] - 1]; the nats of pair i become row place[i], or row i without places.
int soma_tokens(int d, int D, int dE, long N, const float* const* thetas, const float* const* heads, const uint8_t* windows, long n, long T, const int32_t* order,
                const int64_t* begin, const int64_t* place, float* losses, float* hidden, int threads) {
  return guarded([&] {
    const Shape s{d, D, dE};
    const Text text(windows, n, T);
    struct Part { long model, first, end; };  // tiles of a model
    std::vector<Part> parts;
    long all = 0;
    for (long e = 0; e < N; e++) all += Tiles(begin[e + 1] - begin[e]).all();
    const long most = std::max(1L, all / (8 * threads));
    for (long e = 0; e < N; e++)
      for (long i = 0, end = Tiles(begin[e + 1] - begin[e]).all(); i < end; i += most) parts.push_back({e, i, std::min(end, i + most)});
    std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.end - a.first > b.end - b.first; });  // so that threads end together
    parallel((long)parts.size(), threads, [&](long job) {
      const Part& p = parts[job];
      const long last = begin[p.model + 1];
      const Head head(heads[p.model], dE);
      Model m(s);
      m.load(thetas[p.model]);
      Table table(s, text.present);
      Array<vf> space(table_space(s));
      table.fill(m, head, text, space.get());
      Array<float> rows(losses && place ? WIDEST * W * T : 0);
      const Tiles tiles(last - begin[p.model]);
      for (long i = p.first; i < p.end; i++)
        tiles.run(i, [&](auto nv, long first) {
          first += begin[p.model];
          Outputs out;
          if (losses) out.token = place ? rows.get() : losses + first * T;
          if (hidden) out.hidden = hidden + (size_t)first * T * dE;
          forward<decltype(nv)::value>(s, m, head, table, text, order, first, last, out);
          if (losses && place)
            for (long b = 0; b < std::min<long>(decltype(nv)::value * W, last - first); b++) memcpy(losses + place[first + b] * T, rows.get() + b * T, T * sizeof(float));
        });
    });
  });
}

// ---- Activation noise: a clean pass, replays with noise at one site, and the noise weighted by rewards -------------------------------------------------

// losses [B][T] of the clean pass; fields [D · FIELDS + 2] are pointers, null where nothing is to be kept.
int soma_clean(int d, int D, int dE, const float* theta, const float* E, const uint8_t* windows, long B, long T, float* const* fields, float* losses, int threads) {
  return guarded([&] {
    const Ready r(Shape{d, D, dE}, theta, E, windows, B, T);
    r.tiles.each(threads, 1, [&](auto nv, long first, long) {
      constexpr int NV = decltype(nv)::value;
      Forward<NV> pass(r.s);
      pass.clean = fields;
      Outputs out;
      out.token = losses + first * T;
      pass.run(r.model, r.head, &r.table, Tile<NV>(r.text, nullptr, first, B), out);
    });
  });
}

// losses [n][B][T] with sigma · noise at the site, each pass replayed from there.
int soma_site_losses(int d, int D, int dE, const float* theta, const float* E, const uint8_t* windows, long B, long T, float* const* fields, int number, int family,
                     uint32_t seed, uint32_t step, uint32_t stream, const int32_t* draws, long n, float sigma, float* losses, int threads) {
  return guarded([&] {
    const Ready r(Shape{d, D, dE}, theta, E, windows, B, T);
    const Site site(r.s, number);
    r.tiles.each(threads, n, [&](auto nv, long first, long j) {
      constexpr int NV = decltype(nv)::value;
      Forward<NV> pass(r.s);
      Noise<NV> noise({{seed, step}, stream, family}, site.width);
      pass.clean = fields, pass.site = &site, pass.noise = &noise, pass.site_number = number, pass.draw = draws[j], pass.sigma = sigma;
      Outputs out;
      out.token = losses + (j * B + first) * T;
      pass.run(r.model, r.head, &r.table, Tile<NV>(r.text, nullptr, first, B), out);
    });
  });
}

// total, laid out as a field [T][width][lanes] a tile: Σ_j rewards[j][b][t] · noise_j, the noise drawn again; added to what is there, or not.
int soma_site_sum(int d, int D, int dE, long B, long T, int number, int family, uint32_t seed, uint32_t step, uint32_t stream, const int32_t* draws, long n,
                  const float* rewards, int add, float* total, int threads) {
  return guarded([&] {
    const Site site(Shape{d, D, dE}, number);
    Tiles(B).each(threads, 1, [&](auto nv, long first, long) {
      constexpr int NV = decltype(nv)::value;
      Noise<NV> noise({{seed, step}, stream, family}, site.width);
      for (long t = 0; t < T; t++) {
        float* at = total + ((size_t)first * T + t * NV * W) * site.width;
        for (long j = 0; j < n; j++) {
          float reward[NV * W] = {};
          for (long b = first; b < std::min(B, first + NV * W); b++) reward[b - first] = rewards[(j * B + b) * T + t];
          vf amount[NV];
          memcpy(amount, reward, sizeof amount);
          noise.draw(number, draws[j], t, first);
          for (int k = 0; k < site.width; k++)
            for (int v = 0; v < NV; v++) {
              float* to = at + ((size_t)k * NV + v) * W;
              put(to, (add || j ? get(to) : vf{}) + noise.at(k, v, amount[v]));
            }
        }
      }
    });
  });
}

// dots [n][B][T]: ⟨v, noise_j⟩ at the site, v a field, the noise drawn again.
int soma_site_dot(int d, int D, int dE, long B, long T, int number, int family, uint32_t seed, uint32_t step, uint32_t stream, const int32_t* draws, long n,
                  const float* v, float* dots, int threads) {
  return guarded([&] {
    const Site site(Shape{d, D, dE}, number);
    Tiles(B).each(threads, n, [&](auto nv, long first, long j) {
      constexpr int NV = decltype(nv)::value;
      const Place<NV> at(first, B, T);
      Noise<NV> noise({{seed, step}, stream, family}, site.width);
      for (long t = 0; t < T; t++) {
        const float* from = at.at(v, site.width, t);
        noise.draw(number, draws[j], t, first);
        vf sum[NV] = {};
        for (int k = 0; k < site.width; k++) for (int i = 0; i < NV; i++) sum[i] += noise.at(k, i, get(from + ((size_t)k * NV + i) * W));
        float found[NV * W];
        memcpy(found, sum, sizeof found);
        for (int b = 0; b < at.used; b++) dots[(j * B + first + b) * T + t] = found[b];
      }
    });
  });
}

// rewards [n][B][T] for soma_site_sum: Σ_{u≥t} γ^{u−t} of each draw's loss changes, less what the dots with a guess (null: none) tell of them, over n·sigma.
// A change is a loss less the clean one, less the other draws' mean, or half the difference to the opposite draw's (down).
// power [2]: Σ of the credited changes' squares, and of what the guess leaves.
int soma_rewards(long B, long T, long n, const float* clean, const float* up, const float* down, int loo, double sigma, double gamma, const float* dots, float* rewards, double* power) {
  return guarded([&] {
    std::vector<double> base(clean, clean + B * T);
    if (loo) std::fill(base.begin(), base.end(), 0.0);
    if (loo) for (long j = 0; j < n; j++) for (long i = 0; i < B * T; i++) base[i] += up[j * B * T + i] / (double)n;
    const double scale = loo ? n / (n - 1.0) : 1.0;
    power[0] = power[1] = 0;
    for (long row = 0; row < n * B; row++) {
      double change = 0, told = 0;
      for (long t = T - 1; t >= 0; t--) {
        const size_t i = row * T + t;
        change = gamma * change + (down ? ((double)up[i] - down[i]) / 2 : (up[i] - base[i % (B * T)]) * scale);
        told = gamma * told + (dots ? sigma * dots[i] : 0.0);
        const double left = change - told;
        power[0] += change * change, power[1] += left * left;
        rewards[i] = (float)(left / (n * sigma));
      }
    }
  });
}

// A site's estimate in the place of a guess, or without one (known = 0) in found: replays, rewards, and the noise weighted by them. power as above; a guess
// that adds as much as there was, or is not finite, is left out.
int soma_site_gradient(int d, int D, int dE, const float* theta, const float* E, const uint8_t* windows, long B, long T, float* const* fields, const float* clean, int number, int family,
                       uint32_t seed, uint32_t step, uint32_t stream, const int32_t* draws, long n, float sigma, double gamma, int opposite, int loo, int known, float* found, double* power, int threads) {
  int code = 0;
  return std::max(code, guarded([&] {
    const size_t numbers = n * B * T;
    std::vector<float> up(numbers), down(opposite ? numbers : 0), dots(known ? numbers : 0), rewards(numbers);
    auto replay = [&](float s, float* to) { code |= soma_site_losses(d, D, dE, theta, E, windows, B, T, fields, number, family, seed, step, stream, draws, n, s, to, threads); };
    auto reward = [&](bool told) { code |= soma_rewards(B, T, n, clean, up.data(), opposite ? down.data() : nullptr, loo, sigma, gamma, told ? dots.data() : nullptr, rewards.data(), power); };
    replay(sigma, up.data());
    if (opposite) replay(-sigma, down.data());
    if (known) code |= soma_site_dot(d, D, dE, B, T, number, family, seed, step, stream, draws, n, found, dots.data(), threads);
    reward(known);
    if (known && power[0] > 0 && !(power[1] < 2 * power[0])) {
      const double left = power[1];
      known = 0, reward(false), power[1] = left;
    }
    code |= soma_site_sum(d, D, dE, B, T, number, family, seed, step, stream, draws, n, rewards.data(), known, found, threads);
  }));
}

// rows [B][T][width] of a field, which is laid out by tiles; or back, into the field.
int soma_unpack(long B, long T, int width, float* field, int back, float* rows, int threads) {
  return guarded([&] {
    Tiles(B).each(threads, 1, [&](auto nv, long first, long) {
      constexpr int NV = decltype(nv)::value;
      const Rows<NV> to(first, B, T, width);
      const Place<NV> at(first, B, T);
      Array<vf> lanes((size_t)width * NV);
      for (long t = 0; t < T; t++)
        if (back) to.load(rows, t, lanes.get()), memcpy(at.at(field, width, t), lanes.get(), (size_t)width * NV * sizeof(vf));
        else to.store(at.at(field, width, t), t, rows);
    });
  });
}

// The steps of lanes.h on all tiles.

int soma_slope(long B, long T, int width, const float* up, float* slope, int threads) {
  return guarded([&] {
    Tiles(B).each(threads, 1, [&](auto nv, long first, long) {
      const Place<decltype(nv)::value> at(first, B, T);
      for (size_t i = 0; i < (size_t)T * at.L * width; i += W) put(at.at(slope, width, 0) + i, gelu_slope(get(at.at(up, width, 0) + i)));
    });
  });
}

int soma_cell_trace(int d, long B, long T, const float* gates, const float* cell, const float* dh, int trace, float* out, int threads) {
  return guarded([&] { Tiles(B).each(threads, 1, [&](auto nv, long first, long) { cell_trace(Place<decltype(nv)::value>(first, B, T), d, gates, cell, dh, trace, out); }); });
}

int soma_through(long B, long T, int O, int I, const float* w, const float* x, const float* scale, float* y, int threads) {
  return guarded([&] {
    Array<float> packed(packed_size(O, I));
    pack(w, O, I, packed.get());
    Tiles(B).each(threads, 1, [&](auto nv, long first, long) { through(Place<decltype(nv)::value>(first, B, T), packed.get(), O, I, x, scale, y); });
  });
}

// mean [O][I] over all bytes, and with scale that of its squares [O].
int soma_product(long B, long T, int O, int I, const float* g, const float* scale, const float* x, int lag, double* mean, double* squares, int threads) {
  return guarded([&] {
    const Tiles tiles(B);
    parallel((O + ROWS - 1) / ROWS, threads, [&](long job) {
      const int row = job * ROWS;
      Array<vd> sums((size_t)ROWS * I + ROWS);
      vd* square = sums.get() + (size_t)ROWS * I;
      for (long i = 0; i < tiles.all(); i++)
        tiles.run(i, [&](auto nv, long first) { add_products(Place<decltype(nv)::value>(first, B, T), row, O, I, g, scale, x, lag, sums.get(), square); });
      for (int r = 0; r < std::min(ROWS, O - row); r++) {
        for (int i = 0; i < I; i++) mean[(size_t)(row + r) * I + i] = across(sums.get()[(size_t)r * I + i]) / (B * T);
        if (scale) squares[row + r] = across(square[r]) / (B * T);
      }
    });
  });
}

int soma_residual(int dE, const float* E, const uint8_t* windows, long B, long T, const float* read, float* out, int threads) {
  return guarded([&] {
    const Head head(E, dE);
    Tiles(B).each(threads, 1, [&](auto nv, long first, long) { residual(Place<decltype(nv)::value>(first, B, T), head, dE, windows, read, out); });
  });
}

// grad [d]: the gain's, a mean over all bytes.
int soma_norm_back(int d, const float* gain, long B, long T, const float* x, float* g, double* grad, int threads) {
  return guarded([&] {
    const Tiles tiles(B);
    std::vector<double> parts(tiles.all() * d);
    parallel(tiles.all(), threads, [&](long i) { tiles.run(i, [&](auto nv, long first) { norm_back(Place<decltype(nv)::value>(first, B, T), d, gain, x, g, &parts[i * d]); }); });
    for (int k = 0; k < d; k++) { grad[k] = 0; for (long i = 0; i < tiles.all(); i++) grad[k] += parts[i * d + k] / (B * T); }
  });
}

// ---- The EGGROLL control ------------------------------------------------------------------------------------------------------------------------------

// losses [S][P][B]: nats of each sequence, added over its T bytes, of member j at theta + sign · eps · (its rank-one noise); drawn [P][numbers] are the
// members' factors. A lane is a pair (member, sequence); pairs run over sequences first.
int soma_gru_losses(int d, int D, const float* theta, const uint8_t* windows, long B, long T, const float* before, const float* drawn, long P, float eps,
                    const int32_t* signs, long S, double* losses, int threads) {
  return guarded([&] {
    const GruModel m(GruShape{d, D}, theta);
    const long pairs = P * B;
    Tiles(pairs).each(threads, S, [&](auto nv, long first, long sign) {
      constexpr int NV = decltype(nv)::value;
      auto pair = [&](int b) { return std::min(first + b, pairs - 1); };
      Factors<NV> own(m.s.numbers(), drawn, [&](int b) { return pair(b) / B; });
      gru_tile<NV>(m, own, eps * signs[sign], windows, B, T, before, (int)std::min<long>(NV * W, pairs - first), [&](int b) { return pair(b) % B; }, losses + sign * pairs + first);
    });
  });
}

}  // extern "C"
