// One model over every byte of one tile of sequences: the plain forward, the forward that remembers, and the replay from a perturbed site.
#pragma once
#include "noise.h"
#ifndef TABLE
#define TABLE 1  // 0: multiply out the first layer's input projection at every byte, to see what the table saves
#endif

// What a clean pass may keep, each [T][width][lanes] of a tile, tiles one after another. Fields of block l begin at l · FIELDS; two more are the model's.
enum Field { F_NORM1, F_GATES, F_CELL, F_HIDDEN, F_MIDDLE, F_NORM2, F_UP, F_ACTIVE, F_OUT, FIELDS };

template <int NV> struct Tile {  // bytes of up to NV·W sequences, side by side
  static constexpr int L = NV * W;
  long T, first;   // first: its first sequence
  int used;
  Array<uint8_t> row, target;
  Tile(const Text& text, const int32_t* order, long first, long count)
      : T(text.T), first(first), used((int)std::min<long>(L, count - first)), row(T * L), target(T * L) {
    for (int b = 0; b < L; b++) {
      long i = first + std::min(b, used - 1);
      const uint8_t* w = text.windows + (size_t)(order ? order[i] : i) * (T + 1);
      for (long t = 0; t < T; t++) row.get()[t * L + b] = text.number[w[t]], target.get()[t * L + b] = w[t + 1];
    }
  }
};

struct Outputs {  // whatever is not null, of the tile's sequences
  double* sum = nullptr;    // [sequences]: nats, added over the bytes
  float* token = nullptr;   // [sequences][T]: nats
  float* hidden = nullptr;  // [sequences][T][dE]: what the decoder reads
};

