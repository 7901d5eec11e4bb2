// Shapes, packed weights, and the layers of a recurrent expert over a tile of sequences: one to four vectors of them, a lane each.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>
#include "random.h"

constexpr int V = 256;
constexpr float NORM_EPS = 1e-5f;

INLINE int up_to(int n, int m) { return (n + m - 1) / m * m; }

struct Free { void operator()(void* p) const { free(p); } };
template <class T> struct Array {  // aligned; zero until written
  std::unique_ptr<T, Free> p;
  Array() {}
  explicit Array(size_t n) : p((T*)aligned_alloc(64, (n * sizeof(T) + 127) / 64 * 64)) {
    if (!p) throw std::bad_alloc();
    memset((void*)p.get(), 0, n * sizeof(T));
  }
  T* get() const { return p.get(); }
};

// ---- Shapes and packed weights ------------------------------------------------------------------------------------------------------------------
// A matrix [out, in] is stored in groups of GO outputs, [group][in][GO], the last group filled up with zeros. LSTM gates of a unit are adjacent:
// packed output 4·unit + gate is row gate·d + unit of the paper's [4d, d].

struct Shape {
  int d, D, dE;
  bool projected() const { return d != dE; }
  size_t block() const { return 16 * (size_t)d * d + 2 * d; }
  size_t M() const { return D * block() + d + (projected() ? 2 * (size_t)d * dE : 0); }
  bool gain(size_t i) const {  // is flat coordinate i a normalisation gain?
    if (projected()) { if (i < (size_t)d * dE) return false; i -= (size_t)d * dE; }
    if (i >= D * block()) return i < D * block() + d;
    size_t r = i % block(), half = d + 8 * (size_t)d * d;
    return r < (size_t)d || (r >= half && r < half + d);
  }
  std::vector<uint64_t> gains() const {  // the same as bits, 64 coordinates a word
    std::vector<uint64_t> words(M() / 64 + 1);
    for (size_t i = 0; i < M(); i++) words[i / 64] |= (uint64_t)gain(i) << (i % 64);
    return words;
  }
};

int groups(int outputs) { return (outputs + GO - 1) / GO; }
size_t packed_size(int outputs, int inputs) { return (size_t)groups(outputs) * GO * inputs; }

template <class Row> void pack(const float* w, int outputs, int inputs, float* to, Row row, float scale = 1.0f) {
  Array<float> zeros(inputs);
  std::fill(zeros.get(), zeros.get() + inputs, 0.0f);
  for (int g = 0; g < groups(outputs); g++) {
    const float* from[GO];
    for (int o = 0; o < GO; o++) from[o] = g * GO + o < outputs ? w + (size_t)row(g * GO + o) * inputs : zeros.get();
    for (int k = 0; k < inputs; k++, to += GO)
      for (int o = 0; o < GO; o++) to[o] = from[o][k] * scale;
  }
}
void pack(const float* w, int outputs, int inputs, float* to, float scale = 1.0f) { pack(w, outputs, inputs, to, [](int o) { return o; }, scale); }

struct Layers { const float *gain1, *w_ih, *w_hh, *gain2, *w_up, *w_down; };
bool all_finite(const float* x, size_t n) {
  float spread = 0;
  for (size_t i = 0; i < n; i++) spread += x[i] * 0.0f;
  return spread == 0;
}

struct Model {  // one model's weights, packed
  Shape s;
  bool finite = true;
  Array<float> memory;
  std::vector<Layers> blocks;
  const float *gain, *proj_in = nullptr, *proj_out = nullptr;

  explicit Model(Shape s) : s(s), memory(s.D * (2 * s.d + 3 * packed_size(4 * s.d, s.d) + packed_size(s.d, 4 * s.d)) + s.d + packed_size(s.d, s.dE) + packed_size(s.dE, s.d)) {}

  void load(const float* flat) {
    finite = all_finite(flat, s.M());
    float* to = memory.get();
    const int d = s.d;
    auto vector = [&] { float* at = to; memcpy(at, flat, d * sizeof(float)); flat += d, to += d; return at; };
    auto gates = [&] { float* at = to; pack(flat, 4 * d, d, at, [d](int o) { return o % 4 * d + o / 4; }); flat += 4 * d * d, to += packed_size(4 * d, d); return at; };
    auto matrix = [&](int out, int in) { float* at = to; pack(flat, out, in, at); flat += (size_t)out * in, to += packed_size(out, in); return at; };
    if (s.projected()) proj_in = matrix(d, s.dE);
    blocks.resize(s.D);
    for (Layers& b : blocks) {
      b.gain1 = vector(), b.w_ih = gates(), b.w_hh = gates();
      b.gain2 = vector(), b.w_up = matrix(4 * d, d), b.w_down = matrix(d, 4 * d);
    }
    gain = vector();
    if (s.projected()) proj_out = matrix(s.dE, d);
  }
};

