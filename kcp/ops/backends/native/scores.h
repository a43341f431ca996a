// Scores inside a chunk and the inverse of its triangular system:
//     Aqk_ij = scale sum_d q_id k_jd 2^(G_id - G_jd)   j <= i          L_ij = beta_i sum_d k_id k_jd 2^(G_id - G_jd) j
//     < i Akk = (I + L)^-1
#pragma once
#include "chunk.h"

namespace KCP_ISA {

// D vectors of columns of all pairs i >= j of one diagonal block: x = k_j 2^(G_i - G_j) is a running product of
// one-token decays, hence exact zeros under any decay. Partial sums over the lanes go to c.pairs, in the order (j, i).
template <int D>
KCP_INLINE void diagonal_columns(Chunk& c, int b, int d0) {
  const long ld_q = c.q_rows.ld, ld_k = c.k_rows.ld;
  const float *q = c.q_rows.at + b * ld_q + d0, *k = c.k_rows.at + b * ld_k + d0;
  int at = 0;
  for (int j = 0; j < kBlock; j++) {
    Vec x[D], qk = (Vec){};
    KCP_UNROLL for (int v = 0; v < D; v++) {
      x[v] = load(k + j * ld_k + v * kLanes);
      qk += x[v] * load(q + j * ld_q + v * kLanes);
    }
    store(c.pairs[0][at], d0 ? load(c.pairs[0][at]) + qk : qk);
    at++;
    for (int i = j + 1; i < kBlock; i++, at++) {
      Vec kk = (Vec){};
      qk = (Vec){};
      KCP_UNROLL for (int v = 0; v < D; v++) {
        x[v] *= load(&c.e[b + i][d0 + v * kLanes]);
        qk += x[v] * load(q + i * ld_q + v * kLanes);
        kk += x[v] * load(k + i * ld_k + v * kLanes);
      }
      store(c.pairs[0][at], d0 ? load(c.pairs[0][at]) + qk : qk);
      store(c.pairs[1][at], d0 ? load(c.pairs[1][at]) + kk : kk);
    }
  }
}
KCP_NOINLINE void diagonal_scores(Chunk& c, int b, float scale, float* aqk) {
  int d = 0;
  for (; d + 8 * kLanes <= c.padded; d += 8 * kLanes) diagonal_columns<8>(c, b, d);
  if (d + 4 * kLanes <= c.padded) diagonal_columns<4>(c, b, d), d += 4 * kLanes;
  if (d + 2 * kLanes <= c.padded) diagonal_columns<2>(c, b, d);
  float qk[kPairs], kk[kPairs];
  lane_sums(c.pairs[0], kPairs, qk);
  lane_sums(c.pairs[1], kPairs, kk);
  float to_aqk[kMaxChunk], to_lower[kMaxChunk];
  for (int i = b; i < b + kBlock; i++) to_aqk[i] = c.q_factor[i] * scale, to_lower[i] = c.k_factor[i] * c.beta[i];
  int at = 0;
  for (int j = b; j < b + kBlock; j++) {
    const float factor = c.k_factor[j];
    for (int i = b; i < j; i++) aqk[i * kMaxChunk + j] = 0;
    aqk[j * kMaxChunk + j] = qk[at++] * (to_aqk[j] * factor);
    for (int i = j + 1; i < b + kBlock; i++, at++) {
      aqk[i * kMaxChunk + j] = qk[at] * (to_aqk[i] * factor);
      c.lower[i][j] = kk[at] * (to_lower[i] * factor);
    }
  }
}

// x = (I + L)^-1: forward substitution in 16x16 blocks, then twice  X21 = -X22 L21 X11
KCP_NOINLINE void invert(Chunk& c, float* x) {
  enum { ld = kMaxChunk, W = kBlock / kLanes };
  const int rows = c.rows;
  for (int i = 0; i < kBlock; i++)
    for (int b = 0; b < rows; b += kBlock) {
      float unit[kBlock] = {};
      unit[i] = 1.f;
      Vec r[W];
      KCP_UNROLL for (int w = 0; w < W; w++) r[w] = load(unit + w * kLanes);
      for (int j = 0; j < i; j++) {
        const float l = c.lower[b + i][b + j];
        KCP_UNROLL for (int w = 0; w < W; w++) r[w] -= l * load(x + (b + j) * ld + b + w * kLanes);
      }
      KCP_UNROLL for (int w = 0; w < W; w++) store(x + (b + i) * ld + b + w * kLanes, r[w]);
    }
  float* s = c.square[0];
  for (int b = 0; b + kBlock < rows; b += kHalf) {
    float *x11 = x + b * ld + b, *x22 = x + (b + kBlock) * (ld + 1), *x21 = x22 - kBlock;
    zero_rows(x11 + kBlock, ld, kBlock, kBlock);
    multiply16<false>(c.prefetch, kBlock, {&c.lower[b + kBlock][b], ld, x11, ld, kBlock},
                      [=](int i, int j, Vec v) { store(s + i * kHalf + j, v); });
    multiply16<false>(c.prefetch, kBlock, {x22, ld, s, kHalf, kBlock},
                      [=](int i, int j, Vec v) { store(x21 + i * ld + j, -v); });
  }
  if (rows <= kHalf) return;
  float* x21 = x + kHalf * ld;
  multiply<false>(c.prefetch, rows - kHalf, kHalf, {c.lower[kHalf], ld, x, ld, kHalf},
                  [=](int i, int j, Vec v) { store(s + i * kHalf + j, v); });
  multiply<false>(c.prefetch, rows - kHalf, kHalf, {x21 + kHalf, ld, s, kHalf, rows - kHalf},
                  [=](int i, int j, Vec v) { store(x21 + i * ld + j, -v); });
}

// Aqk and Akk [rows, rows] with row length 64; blocks above the diagonal are left alone, except that Akk needs zeros
// inside its 32x32 diagonal squares.
KCP_NOINLINE void chunk_scores(Chunk& c, float scale, float* aqk, float* akk) {
  enum { ld = kMaxChunk };
  const int rows = c.rows, depth = c.padded;
  float *kT = c.k_T[0], *lower = c.lower[0];
  const float* beta = c.beta;
  auto to_aqk = [=](int r, int col) {
    return [=](int i, int j, Vec v) { store(aqk + (r + i) * ld + col + j, v * scale); };
  };
  auto to_lower = [=](int r, int col) {
    return [=](int i, int j, Vec v) { store(lower + (r + i) * ld + col + j, v * beta[r + i]); };
  };
  if (rows > kHalf) {
    transpose(c.k_near[0], kLd, kT, kLdT, kHalf, depth);
    multiply<false>(c.prefetch, rows - kHalf, kHalf, {c.q_far[0], kLd, kT, kLdT, depth}, to_aqk(kHalf, 0));
    multiply<false>(c.prefetch, rows - kHalf, kHalf, {c.k_far[0], kLd, kT, kLdT, depth}, to_lower(kHalf, 0));
  }
  for (int b = 0; b + kBlock < rows; b += kHalf) {
    float* columns = kT + kHalf + b / 2;
    transpose(c.k_suf[b], kLd, columns, kLdT, kBlock, depth);
    multiply16<false>(c.prefetch, kBlock, {c.q_pre[b + kBlock], kLd, columns, kLdT, depth}, to_aqk(b + kBlock, b));
    multiply16<false>(c.prefetch, kBlock, {c.k_pre[b + kBlock], kLd, columns, kLdT, depth}, to_lower(b + kBlock, b));
  }
  for (int b = 0; b < rows; b += kBlock) diagonal_scores(c, b, scale, aqk);
  invert(c, akk);
}

}  // namespace KCP_ISA