template <int NV> struct Forward {
  static constexpr int L = NV * W;
  Shape s;
  int wide, decoded;
  Array<vf> memory;
  vf *state, *cells, *x, *n, *hid, *read;
  size_t room;

  explicit Forward(Shape s) : s(s), wide(up_to(s.d, GO)), decoded(up_to(std::max(s.dE, s.d), GO)),
      memory((size_t)NV * (3 * s.D * wide + wide + decoded + groups(4 * s.d) * GO + decoded)) {
    state = memory.get(), cells = state + 2 * (size_t)s.D * wide * NV, x = cells + (size_t)s.D * wide * NV, n = x + wide * NV;
    hid = n + decoded * NV, read = hid + (size_t)groups(4 * s.d) * GO * NV;
    room = 3 * (size_t)s.D * wide * NV * sizeof(vf);
  }

  // Where a replay begins, and with what noise; or where a clean pass leaves its fields.
  float* const* clean = nullptr;  // its fields; null: not kept
  const Site* site = nullptr;
  Noise<NV>* noise = nullptr;
  uint32_t site_number = 0, draw = 0;
  float sigma = 0;

  static void keep(float* to, const vf* from, int width) { if (to) memcpy(to, from, (size_t)width * NV * sizeof(vf)); }
  static void recall(vf* to, const float* from, int width) { memcpy(to, from, (size_t)width * NV * sizeof(vf)); }
  float* clean_at(const Tile<NV>& tile, int f, long t, int width) const { return clean[f] ? clean[f] + ((size_t)tile.first * tile.T + t * L) * width : nullptr; }
  float* field(const Tile<NV>& tile, int f, long t, int width) const { return clean && !site ? clean_at(tile, f, t, width) : nullptr; }
  bool noisy(int block, int kind) const { return site && site->block == block && site->kind == kind; }
  void disturb(vf* to, const Tile<NV>& tile, long t) {  // to += sigma · the site's noise
    noise->draw(site_number, draw, t, tile.first);
    for (int k = 0; k < site->width; k++) for (int v = 0; v < NV; v++) to[k * NV + v] += noise->at(k, v, splat(sigma));
  }

  void embed(const Table& table, const uint8_t* row) {
    const float* from[L];
    for (int b = 0; b < L; b++) from[b] = table.first.get() + (size_t)row[b] * table.wide;
    for (int k = 0; k < wide; k += 4)
      for (int v = 0; v < NV; v++) {
        vf four[4];
        gather4(from + v * W, k, four);
        UNROLL for (int j = 0; j < 4; j++) x[(k + j) * NV + v] = four[j];
      }
  }

  // Noise on what the first block is given: there, or before the input projection, which passes it on.
  void disturb_input(const Model& m, const Tile<NV>& tile, long t) {
    if (noisy(0, INPUT) || noisy(0, EMBED) && !s.projected()) return disturb(x, tile, t);
    if (!noisy(0, EMBED)) return;
    std::fill(read, read + s.dE * NV, vf{});
    disturb(read, tile, t);
    matrix<NV>(m.proj_in, s.d, s.dE, read, Zero(), [&](int first, auto& acc) INLINED {
      constexpr int N = sizeof acc / sizeof acc[0];
      UNROLL for (int o = 0; o < N; o++) UNROLL for (int v = 0; v < NV; v++) x[(first + o) * NV + v] += acc[o][v];
    });
  }

  // x += LSTM(norm(x)); h and c move on.
  void lstm(const Model& m, int l, const Table* table, const Tile<NV>& tile, long t) {
    const Layers& b = m.blocks[l];
    const int d = s.d;
    vf *h = state + (2 * l + t % 2) * (size_t)wide * NV, *next = state + (2 * l + 1 - t % 2) * (size_t)wide * NV, *c = cells + (size_t)l * wide * NV;
    const bool fresh = TABLE && l == 0 && site && site->early();  // no table knows the noise; added where the table's row would be, for the same bits without noise
    const bool read_norm = l > 0 || !TABLE || fresh || field(tile, F_NORM1, t, d);
    if (read_norm) normalise<NV>(x, b.gain1, d, n);
    if (noisy(l, NORM1)) disturb(n, tile, t);
    if (fresh) matrix<NV>(b.w_ih, 4 * d, d, n, Zero(), [&](int first, auto& acc) INLINED { memcpy(hid + (size_t)first * NV, acc, sizeof acc); });
    keep(field(tile, l * FIELDS + F_NORM1, t, d), n, d);
    const float* from[L];
    if (l == 0) for (int i = 0; i < L; i++) from[i] = table->projection.get() + (size_t)tile.row.get()[t * L + i] * table->gates;
    const bool on_gates = noisy(l, GATES), on_h = noisy(l, HIDDEN);
    if (on_gates || on_h) noise->draw(site_number, draw, t, tile.first);
    const vf amount = splat(sigma);
    float* gates = field(tile, l * FIELDS + F_GATES, t, 4 * d);

    matrix<NV>(b.w_hh, 4 * d, d, h,
      [&](int first, auto& acc) INLINED {
        constexpr int N = sizeof acc / sizeof acc[0];
        clear(acc);
        if (!TABLE || l > 0) multiply_add<N / GO, NV>(acc, b.w_ih + (size_t)first * d, d, n);
      },
      [&](int first, auto& acc) INLINED {
        constexpr int N = sizeof acc / sizeof acc[0];
        if (fresh) UNROLL for (int o = 0; o < N; o++) UNROLL for (int v = 0; v < NV; v++) acc[o][v] += hid[(size_t)(first + o) * NV + v];
        else if (TABLE && l == 0)
          UNROLL for (int v = 0; v < NV; v++)
            UNROLL for (int o = 0; o < N; o += 4) {
              vf four[4];
              gather4(from + v * W, first + o, four);
              UNROLL for (int j = 0; j < 4; j++) acc[o + j][v] += four[j];
            }
        UNROLL for (int o = 0; o < N; o++) {
          const int row = o % 4 * d + std::min((first + o) / 4, d - 1);  // of the paper's [4d]
          if (on_gates) UNROLL for (int v = 0; v < NV; v++) acc[o][v] += noise->at(row, v, amount);
          if (gates && (first + o) / 4 < d) memcpy(gates + (size_t)row * L, acc[o], sizeof acc[o]);
        }
        UNROLL for (int u = 0; u < N / 4; u++)
          UNROLL for (int v = 0; v < NV; v++) {
            const int unit = first / 4 + u, at = unit * NV + v;
            vf hv = cell(acc[4 * u][v], acc[4 * u + 1][v], acc[4 * u + 2][v], acc[4 * u + 3][v], c[at]);
            if (on_h && unit < d) hv += noise->at(unit, v, amount);
            next[at] = hv;
            x[at] += hv;
          }
      });
    keep(field(tile, l * FIELDS + F_CELL, t, d), c, d);
    keep(field(tile, l * FIELDS + F_HIDDEN, t, d), next, d);
    keep(field(tile, l * FIELDS + F_MIDDLE, t, d), x, d);
  }

  // x += W_down · gelu(W_up · norm(x))
  void mlp(const Model& m, int l, const Tile<NV>& tile, long t) {
    const Layers& b = m.blocks[l];
    const int d = s.d;
    normalise<NV>(x, b.gain2, d, n);
    if (noisy(l, NORM2)) disturb(n, tile, t);
    keep(field(tile, l * FIELDS + F_NORM2, t, d), n, d);
    const bool on_up = noisy(l, UP);
    if (on_up) noise->draw(site_number, draw, t, tile.first);
    const vf amount = splat(sigma);
    float* up = field(tile, l * FIELDS + F_UP, t, 4 * d);
    matrix<NV>(b.w_up, 4 * d, d, n, Zero(), [&](int first, auto& acc) INLINED {
      constexpr int N = sizeof acc / sizeof acc[0];
      if (on_up) UNROLL for (int o = 0; o < N; o++) { int k = std::min(first + o, 4 * d - 1); UNROLL for (int v = 0; v < NV; v++) acc[o][v] += noise->at(k, v, amount); }
      UNROLL for (int o = 0; o < N; o++) {
        if (up && first + o < 4 * d) memcpy(up + (size_t)(first + o) * L, acc[o], sizeof acc[o]);
        UNROLL for (int v = 0; v < NV; v++) hid[(first + o) * NV + v] = gelu(acc[o][v]);
      }
    });
    keep(field(tile, l * FIELDS + F_ACTIVE, t, 4 * d), hid, 4 * d);
    matrix<NV>(b.w_down, d, 4 * d, hid,
      Zero(), [&](int first, auto& acc) INLINED {
        constexpr int N = sizeof acc / sizeof acc[0];
        UNROLL for (int o = 0; o < N; o++) UNROLL for (int v = 0; v < NV; v++) x[(first + o) * NV + v] += acc[o][v];
      });
    keep(field(tile, l * FIELDS + F_OUT, t, d), x, d);
  }

  // The score of each sequence's own next byte, in units of log 2.
  void own_score(const Head& head, const uint8_t* target, vf (&score)[NV]) {
    const float* from[L];
    for (int b = 0; b < L; b++) from[b] = head.rows.get() + (size_t)target[b] * head.stride;
    for (int v = 0; v < NV; v++) {
      vf z = vf{};
      for (int k = 0; k < head.stride; k += 4) {
        vf four[4];
        gather4(from + v * W, k, four);
        UNROLL for (int j = 0; j < 4; j++) z += four[j] * read[(k + j) * NV + v];
      }
      score[v] = z * LOG2E;
    }
  }

  void run(const Model& m, const Head& head, const Table* table, const Tile<NV>& tile, const Outputs& out) {
    memset((void*)state, 0, room);
    const int start = site ? site->stage() : 0, last = s.D * FIELDS;
    Nats<NV> nats;
    const double poison = m.finite && head.finite ? 0.0 : NAN;
    for (long t = 0; t < tile.T; t++) {
      if (start == 0) embed(*table, tile.row.get() + t * L), disturb_input(m, tile, t);
      else begin(tile, start, t);
      for (int l = 0; l < s.D; l++) {
        if (start <= 2 * l) lstm(m, l, table, tile, t);
        if (start <= 2 * l + 1) mlp(m, l, tile, t);
      }
      normalise<NV>(x, m.gain, s.d, s.projected() ? n : read);
      if (noisy(s.D, NORM)) disturb(s.projected() ? n : read, tile, t);
      keep(field(tile, last, t, s.d), s.projected() ? n : read, s.d);
      if (s.projected()) matrix<NV>(m.proj_out, s.dE, s.d, n, Zero(), [&](int first, auto& acc) INLINED { memcpy(read + (size_t)first * NV, acc, sizeof acc); });
      if (noisy(s.D, READ)) disturb(read, tile, t);
      keep(field(tile, last + 1, t, s.dE), read, s.dE);
      if (out.hidden) show(out.hidden, tile, t);
      if (!out.sum && !out.token) continue;
      vf sum[NV], shift[NV], score[NV];
      partition<NV>([&](auto take) INLINED { matrix<NV>(head.packed.get(), V, s.dE, read, Zero(), take); }, sum, shift);
      own_score(head, tile.target.get() + t * L, score);
      if (out.token) {
        float total[L], minus[L], own[L];
        memcpy(total, sum, sizeof total), memcpy(minus, shift, sizeof minus), memcpy(own, score, sizeof own);
        for (int b = 0; b < tile.used; b++) out.token[(size_t)b * tile.T + t] = (float)(LN2 * (std::log2((double)total[b]) + minus[b] - own[b]) + poison);
      }
      if (out.sum) nats.add(sum, shift, score);
    }
    if (out.sum) for (int b = 0; b < tile.used; b++) out.sum[b] = nats.of(b) + poison;
  }

  // A replay's residual stream at byte t: what the clean pass had there, and the noise of an MLP's output.
  void begin(const Tile<NV>& tile, int start, long t) {
    const int l = (start - 1) / 2;
    recall(x, clean_at(tile, l * FIELDS + (start % 2 ? F_MIDDLE : F_OUT), t, s.d), s.d);
    if (noisy(l, DOWN)) disturb(x, tile, t);
  }

  void show(float* hidden, const Tile<NV>& tile, long t) const {
    for (int k = 0; k < s.dE; k++) {
      float lane[L];
      memcpy(lane, read + k * NV, sizeof lane);
      for (int b = 0; b < tile.used; b++) hidden[((size_t)b * tile.T + t) * s.dE + k] = lane[b];
    }
  }
};