struct Head {  // the tied embedding and decoder: rows as they are, and packed in units of log 2
  const float* E;
  int stride;              // of a row, filled up with zeros
  bool finite;
  Array<float> rows, packed;
  Head(const float* E, int dE) : E(E), stride(up_to(dE, 4)), finite(all_finite(E, (size_t)V * dE)), rows((size_t)V * stride), packed(packed_size(V, dE)) {
    for (int y = 0; y < V; y++) memcpy(rows.get() + (size_t)y * stride, E + (size_t)y * dE, dE * sizeof(float));
    pack(E, V, dE, packed.get(), LOG2E);
  }
};

// ---- The pieces of a forward, over NV vectors of sequences ------------------------------------------------------------------------------------------

// acc[o][v] += Σ_k w[k][o] x[k][v] for G packed groups.
template <int G, int NV> INLINE void multiply_add(vf (&acc)[G * GO][NV], const float* __restrict w, int K, const vf* __restrict x) {
  const size_t group = (size_t)K * GO;
  for (int k = 0; k < K; k++, w += GO) {
    vf in[NV];
    UNROLL for (int v = 0; v < NV; v++) in[v] = x[k * NV + v];
    UNROLL for (int g = 0; g < G; g++)
      UNROLL for (int o = 0; o < GO; o++)
        UNROLL for (int v = 0; v < NV; v++) acc[g * GO + o][v] += in[v] * w[g * group + o];
  }
}

template <int N, int NV> INLINE void clear(vf (&acc)[N][NV]) {
  UNROLL for (int o = 0; o < N; o++)
    UNROLL for (int v = 0; v < NV; v++) acc[o][v] = vf{};
}

// Every output of a packed matrix: begin(first, acc) fills the accumulators, end(first, acc) takes them; as many at a time as registers hold.
template <int G, int NV, class Begin, class End> INLINE void some_outputs(const float* w, int group, int K, const vf* x, Begin begin, End end) {
  vf acc[G * GO][NV];
  begin(group * GO, acc);
  multiply_add<G, NV>(acc, w + (size_t)group * GO * K, K, x);
  end(group * GO, acc);
}
template <int NV, class Begin, class End> INLINE void matrix(const float* w, int outputs, int K, const vf* x, Begin begin, End end) {
  constexpr int G = SUMS / (GO * NV);
  const int n = groups(outputs);
  int g = 0;
  for (; g + G <= n; g += G) some_outputs<G, NV>(w, g, K, x, begin, end);
  if (G > 1) for (; g < n; g++) some_outputs<1, NV>(w, g, K, x, begin, end);
}
struct Zero { template <class A> __attribute__((always_inline)) void operator()(int, A& acc) const { clear(acc); } };

// Gain-only layer normalisation of x [d][NV].
template <int NV> INLINE void normalise(const vf* __restrict x, const float* gain, int d, vf* __restrict y) {
  vf sum[NV], square[NV], mean[NV], scale[NV];
  UNROLL for (int v = 0; v < NV; v++) sum[v] = square[v] = vf{};
  for (int k = 0; k < d; k++)
    UNROLL for (int v = 0; v < NV; v++) sum[v] += x[k * NV + v];
  UNROLL for (int v = 0; v < NV; v++) mean[v] = sum[v] * (1.0f / d);
  for (int k = 0; k < d; k++)
    UNROLL for (int v = 0; v < NV; v++) { vf r = x[k * NV + v] - mean[v]; square[v] += r * r; }
  UNROLL for (int v = 0; v < NV; v++) scale[v] = inverse_root(square[v] * (1.0f / d) + NORM_EPS);
  for (int k = 0; k < d; k++)
    UNROLL for (int v = 0; v < NV; v++) y[k * NV + v] = (x[k * NV + v] - mean[v]) * (scale[v] * gain[k]);
}

// One LSTM cell: the new h; c moves on. Two divisions for what is written with five.
INLINE vf cell(vf i, vf f, vf g, vf o, vf& c) {
  vf ei = 1.0f + exp_minus(i), ef = 1.0f + exp_minus(f), xg = exp_minus(g, 2.0f), eg = 1.0f + xg, ie = ei * eg;
  c = ((1.0f - xg) * ef + c * ie) * reciprocal(ie * ef);
  vf xc = exp_minus(c, 2.0f);
  return (1.0f - xc) * reciprocal((1.0f + exp_minus(o)) * (1.0f + xc));
}

// ---- Loss --------------------------------------------------------------------------------------------------------------------------------------------

template <int NV, class A> INLINE void add_powers(A& acc, vf (&sum)[NV]) {  // sum += Σ 2^z, by the group, so that a tile's width changes no bit
  constexpr int N = sizeof acc / sizeof acc[0];
  UNROLL for (int first = 0; first < N; first += GO)
    UNROLL for (int v = 0; v < NV; v++) {
      vf part = vf{};
      UNROLL for (int o = first; o < first + GO; o++) part += exp2_of(within(acc[o][v], 115.0f), 1.0f);
      sum[v] += part;
    }
}

