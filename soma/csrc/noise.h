// Activation noise. A site is a layer's output; in each block: the gates before their squashing, h, the MLP's hidden layer before its GELU, and the
// MLP's output. Numbered behind all of these: the embedding's rows, the input projection's output, the last norm's, what the decoder reads; then each
// block's two norms. Unit k at byte t of sequence b in one draw: counter (block of k, t, b, stream + 2^8·site + 2^16·draw).
#pragma once
#include "model.h"

enum SiteKind { GATES, HIDDEN, UP, DOWN, EMBED, INPUT, NORM, READ, NORM1, NORM2 };
struct Site {
  int block, kind, width;
  Site(Shape s, int number) : block(number / 4), kind(number % 4) {
    const int more = number - 4 * s.D;
    if (more >= 4) block = (more - 4) / 2, kind = NORM1 + more % 2;
    else if (more >= 0) block = more < 2 ? 0 : s.D, kind = EMBED + more;
    width = kind == GATES || kind == UP ? 4 * s.d : kind == EMBED || kind == READ ? s.dE : s.d;
  }
  int stage() const { return 2 * block + (kind == UP || kind == NORM2 ? 1 : kind == DOWN ? 2 : 0); }  // where a replay begins: 2l is block l's LSTM, 2l + 1 its MLP
  bool early() const { return block == 0 && (kind == EMBED || kind == INPUT || kind == NORM1); }      // before the first layer's input projection
};

enum NoiseFamily { SIGNS = 0, NORMAL = 1 };
struct NoiseKey { Key key; uint32_t stream; int family; };

// The noise of one byte of a tile's sequences at one site: drawn all at once, in bits that say minus (signs) or as floats (normal).
template <int NV> struct Noise {
  NoiseKey from;
  int K;
  Array<vu> drawn;   // [K/32][NV], or [K][NV]
  Noise(NoiseKey from, int K) : from(from), K(K), drawn((size_t)NV * (from.family == SIGNS ? up_to(K, 128) / 32 : up_to(K, 4))) {}

  void draw(uint32_t site, uint32_t draw, long t, long first) {
    const uint32_t word3 = from.stream | site << 8 | draw << 16;
    const int units = from.family == SIGNS ? 128 : 4;
    for (int v = 0; v < NV; v++) {
      uint32_t numbers[W];
      for (int i = 0; i < W; i++) numbers[i] = (uint32_t)(first + v * W + i);
      vu sequence;
      memcpy(&sequence, numbers, sizeof sequence);
      for (int block = 0; block * units < K; block++) {
        Words<vu> w = philox<vu>(vu{} + (uint32_t)block, vu{} + (uint32_t)t, sequence, vu{} + word3, from.key);
        vu* to = drawn.get() + (size_t)block * 4 * NV + v;
        if (from.family == NORMAL) normals(w);
        for (int j = 0; j < 4; j++) to[j * NV] = from.family == SIGNS ? ~w.w[j] : w.w[j];
      }
    }
  }
  static void normals(Words<vu>& w) {
    vf n[4];
    normal_pair(w.w[0], w.w[1], n[0], n[2]);
    normal_pair(w.w[2], w.w[3], n[1], n[3]);
    for (int j = 0; j < 4; j++) w.w[j] = (vu)n[j];
  }
  // amount · noise of unit k in vector v
  __attribute__((always_inline)) vf at(int k, int v, vf amount) const {
    if (from.family == NORMAL) return amount * (vf)drawn.get()[(size_t)k * NV + v];
    return (vf)((vu)amount ^ ((drawn.get()[(size_t)(k / 32) * NV + v] << (31 - k % 32)) & 0x80000000u));
  }
};
