// The EGGROLL control (room 04a): every member is one base model plus rank-one factors, and A·Bᵀ is never formed. A lane is a member reading one sequence,
// so that all members share every base weight that is read: W x + scale · A (B·x), with A and B a vector of lanes each.
#pragma once
#include "model.h"

struct GruShape {
  int d, D;
  size_t numbers() const { return 2 * (size_t)V + 3 * d + (size_t)D * 22 * d; }  // of the factors of a member
};

struct GruModel {  // the base model's weights, packed; vectors and the embedding as they are
  struct Layer { const float *gain1, *w_f, *u_f, *b_f, *w_h, *u_h, *b_h, *gain2, *w_up, *w_down; };
  GruShape s;
  int stride;
  Array<float> rows, head_rows, memory;
  std::vector<Layer> layers;
  const float *gain, *head;
  double poison;

  GruModel(GruShape s, const float* flat) : s(s), stride(up_to(s.d, 4)), rows((size_t)V * stride), head_rows((size_t)V * stride),
      memory(s.D * (4 * packed_size(s.d, s.d) + packed_size(4 * s.d, s.d) + packed_size(s.d, 4 * s.d)) + packed_size(V, s.d)), layers(s.D) {
    const int d = s.d;
    poison = all_finite(flat, 2 * (size_t)V * d + d + s.D * (12 * (size_t)d * d + 4 * d)) ? 0.0 : NAN;
    float* to = memory.get();
    auto vector = [&] { const float* at = flat; flat += d; return at; };
    auto matrix = [&](int out, int in, float scale = 1.0f) { float* at = to; pack(flat, out, in, at, scale); flat += (size_t)out * in, to += packed_size(out, in); return at; };
    auto keep_rows = [&](const float* from, float* at) { for (int y = 0; y < V; y++) memcpy(at + (size_t)y * stride, from + (size_t)y * d, d * sizeof(float)); };
    keep_rows(flat, rows.get());
    flat += (size_t)V * d;
    for (Layer& l : layers) {
      l.gain1 = vector(), l.w_f = matrix(d, d), l.u_f = matrix(d, d), l.b_f = vector(), l.w_h = matrix(d, d), l.u_h = matrix(d, d), l.b_h = vector();
      l.gain2 = vector(), l.w_up = matrix(4 * d, d), l.w_down = matrix(d, 4 * d);
    }
    gain = vector();
    keep_rows(flat, head_rows.get());
    head = matrix(V, d, LOG2E);
  }
};

// A tile's factors, [numbers][lanes], read in the order in which room 03 draws them: tensor after tensor, A before B.
template <int NV> struct Factors {
  Array<vf> all;
  const vf* next;
  template <class Member> Factors(size_t numbers, const float* drawn, Member member) : all(numbers * NV) {
    float* to = (float*)all.get();
    for (int b = 0; b < NV * W; b++) {
      const float* from = drawn + member(b) * numbers;
      for (size_t i = 0; i < numbers; i++) to[i * NV * W + b] = from[i];
    }
  }
  const vf* take(int n) { const vf* at = next; next += (size_t)n * NV; return at; }
};

