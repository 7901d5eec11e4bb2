// Philox4x32-10 and what is drawn from it: signs and activity of weight probes, noise of activations. Rooms 00 and 03 say the same in torch.
#pragma once
#include "vector.h"

struct Key { uint32_t seed, step; };

template <class T> struct Words { T w[4]; };

INLINE void multiply(uint32_t a, uint32_t b, uint32_t& high, uint32_t& low) {
  uint64_t p = (uint64_t)a * b;
  high = p >> 32, low = (uint32_t)p;
}
INLINE void multiply(uint32_t a, vu b, vu& high, vu& low) {
#if defined(__AVX512F__)
  __m512i m = _mm512_set1_epi32(a), even = _mm512_mul_epu32((__m512i)b, m), odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)b, 32), m);
  low = (vu)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  high = (vu)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
#else
  vu2 p = __builtin_convertvector(b, vu2) * (uint64_t)a;
  low = __builtin_convertvector(p, vu), high = __builtin_convertvector(p >> 32, vu);
#endif
}

template <class T> INLINE Words<T> philox(T c0, T c1, T c2, T c3, Key key) {
  uint32_t k0 = key.seed, k1 = key.step;
  for (int round = 0; round < 10; round++) {
    T h0, l0, h1, l1;
    multiply(0xD2511F53u, c0, h0, l0);
    multiply(0xCD9E8D57u, c2, h1, l1);
    c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

enum Family { RADEMACHER = 0, SPARSE = 1, GIVEN = 2 };  // of weight probes; GIVEN ones are drawn by room 03

// 64 coordinates of a ±1 probe: bits that say plus, and bits that say active (all of them unless sparse).
struct Block { uint64_t plus, active; };
INLINE Block block_of(Key key, int family, uint32_t stream, uint32_t block, uint32_t direction) {
  Words<uint32_t> w = philox<uint32_t>(block, direction, 0u, stream, key);
  return {w.w[0] | (uint64_t)w.w[1] << 32, family == SPARSE ? w.w[2] | (uint64_t)w.w[3] << 32 : ~0ull};
}


// Standard normals of vector lanes, from two words each: Box–Muller.
INLINE vf log_of(vf x) {  // x a normal positive number
  vi bits = (vi)x, e = (bits - 0x3F3504F3) >> 23;  // x = 2^e · m, m in [0.707, 1.414)
  vf m = (vf)(bits - (e << 23)), s = (m - 1.0f) / (m + 1.0f), u = s * s;
  vf p = splat(0.2222220f);
  p = p * u + 0.2857142f;
  p = p * u + 0.4f;
  p = p * u + 0.66666667f;
  return __builtin_convertvector(e, vf) * 0.69314718f + (s + s + s * u * p);
}
// cos and sin of x turns, |x| <= 1/2; y = x². Minimax, error 1e-7 and below before rounding.
INLINE vf cos_turns(vf y) {
  vf p = splat(6.52961042f);
  p = p * y + -25.9683133f;
  p = p * y + 60.1678317f;
  p = p * y + -85.4501656f;
  p = p * y + 64.939119f;
  p = p * y + -19.7392045f;
  p = p * y + 0.999999989f;
  return p;
}
INLINE vf sin_turns(vf x, vf y) {
  vf p = splat(3.23849495f);
  p = p * y + -14.9001147f;
  p = p * y + 42.0260024f;
  p = p * y + -76.7030251f;
  p = p * y + 81.605132f;
  p = p * y + -41.3417004f;
  p = p * y + 6.2831853f;
  return x * p;
}
INLINE void normal_pair(vu a, vu b, vf& first, vf& second) {
  vf u = (__builtin_convertvector(a, vf) + 0.5f) * 2.3283064365386963e-10f;
  vf q = -2.0f * log_of(u < 1.0f ? u : splat(0.99999994f));
  vf x = __builtin_convertvector((vi)b, vf) * 2.3283064365386963e-10f, y = x * x;  // b read as signed: the same angle, between -1/2 and 1/2
  float root[W];
  memcpy(root, &q, sizeof root);
  for (int i = 0; i < W; i++) root[i] = std::sqrt(root[i]);
  vf r;
  memcpy(&r, root, sizeof r);
  first = r * cos_turns(y), second = r * sin_turns(x, y);
}