// Σ 2^(z - shift) over the 256 scores z of each sequence, in units of log 2; shift is 0 unless the largest score is far from it.
// scores(take) hands every group of scores to take(first, acc).
template <int NV, class Scores> INLINE void partition(Scores scores, vf (&sum)[NV], vf (&shift)[NV]) {
  for (int v = 0; v < NV; v++) sum[v] = shift[v] = vf{};
  scores([&](int, auto& acc) INLINED { add_powers<NV>(acc, sum); });
  bool far = false;
  for (int v = 0; v < NV; v++) far |= any(~((vi)(sum[v] < 0x1p100f) & (vi)(sum[v] > 0x1p-80f)));
  if (!far) return;
  for (int v = 0; v < NV; v++) sum[v] = vf{}, shift[v] = splat(-3e38f);
  scores([&](int, auto& acc) { for (auto& z : acc) for (int v = 0; v < NV; v++) shift[v] = larger(z[v], shift[v]); });
  scores([&](int, auto& acc) {
    for (auto& z : acc) for (int v = 0; v < NV; v++) z[v] -= shift[v];
    add_powers<NV>(acc, sum);
  });
}

// Nats of each sequence, added over its bytes. The product of all sums is kept as a mantissa and an exponent: one logarithm a sequence.
template <int NV> struct Nats {
  static constexpr int L = NV * W;
  vf mantissa[NV];
  vi exponent[NV], broken[NV];
  double rest[L] = {};  // shifts less own scores, in units of log 2
  Nats() { for (int v = 0; v < NV; v++) mantissa[v] = splat(1.0f), exponent[v] = broken[v] = vi{}; }

  void add(const vf (&sum)[NV], const vf (&shift)[NV], const vf (&score)[NV]) {
    float minus[L], own[L];
    memcpy(minus, shift, sizeof minus), memcpy(own, score, sizeof own);
    for (int b = 0; b < L; b++) rest[b] += (double)minus[b] - own[b];
    for (int v = 0; v < NV; v++) {
      broken[v] |= ~((vi)(sum[v] > 0.0f) & (vi)(sum[v] < 3e38f));
      vi bits = (vi)(mantissa[v] * sum[v]);
      exponent[v] += (bits >> 23) - 127;
      mantissa[v] = (vf)((bits & 0x7FFFFF) | 0x3F800000);
    }
  }
  double of(int b) const {
    float scale[L];
    int32_t power[L], bad[L];
    memcpy(scale, mantissa, sizeof scale), memcpy(power, exponent, sizeof power), memcpy(bad, broken, sizeof bad);
    return bad[b] ? NAN : LN2 * (std::log2((double)scale[b]) + power[b] + rest[b]);
  }
};

// ---- What depends on the byte alone -----------------------------------------------------------------------------------------------------------------

// The bytes that occur in a batch, numbered; sequences side by side so that one byte of every lane is one read.
struct Text {
  long B, T;
  int present = 0;
  uint8_t number[V], byte[V];
  const uint8_t* windows;  // [B][T+1]
  Text(const uint8_t* windows, long B, long T) : B(B), T(T), windows(windows) {
    bool seen[V] = {};
    for (long b = 0; b < B; b++)
      for (long t = 0; t < T; t++) seen[windows[b * (T + 1) + t]] = true;
    for (int y = 0; y < V; y++) if (seen[y]) byte[present] = y, number[y] = present++;
  }
};

// Rows for every byte that occurs: the residual stream's first value, and the first layer's input projection.
struct Table {
  int wide, gates;      // floats of a row
  Array<float> first, projection;
  Table(Shape s, int rows) : wide(up_to(s.d, GO)), gates(groups(4 * s.d) * GO), first((size_t)up_to(rows, W) * wide), projection((size_t)up_to(rows, W) * gates) {}

  void fill(const Model& m, const Head& head, const Text& text, vf* space) {
    const Shape& s = m.s;
    vf *e = space, *x = e + s.dE, *n = x + wide;
    for (int r = 0; r < text.present; r += W) {
      auto row = [&](int i) { return head.E + (size_t)text.byte[std::min(r + i, text.present - 1)] * s.dE; };
      for (int k = 0; k < s.dE; k++) for (int i = 0; i < W; i++) ((float*)(e + k))[i] = row(i)[k];
      auto keep = [&](int o, auto& acc) INLINED { memcpy(x + o, acc, sizeof acc); };
      if (s.projected()) matrix<1>(m.proj_in, s.d, s.dE, e, Zero(), keep);
      else for (int k = 0; k < wide; k++) x[k] = k < s.d ? e[k] : vf{};
      store(x, wide, first.get() + (size_t)r * wide, wide);
      normalise<1>(x, m.blocks[0].gain1, s.d, n);
      auto out = [&](int o, auto& acc) INLINED { store(&acc[0][0], sizeof acc / sizeof acc[0], projection.get() + (size_t)r * gates + o, gates); };
      matrix<1>(m.blocks[0].w_ih, 4 * s.d, s.d, n, Zero(), out);
    }
  }
  static void store(const vf* x, int n, float* to, int stride) {  // lane i becomes row i
    for (int k = 0; k < n; k++) { float f[W]; memcpy(f, x + k, sizeof f); for (int i = 0; i < W; i++) to[(size_t)i * stride + k] = f[i]; }
  }
};
size_t table_space(Shape s) { return s.dE + 2 * (size_t)up_to(s.d, GO); }

