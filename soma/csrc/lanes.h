// Between the passes of an update by activation noise: small steps on fields, each [T][width][lanes] a tile, tiles one after another.
#pragma once
#include "model.h"

typedef double vd __attribute__((vector_size(8 * W)));

INLINE vf get(const float* p) { vf x; memcpy(&x, p, sizeof x); return x; }
INLINE void put(float* p, vf x) { memcpy(p, &x, sizeof x); }
INLINE vd wide(vf x) { return __builtin_convertvector(x, vd); }

// Where one tile's byte lies in a field.
template <int NV> struct Place {
  static constexpr int L = NV * W;
  long first, T;
  int used;  // lanes that carry a sequence; the others carry something, and count nowhere
  Place(long first, long B, long T) : first(first), T(T), used((int)std::min<long>(L, B - first)) {}
  template <class F> F* at(F* field, int width, long t) const { return field + ((size_t)first * T + t * L) * width; }
  void recall(vf* to, const float* field, int width, long t) const { memcpy((void*)to, at(field, width, t), (size_t)width * NV * sizeof(vf)); }
  void masks(vi (&mask)[NV]) const {
    int32_t lane[L];
    for (int b = 0; b < L; b++) lane[b] = b < used ? -1 : 0;
    memcpy(mask, lane, sizeof mask);
  }
};

// y = W x, times scale where there is one.
template <int NV> void through(const Place<NV>& at, const float* packed, int O, int I, const float* x, const float* scale, float* y) {
  Array<vf> in((size_t)I * NV);
  for (long t = 0; t < at.T; t++) {
    at.recall(in.get(), x, I, t);
    const float* by = scale ? at.at(scale, O, t) : nullptr;
    float* to = at.at(y, O, t);
    matrix<NV>(packed, O, I, in.get(), Zero(), [&](int first, auto& acc) INLINED {
      constexpr int N = sizeof acc / sizeof acc[0];
      UNROLL for (int o = 0; o < N; o++)
        UNROLL for (int v = 0; v < NV; v++)
          if (size_t i = ((size_t)(first + o) * NV + v) * W; first + o < O) put(to + i, by ? acc[o][v] * get(by + i) : acc[o][v]);
    });
  }
}

// ROWS outputs of Σ g xᵀ over a tile's bytes, g times scale where there is one; x may lag some bytes behind. Products of 64 vectors are added in float32,
// a lane each, and these blocks, always the same ones, in float64: sums [ROWS][I]; squares [ROWS] of scale.
constexpr int ROWS = SUMS / 2;
template <int NV> void add_products(const Place<NV>& at, int row, int O, int I, const float* g, const float* scale, const float* x, int lag, vd* sums, vd* squares) {
  constexpr int BLOCK = 64 / NV, L = NV * W;
  vf panel[BLOCK][NV][ROWS];
  vi mask[NV];
  at.masks(mask);
  for (long begin = 0; begin < at.T; begin += BLOCK) {
    const int bytes = (int)std::min<long>(BLOCK, at.T - begin);
    for (int t = 0; t < bytes; t++)
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < NV; v++) {
          const size_t i = ((size_t)std::min(row + r, O - 1) * NV + v) * W;
          vf a = (vf)((vi)get(at.at(g, O, begin + t) + i) & mask[v]);
          if (scale) { vf s = (vf)((vi)get(at.at(scale, O, begin + t) + i) & mask[v]); a *= s, squares[r] += wide(s * s); }
          panel[t][v][r] = a;
        }
    for (int i = 0; i < I; i += 2) {
      const size_t second = i + 1 < I ? L : 0;
      vf acc[ROWS][2];
      clear(acc);
      for (int t = (int)std::max(0L, lag - begin); t < bytes; t++) {
        const float* from = at.at(x, I, begin + t - lag) + (size_t)i * L;
        UNROLL for (int v = 0; v < NV; v++) {
          const vf a = get(from + v * W), b = get(from + second + v * W);
          UNROLL for (int r = 0; r < ROWS; r++) acc[r][0] += panel[t][v][r] * a, acc[r][1] += panel[t][v][r] * b;
        }
      }
      UNROLL for (int r = 0; r < ROWS; r++) {
        sums[(size_t)r * I + i] += wide(acc[r][0]);
        if (second) sums[(size_t)r * I + i + 1] += wide(acc[r][1]);
      }
    }
  }
}
INLINE double across(vd x) { double s = 0; for (int i = 0; i < W; i++) s += x[i]; return s; }