template <int NV> struct GruForward {
  static constexpr int L = NV * W;
  const GruModel& m;
  const int d, wide;
  float scale;  // sign · ε
  Factors<NV>& own;
  Array<vf> memory;
  vf *state, *x, *n, *f, *fs, *hid;

  GruForward(const GruModel& m, Factors<NV>& own, float scale) : m(m), d(m.s.d), wide(up_to(m.s.d, GO)), scale(scale), own(own), memory((size_t)NV * wide * (m.s.D + 8)) {
    state = memory.get(), x = state + (size_t)m.s.D * wide * NV, n = x + wide * NV, f = n + wide * NV, fs = f + wide * NV, hid = fs + wide * NV;
  }

  // scale · B·v for each lane
  void along(const vf* B, const vf* v, int K, vf (&dot)[NV]) const {
    clear_one(dot);
    for (int k = 0; k < K; k++) UNROLL for (int i = 0; i < NV; i++) dot[i] += B[k * NV + i] * v[k * NV + i];
    for (int i = 0; i < NV; i++) dot[i] *= scale;
  }
  static void clear_one(vf (&a)[NV]) { for (int i = 0; i < NV; i++) a[i] = vf{}; }
  vf at(const vf* factor, int k, int v, int limit) const { return factor[(size_t)std::min(k, limit - 1) * NV + v]; }

  void normalise_own(const float* gain, vf* to) {
    const vf* z = own.take(d);
    normalise<NV>(x, unit_gains.get(), d, to);
    for (int k = 0; k < d; k++) for (int v = 0; v < NV; v++) to[k * NV + v] *= gain[k] + scale * z[k * NV + v];
  }
  Array<float> unit_gains;

  // acc += W v + scale A (B·v) + the member's bias, for one group of outputs
  struct Linear { const float* w; const vf *A, *B; vf dot[NV]; };
  Linear linear(const float* w, int out, int in, const vf* v) {
    Linear l{w, own.take(out), own.take(in), {}};
    if (v) along(l.B, v, in, l.dot);
    return l;
  }

  void unit(const GruModel::Layer& l, vf* s) {
    normalise_own(l.gain1, n);
    Linear wf = linear(l.w_f, d, d, n), uf = linear(l.u_f, d, d, s);
    const vf* bf = own.take(d);
    Linear wh = linear(l.w_h, d, d, n), uh = linear(l.u_h, d, d, nullptr);
    const vf* bh = own.take(d);
    matrix<NV>(wf.w, d, d, n, Zero(), [&](int first, auto& acc) INLINED {
      constexpr int N = sizeof acc / sizeof acc[0];
      multiply_add<N / GO, NV>(acc, uf.w + (size_t)first * d, d, s);
      UNROLL for (int o = 0; o < N; o++)
        UNROLL for (int v = 0; v < NV; v++) {
          const int k = first + o;
          vf pre = acc[o][v] + at(wf.A, k, v, d) * wf.dot[v] + at(uf.A, k, v, d) * uf.dot[v] + (l.b_f[std::min(k, d - 1)] + scale * at(bf, k, v, d));
          f[k * NV + v] = sigmoid(pre);
          fs[k * NV + v] = f[k * NV + v] * s[k * NV + v];
        }
    });
    along(uh.B, fs, d, uh.dot);
    matrix<NV>(wh.w, d, d, n, Zero(), [&](int first, auto& acc) INLINED {
      constexpr int N = sizeof acc / sizeof acc[0];
      multiply_add<N / GO, NV>(acc, uh.w + (size_t)first * d, d, fs);
      UNROLL for (int o = 0; o < N; o++)
        UNROLL for (int v = 0; v < NV; v++) {
          const int k = first + o, i = k * NV + v;
          vf h = tanh_of(acc[o][v] + at(wh.A, k, v, d) * wh.dot[v] + at(uh.A, k, v, d) * uh.dot[v] + (l.b_h[std::min(k, d - 1)] + scale * at(bh, k, v, d)));
          s[i] += f[i] * (h - s[i]);
          x[i] += s[i];
        }
    });
  }

  void mlp(const GruModel::Layer& l) {
    normalise_own(l.gain2, n);
    Linear up = linear(l.w_up, 4 * d, d, n);
    matrix<NV>(up.w, 4 * d, d, n, Zero(), [&](int first, auto& acc) INLINED {
      constexpr int N = sizeof acc / sizeof acc[0];
      UNROLL for (int o = 0; o < N; o++)
        UNROLL for (int v = 0; v < NV; v++) hid[(first + o) * NV + v] = larger(acc[o][v] + at(up.A, first + o, v, 4 * d) * up.dot[v], vf{});
    });
    Linear down = linear(l.w_down, d, 4 * d, hid);
    matrix<NV>(down.w, d, 4 * d, hid, Zero(), [&](int first, auto& acc) INLINED {
      constexpr int N = sizeof acc / sizeof acc[0];
      UNROLL for (int o = 0; o < N; o++)
        UNROLL for (int v = 0; v < NV; v++) x[(first + o) * NV + v] += acc[o][v] + at(down.A, first + o, v, d) * down.dot[v];
    });
  }

  // Rows of a matrix that each lane's own byte picks: base row, and the lane's own factor of that row.
  void pick(const float* rows, const vf* A, const uint8_t* bytes, const float* (&row)[L], vf (&factor)[NV]) const {
    float a[L];
    for (int b = 0; b < L; b++) row[b] = rows + (size_t)bytes[b] * m.stride, a[b] = ((const float*)A)[(size_t)bytes[b] * L + b];
    memcpy(factor, a, sizeof factor);
  }

  void byte(const uint8_t* read, const uint8_t* target, Nats<NV>& nats) {
    own.next = own.all.get();
    const float* row[L];
    vf factor[NV];
    const vf *A = own.take(V), *B = own.take(d);
    pick(m.rows.get(), A, read, row, factor);
    for (int k = 0; k < d; k += 4)
      for (int v = 0; v < NV; v++) {
        vf four[4];
        gather4(row + v * W, k, four);
        for (int j = 0; j < 4 && k + j < d; j++) x[(k + j) * NV + v] = four[j] + scale * factor[v] * B[(k + j) * NV + v];
      }
    for (int l = 0; l < m.s.D; l++) {
      unit(m.layers[l], state + (size_t)l * wide * NV);
      mlp(m.layers[l]);
    }
    normalise_own(m.gain, n);
    Linear head = linear(m.head, V, d, n);
    vf base2[NV], sum[NV], shift[NV], score[NV];
    for (int v = 0; v < NV; v++) base2[v] = head.dot[v] * LOG2E;
    partition<NV>([&](auto take) INLINED {
      matrix<NV>(head.w, V, d, n, Zero(), [&](int first, auto& acc) INLINED {
        constexpr int N = sizeof acc / sizeof acc[0];
        UNROLL for (int o = 0; o < N; o++) UNROLL for (int v = 0; v < NV; v++) acc[o][v] += head.A[(first + o) * NV + v] * base2[v];
        take(first, acc);
      });
    }, sum, shift);
    pick(m.head_rows.get(), head.A, target, row, factor);
    for (int v = 0; v < NV; v++) {
      vf z = factor[v] * head.dot[v];
      for (int k = 0; k < d; k += 4) {
        vf four[4];
        gather4(row + v * W, k, four);
        for (int j = 0; j < 4 && k + j < d; j++) z += four[j] * n[(k + j) * NV + v];
      }
      score[v] = z * LOG2E;
    }
    nats.add(sum, shift, score);
  }
};

