// Backward of one head of one sequence, chunks from the last to the first. Given do, the state h at the chunk's start
// and the gradient dh of the state at its end (kx = k 2^G, qg = scale q 2^G, kg = k 2^(G_last-G)):
//     dv_new = Aqk^T do + kg dh            y = Akk^T dv_new            dv = beta y
//     dAqk = scale tril(do v_new^T)        dL = -tril(y v_new^T, -1)   (adjoint of the solve: no products of C x C
//     matrices) dh <- 2^G_last dh + qg^T do - kx^T (beta y)
// Gradients of q and k are kept without the decay from their own block:
//     dq = pre Q + diagonal      dk = beta pre R + suf S + suf Z + diagonal      Q, R, S: below; Z through kg, the rest
//     of S inside the chunk
#pragma once
#include "forward.h"

namespace KCP_ISA {

struct alignas(64) BackwardScratch {
  Chunk chunk;
  Mat dq, row, col, z;  // Q; R / beta; S; Z
  Mat past;  // what token i's decay multiplies: 2^G_last sum_V h dh + sum over earlier tokens of k dkg 2^(G_last-G)
  Mat d_out, dv_new, y, minus_beta_y, v, dg;
  Rows<kMaxWidth, kLdT> v_new_T;
  Rows<kMaxWidth> h_T, dh_T, dh;
  Rows<kMaxChunk, kMaxChunk> d_aqk, d_lower, d_lower_beta;
  float sums[3][kMaxChunk][kLanes];
  float d_parameters[1 + kMaxWidth];
};

// These three work on `cols` value columns from `first` on.
// dv_new = kg dh + Aqk^T do
KCP_NOINLINE void grad_v_new(BackwardScratch& w, const float* aqk, int first, int cols) {
  Chunk& c = w.chunk;
  float* to = w.dv_new[0] + first;
  multiply_add<false, true, kUpper>(c.prefetch, c.rows, cols, {c.k_out[0], kLd, w.dh[0] + first, kLd, c.padded},
                                    {aqk, kMaxChunk, w.d_out[0] + first, kLd, c.rows},
                                    [=](int i, int j, Vec x) { store(to + i * kLd + j, x); });
}
// y = Akk^T dv_new
KCP_NOINLINE void grad_solve(BackwardScratch& w, const float* akk, int first, int cols) {
  Chunk& c = w.chunk;
  float *y = w.y[0] + first, *minus = w.minus_beta_y[0] + first;
  const float* beta = c.beta;
  multiply<true, kUpper>(c.prefetch, c.rows, cols, {akk, kMaxChunk, w.dv_new[0] + first, kLd, c.rows},
                         [=](int i, int j, Vec x) {
                           store(y + i * kLd + j, x);
                           store(minus + i * kLd + j, x * -beta[i]);
                         });
}
// dh <- 2^G_last dh + qg^T do - kx^T (beta y)
KCP_NOINLINE void grad_state(BackwardScratch& w, int first, int cols) {
  Chunk& c = w.chunk;
  float* dh = w.dh[0] + first;
  const float* total = c.total;
  multiply_add<true, true>(c.prefetch, c.padded, cols, {c.q_in[0], kLd, w.d_out[0] + first, kLd, c.rows},
                           {c.k_in[0], kLd, w.minus_beta_y[0] + first, kLd, c.rows}, [=](int i, int j, Vec x) {
                             store(dh + i * kLd + j, total[i] * load(dh + i * kLd + j) + x);
                           });
}

// done(i, j, vector) for the 16x16 blocks on and below the diagonal of x v_new^T
template <class Done>
KCP_INLINE void lower_outer(Chunk& c, const float* x, const float* v_new_T, int depth, Done done) {
  for (int r = 0; r < c.rows; r += kBlock) {
    const int wide = (r + kBlock) & ~(kHalf - 1);
    const float* a = x + r * kLd;
    if (wide)
      multiply<false>(c.prefetch, kBlock, wide, {a, kLd, v_new_T, kLdT, depth},
                      [=](int i, int j, Vec s) { done(r + i, j, s); });
    if (wide < r + kBlock)
      multiply16<false>(c.prefetch, kBlock, {a, kLd, v_new_T + wide, kLdT, depth},
                        [=](int i, int j, Vec s) { done(r + i, wide + j, s); });
  }
}
// dAqk (unless the caller has it) and dL, beta dL; meaningful on and below the diagonal
KCP_NOINLINE void grad_scores(BackwardScratch& w, const Problem& p, const float* v_new, long ld, bool want_d_aqk) {
  Chunk& c = w.chunk;
  const int depth = (int)p.value_padded;
  const float scale = p.scale, *beta = c.beta;
  float *a = w.d_aqk[0], *l = w.d_lower[0], *lb = w.d_lower_beta[0];
  transpose(v_new, ld, w.v_new_T[0], kLdT, c.rows, depth);
  if (want_d_aqk)
    lower_outer(c, w.d_out[0], w.v_new_T[0], depth,
                [=](int i, int j, Vec x) { store(a + i * kMaxChunk + j, x * scale); });
  lower_outer(c, w.y[0], w.v_new_T[0], depth, [=](int i, int j, Vec x) {
    store(l + i * kMaxChunk + j, -x);
    store(lb + i * kMaxChunk + j, x * -beta[i]);
  });
}
// the parts of Q, R and Z that come through the states, and `past`. dq_raw = do h^T [rows][kLd] if the caller has it.
KCP_NOINLINE void grad_through_states(BackwardScratch& w, const Problem& p, const float* h, long ld_h,
                                      const float* v_new, long ld_v, const float* dh, const float* dq_raw) {
  Chunk& c = w.chunk;
  const int K = c.padded, V = (int)p.value_padded;
  const float scale = p.scale;
  float *dq = w.dq[0], *row = w.row[0], *z = w.z[0];
  const float *to = c.to[0], *from = c.from[0];
  transpose(h, ld_h, w.h_T[0], kLd, K, V);
  transpose(dh, kLd, w.dh_T[0], kLd, K, V);
  auto put_dq = [=](int i, int j, Vec x) {
    store(dq + i * kLd + j, x * scale * load(to + (i / kBlock) * kMaxWidth + j));
  };
  if (dq_raw) {
    for (int i = 0; i < c.rows; i++)
      for (int j = 0; j < K; j += kLanes) put_dq(i, j, load(dq_raw + i * kLd + j));
  } else {
    multiply<false>(c.prefetch, c.rows, K, {w.d_out[0], kLd, w.h_T[0], kLd, V}, put_dq);
  }
  multiply<false>(c.prefetch, c.rows, K, {w.y[0], kLd, w.h_T[0], kLd, V}, [=](int i, int j, Vec x) {
    store(row + i * kLd + j, -(x * load(to + (i / kBlock) * kMaxWidth + j)));
  });
  multiply<false>(c.prefetch, c.rows, K, {v_new, ld_v, w.dh_T[0], kLd, V},
                  [=](int i, int j, Vec x) { store(z + i * kLd + j, x * load(from + (i / kBlock) * kMaxWidth + j)); });
  enum { W = 2 };
  for (int d0 = 0; d0 < K; d0 += W * kLanes) {
    Vec sum[W][2];
    KCP_UNROLL for (int v = 0; v < W; v++) sum[v][0] = sum[v][1] = (Vec){};
    for (int r = 0; r < V; r += 2)
      KCP_UNROLL for (int v = 0; v < W; v++) KCP_UNROLL for (int u = 0; u < 2; u++) sum[v][u] +=
          load(&w.h_T[r + u][d0 + v * kLanes]) * load(&w.dh_T[r + u][d0 + v * kLanes]);
    KCP_UNROLL for (int v = 0; v < W; v++) {
      const int d = d0 + v * kLanes;
      Vec past = (sum[v][0] + sum[v][1]) * load(&c.total[d]);
      for (int t = 0; t < c.rows; t++) {
        store(&w.past[t][d], past);
        past += load(&c.k_suf[t][d]) * load(&w.z[t][d]);
      }
    }
  }
}

// Q, R and S from pairs in different blocks, by the reference rows of the forward
KCP_NOINLINE void grad_between_blocks(BackwardScratch& w) {
  enum { ld = kMaxChunk };
  Chunk& c = w.chunk;
  const int K = c.padded, far = c.rows - kHalf;
  float *dq = w.dq[0], *row = w.row[0], *col = w.col[0];
  const float *over1 = c.over1, *over2 = c.over2;
  Prefetch& f = c.prefetch;
  if (far > 0) {  // rows 32.. against 0..31
    auto add = [=](float* to) {
      return [=](int i, int j, Vec x) {
        float* at = to + (kHalf + i) * kLd + j;
        store(at, load(at) + (i < kBlock ? x : x * load(over2 + j)));
      };
    };
    multiply<false>(f, far, K, {w.d_aqk[kHalf], ld, c.k_near[0], kLd, kHalf}, add(dq));
    multiply<false>(f, far, K, {w.d_lower[kHalf], ld, c.k_near[0], kLd, kHalf}, add(row));
    multiply_add<true, true>(
        f, kHalf, K, {w.d_aqk[kHalf], ld, c.q_far[0], kLd, far}, {w.d_lower_beta[kHalf], ld, c.k_far[0], kLd, far},
        [=](int i, int j, Vec x) { store(col + i * kLd + j, i < kBlock ? x * load(over1 + j) : x); });
  } else {
    zero_rows(col, kLd, c.rows, K);
  }
  for (int b = 0; b + kBlock < c.rows; b += kHalf) {  // block 1 against 0, block 3 against 2
    const int r = b + kBlock;
    const bool first = b > 0;
    auto add = [=](float* to) {
      return [=](int i, int j, Vec x) { store(to + i * kLd + j, load(to + i * kLd + j) + x); };
    };
    float* to = col + b * kLd;
    multiply<false>(f, kBlock, K, {&w.d_aqk[r][b], ld, c.k_suf[b], kLd, kBlock}, add(dq + r * kLd));
    multiply<false>(f, kBlock, K, {&w.d_lower[r][b], ld, c.k_suf[b], kLd, kBlock}, add(row + r * kLd));
    multiply_add<true, true>(f, kBlock, K, {&w.d_aqk[r][b], ld, c.q_pre[r], kLd, kBlock},
                             {&w.d_lower_beta[r][b], ld, c.k_pre[r], kLd, kBlock}, [=](int i, int j, Vec x) {
                               store(to + i * kLd + j, first ? x : load(to + i * kLd + j) + x);
                             });
  }
  const int last = (c.rows - 1) & ~(kBlock - 1);  // nothing comes after the last block
  if (far > 0 && last == kHalf) zero_rows(col + last * kLd, kLd, kBlock, K);
  if (last == kMaxChunk - kBlock) zero_rows(col + last * kLd, kLd, kBlock, K);
}

// Pairs i > j of one diagonal block, by Horner sums over exact one-token decays, and the multiplications by pre and suf
// on the way: afterwards dq, row, col hold pre Q, pre R, suf S with the diagonal block included. Pairs i = j stay out:
// they carry no decay, and in dG they would only cancel, badly when the decay is strong.
template <int D>
KCP_INLINE void grad_diagonal_columns(BackwardScratch& w, int b, int d0) {
  Chunk& c = w.chunk;
  for (int i = b; i < b + kBlock; i++) {
    Vec s[D], t[D];
    KCP_UNROLL for (int v = 0; v < D; v++) {
      const int d = d0 + v * kLanes;
      const Vec e = load(&c.e[b][d]);
      s[v] = load(&w.dq[i][d]) * e;
      t[v] = load(&w.row[i][d]) * e;
    }
    for (int j = b; j < i; j++) {
      const float a = w.d_aqk[i][j], l = w.d_lower[i][j];
      KCP_UNROLL for (int v = 0; v < D; v++) {
        const int d = d0 + v * kLanes;
        const Vec k = load(&c.k[j][d]), e = load(&c.e[j + 1][d]);
        s[v] = (s[v] + a * k) * e;
        t[v] = (t[v] + l * k) * e;
      }
    }
    KCP_UNROLL for (int v = 0; v < D; v++) store(&w.dq[i][d0 + v * kLanes], s[v]),
        store(&w.row[i][d0 + v * kLanes], t[v]);
  }
  for (int j = b; j < b + kBlock; j++) {
    Vec s[D];
    KCP_UNROLL for (int v = 0; v < D; v++) s[v] = load(&w.col[j][d0 + v * kLanes]);
    for (int i = b + kBlock - 1; i > j; i--) {
      const float a = w.d_aqk[i][j], l = w.d_lower_beta[i][j];
      KCP_UNROLL for (int v = 0; v < D; v++) {
        const int d = d0 + v * kLanes;
        s[v] = (s[v] + a * load(&c.q[i][d]) + l * load(&c.k[i][d])) * load(&c.e[i][d]);
      }
    }
    KCP_UNROLL for (int v = 0; v < D; v++) store(&w.col[j][d0 + v * kLanes], s[v]);
  }
}
KCP_NOINLINE void grad_inside_block(BackwardScratch& w, int b) {
  enum { D = KCP_LANES == 16 ? 8 : 4 };
  int d = 0;
  for (; d + D * kLanes <= w.chunk.padded; d += D * kLanes) grad_diagonal_columns<D>(w, b, d);
  if (d + 4 * kLanes <= w.chunk.padded) grad_diagonal_columns<4>(w, b, d), d += 4 * kLanes;
  if (d + 2 * kLanes <= w.chunk.padded) grad_diagonal_columns<2>(w, b, d);
}
KCP_NOINLINE void grad_inside_chunk(BackwardScratch& w) {
  grad_between_blocks(w);
  for (int b = 0; b < w.chunk.rows; b += kBlock) grad_inside_block(w, b);
}

}  // namespace KCP_ISA