// The head's residual, softmax less what came: [V] from what the decoder reads.
template <int NV> void residual(const Place<NV>& at, const Head& head, int dE, const uint8_t* windows, const float* read, float* out) {
  constexpr int L = NV * W;
  Array<vf> in((size_t)dE * NV), z((size_t)V * NV);
  for (long t = 0; t < at.T; t++) {
    at.recall(in.get(), read, dE, t);
    matrix<NV>(head.packed.get(), V, dE, in.get(), Zero(), [&](int first, auto& acc) INLINED { memcpy((void*)(z.get() + (size_t)first * NV), acc, sizeof acc); });
    vf sum[NV], shift[NV];
    partition<NV>([&](auto take) INLINED {
      for (int first = 0; first < V; first += GO) { vf acc[GO][NV]; memcpy(acc, z.get() + (size_t)first * NV, sizeof acc); take(first, acc); }
    }, sum, shift);
    for (int v = 0; v < NV; v++) sum[v] = 1.0f / sum[v];
    float* to = at.at(out, V, t);
    for (int y = 0; y < V; y++)
      for (int v = 0; v < NV; v++) put(to + ((size_t)y * NV + v) * W, exp2_of(within(z.get()[y * NV + v] - shift[v], 115.0f), 1.0f) * sum[v]);
    for (int b = 0; b < at.used; b++) to[(size_t)windows[(at.first + b) * (at.T + 1) + t + 1] * L + b] -= 1.0f;
  }
}

// Back through a gain-only norm of x [d]: g becomes the gradient at x, and grad [d] that of the gain, added over the tile's bytes.
template <int NV> void norm_back(const Place<NV>& at, int d, const float* gain, const float* x, float* g, double* grad) {
  Array<vf> unit((size_t)d * NV);
  Array<vd> sums((size_t)d * NV);
  for (long t = 0; t < at.T; t++) {
    float* to = at.at(g, d, t);
    vf mean[NV] = {}, square[NV] = {}, slope[NV] = {}, along[NV] = {};
    auto each = [&](auto f) INLINED { for (int k = 0; k < d; k++) for (int v = 0; v < NV; v++) f(k, v, unit.get()[k * NV + v], to + ((size_t)k * NV + v) * W); };
    at.recall(unit.get(), x, d, t);
    each([&](int, int v, vf& x, float*) INLINED { mean[v] += x; });
    each([&](int, int v, vf& x, float*) INLINED { x -= mean[v] * (1.0f / d), square[v] += x * x; });
    for (int v = 0; v < NV; v++) square[v] = inverse_root(square[v] * (1.0f / d) + NORM_EPS);
    each([&](int k, int v, vf& x, float* p) INLINED { x *= square[v], sums.get()[k * NV + v] += wide(get(p) * x), slope[v] += gain[k] * get(p), along[v] += gain[k] * get(p) * x; });
    each([&](int k, int v, vf& x, float* p) INLINED { put(p, square[v] * (gain[k] * get(p) - slope[v] * (1.0f / d) - x * along[v] * (1.0f / d))); });
  }
  for (int k = 0; k < d; k++) {
    grad[k] = 0;
    for (int b = 0; b < at.used; b++) grad[k] += sums.get()[k * NV + b / W][b % W];
  }
}

// From a gradient dh [d] at the hidden output to the gates [4d], through the cell; without the trace, each byte for itself.
template <int NV> void cell_trace(const Place<NV>& at, int d, const float* gates, const float* cell, const float* dh, bool trace, float* out) {
  Array<vf> carry((size_t)d * NV);
  for (long t = at.T - 1; t >= 0; t--) {
    const float *g4 = at.at(gates, 4 * d, t), *c = at.at(cell, d, t), *h = at.at(dh, d, t), *earlier = at.at(cell, d, std::max(0L, t - 1));
    float* to = at.at(out, 4 * d, t);
    const size_t next = (size_t)d * NV * W;
    for (size_t i = 0; i < next; i += W) {
      const vf in = sigmoid(get(g4 + i)), forget = sigmoid(get(g4 + next + i)), g = tanh_of(get(g4 + 2 * next + i)), o = sigmoid(get(g4 + 3 * next + i)), s = tanh_of(get(c + i));
      const vf before = t ? get(earlier + i) : vf{}, dh1 = get(h + i), dc = dh1 * o * (1.0f - s * s) + carry.get()[i / W];
      put(to + i, dc * g * (in - in * in)), put(to + next + i, dc * before * (forget - forget * forget));
      put(to + 2 * next + i, dc * in * (1.0f - g * g)), put(to + 3 * next + i, dh1 * s * (o - o * o));
      if (trace) carry.get()[i / W] = forget * dc;
    }
  }
}