// Nats of `pairs` lanes, added over T bytes: lane i of the tile is sequence sequence(i) of windows [B][T+1], from state [D][B][d].
template <int NV, class Sequence> void gru_tile(const GruModel& m, Factors<NV>& own, float scale, const uint8_t* windows, long B, long T, const float* before, int used,
                                               Sequence sequence, double* nats_of) {
  constexpr int L = NV * W;
  GruForward<NV> pass(m, own, scale);
  pass.unit_gains = Array<float>(m.s.d);
  std::fill(pass.unit_gains.get(), pass.unit_gains.get() + m.s.d, 1.0f);
  for (int l = 0; l < m.s.D; l++)
    for (int b = 0; b < L; b++)
      for (int k = 0; k < m.s.d; k++) ((float*)(pass.state + ((size_t)l * pass.wide + k) * NV))[b] = before[((size_t)l * B + sequence(b)) * m.s.d + k];
  Nats<NV> nats;
  uint8_t read[L], target[L];
  for (long t = 0; t < T; t++) {
    for (int b = 0; b < L; b++) { const uint8_t* w = windows + sequence(b) * (T + 1) + t; read[b] = w[0], target[b] = w[1]; }
    pass.byte(read, target, nats);
  }
  for (int b = 0; b < used; b++) nats_of[b] = nats.of(b) + m.poison;
}
