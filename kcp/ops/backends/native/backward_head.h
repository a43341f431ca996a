// The last pass of a chunk's backward (decays, gate, norms, beta), and the loops over the chunks of a head.
#pragma once
#include "backward.h"

namespace KCP_ISA {

// Two vectors of columns of every row, from the last: d a = past + reverse running sum of dG, with dG without the pairs
// i = j and without the kg part, which `past` sums forward (in the reverse sum it would cancel against itself).
KCP_INLINE void finish_columns(BackwardScratch& w, int d0, Vec& d_a_log) {
  enum { W = 2 };
  Chunk& c = w.chunk;
  Vec run[W], suf[W], bias[W];
  KCP_UNROLL for (int v = 0; v < W; v++) run[v] = bias[v] = (Vec){}, suf[v] = splat(1.f);
  for (int i = c.tokens - 1; i >= 0; i--) {
    const float beta = c.beta[i], diagonal = w.d_aqk[i][i];
    Vec to_beta = (Vec){}, q_dq = (Vec){}, k_dk = (Vec){};
    KCP_UNROLL for (int v = 0; v < W; v++) {
      const int d = d0 + v * kLanes;
      const Vec q = load(&c.q[i][d]), k = load(&c.k[i][d]), row = load(&w.row[i][d]), col = load(&w.col[i][d]);
      Vec dq = load(&w.dq[i][d]);
      const Vec row_beta = row * beta;
      run[v] += q * dq + k * (row_beta - col);
      dq += diagonal * k;
      const Vec dk = row_beta + col + suf[v] * load(&w.z[i][d]) + diagonal * q;
      const Vec da = run[v] + load(&w.past[i][d]), dx = da * load(&c.gate_slope[i][d]);
      d_a_log += da * load(&c.gate_slope_log[i][d]);
      bias[v] += dx;
      to_beta += k * row;
      q_dq += q * dq;
      k_dk += k * dk;
      suf[v] = i & (kBlock - 1) ? suf[v] * load(&c.e[i][d]) : splat(1.f);
      store(&w.dg[i][d], dx), store(&w.dq[i][d], dq), store(&w.col[i][d], dk);
    }
    const bool more = d0 > 0;
    store(w.sums[0][i], more ? load(w.sums[0][i]) + to_beta : to_beta);
    store(w.sums[1][i], more ? load(w.sums[1][i]) + q_dq : q_dq);
    store(w.sums[2][i], more ? load(w.sums[2][i]) + k_dk : k_dk);
  }
  KCP_UNROLL for (int v = 0; v < W; v++) store(w.d_parameters + 1 + d0 + v * kLanes, bias[v]);
}

// All input gradients of the chunk at tokens t.. ; `slot` numbers chunk and head
KCP_NOINLINE void finish_chunk(const Problem& p, const Sequence& s, long head, long t, long slot, Source v,
                               BackwardScratch& w) {
  Chunk& c = w.chunk;
  const int n = c.tokens, K = (int)p.key_width, V = (int)p.value_width;
  Vec d_a_log = (Vec){};
  for (int d = 0; d < c.padded; d += 2 * kLanes) finish_columns(w, d, d_a_log);
  for (int i = 0; i < n; i++) {
    Vec y_v = load(w.sums[0][i]);
    for (int d = 0; d < p.value_padded; d += kLanes) y_v += load(&w.y[i][d]) * load(v.at + i * v.ld + d);
    store(w.sums[0][i], y_v);
  }
  float to_beta[kMaxChunk], q_dq[kMaxChunk], k_dk[kMaxChunk];
  lane_sums(w.sums[0], c.rows, to_beta);
  lane_sums(w.sums[1], c.rows, q_dq);
  lane_sums(w.sums[2], c.rows, k_dk);
  for (int i = 0; i < n; i++) {
    store_scalar(row_at(p.dbeta, s.batch, t + i, head), p.dbeta.dtype, to_beta[i] * (p.beta_sigmoid ? c.beta_slope[i] : 1.f));
  }
  // y = x rstd:  dx = rstd (dy - (dy . y) y)
  const float norm = p.l2norm ? 1.f : 0.f;
  store_rows(p.dq, row_at(p.dq, s.batch, t, head), n, K, p.streamed,
             [&](int i, int d) { return (load(&w.dq[i][d]) - load(&c.q[i][d]) * (q_dq[i] * norm)) * c.q_rstd[i]; });
  store_rows(p.dk, row_at(p.dk, s.batch, t, head), n, K, p.streamed,
             [&](int i, int d) { return (load(&w.col[i][d]) - load(&c.k[i][d]) * (k_dk[i] * norm)) * c.k_rstd[i]; });
  store_rows(p.dv, row_at(p.dv, s.batch, t, head), n, V, p.streamed,
             [&](int i, int d) { return load(&w.y[i][d]) * c.beta[i]; });
  scatter(w.dg[0], p.dg, row_at(p.dg, s.batch, t, head), n, K, p.streamed);
  float* parameters = p.d_parameters + slot * (1 + K);
  w.d_parameters[0] = lane_sum(d_a_log);
  memcpy(parameters, w.d_parameters, (1 + K) * sizeof(float));
}

KCP_INLINE void gather_d_out(const Problem& p, const Sequence& s, long head, long t, int first, int width, int padded,
                             BackwardScratch& w) {
  const View x = columns_from(p.d_out, first);
  gather(x, row_at(x, s.batch, t, head), w.chunk.tokens, w.chunk.rows, width, padded, w.d_out[0] + first);
}

// Chunk i of one head; `before`: what is saved of chunk i - 1, prefetched. w.dh is the gradient of the state at its
// end, and of the state at its start afterwards if `advance`.
KCP_NOINLINE void backward_chunk(const Problem& p, long n, long head, long i, const SavedChunk& saved,
                                 const float* before, bool advance, BackwardScratch& w) {
  const Sequence& s = p.sequences[n];
  const long t = s.begin + i * p.chunk, Vp = p.value_padded, V = p.value_width;
  Chunk& c = w.chunk;
  prepare_chunk<true>(p, s, head, t, chunk_tokens(p, s, i), c);
  gather_d_out(p, s, head, t, 0, (int)V, (int)Vp, w);
  Prefetch& f = c.prefetch;
  f.clear();
  prefetch_chunk(f, p, p.v, s, i, head, V);
  if (i > 0) {
    prefetch_gates(f, p, s, i - 1, head);
    prefetch_chunk(f, p, p.d_out, s, i - 1, head, V);
    f.add(before, 0, 1, saved_size(p) * sizeof(float));
  }
  grad_v_new(w, saved.aqk, 0, (int)Vp);
  grad_solve(w, saved.akk, 0, (int)Vp);
  grad_scores(w, p, saved.v_new, Vp, true);
  grad_through_states(w, p, saved.h, Vp, saved.v_new, Vp, w.dh[0], nullptr);
  if (advance) grad_state(w, 0, (int)Vp);
  grad_inside_chunk(w);
  const Source v = rows_or_gather(p.v, row_at(p.v, s.batch, t, head), c.tokens, c.rows, (int)V, (int)Vp, w.v[0]);
  finish_chunk(p, s, head, t, (s.chunk + i) * p.num_heads + head, v, w);
}

KCP_NOINLINE void backward_head(const Problem& p, long n, long head, float* saved, long slot_step, BackwardScratch& w) {
  const long chunks = num_chunks(p, p.sequences[n]);
  begin_head(p, head, w.chunk);
  load_state(state_of(p.d_final_state, p, n, head), p, w.dh[0]);
  for (long i = chunks - 1; i >= 0; i--)
    backward_chunk(p, n, head, i, saved_chunk(p, saved, i * slot_step),
                   saved_chunk(p, saved, (i - (i > 0)) * slot_step).h, true, w);
  if (p.d_initial_state) store_state(w.dh[0], p, 0, p.value_width, (float*)state_of(p.d_initial_state, p, n, head));
}

// The dh recurrence alone, value columns [first, last): the gradient that reaches the sequence's start. Needs Aqk and
// Akk: saved ones, or (recompute) they are computed here. keep: dh at the end of every chunk is stored in
// p.state_gradient.
KCP_NOINLINE void state_gradient_head(const Problem& p, long n, long head, int first, int last, float* saved,
                                      long slot_step, bool keep, BackwardScratch& w) {
  const Sequence& s = p.sequences[n];
  const long chunks = num_chunks(p, s), Vp = p.value_padded;
  const int width = (int)(p.value_width < last ? p.value_width : last) - first, cols = last - first;
  Chunk& c = w.chunk;
  begin_head(p, head, c);
  load_state(state_of(p.d_final_state, p, n, head), p, w.dh[0]);
  for (long i = chunks - 1; i >= 0; i--) {
    const long t = s.begin + i * p.chunk;
    if (keep)
      copy_rows(w.dh[0] + first, kLd,
                p.state_gradient + ((s.chunk + i) * p.num_heads + head) * p.key_padded * Vp + first, Vp, p.key_padded,
                cols);
    prepare_chunk<false>(p, s, head, t, chunk_tokens(p, s, i), c);
    gather_d_out(p, s, head, t, first, width, cols, w);
    c.prefetch.clear();
    if (i > 0)
      prefetch_gates(c.prefetch, p, s, i - 1, head), prefetch_chunk(c.prefetch, p, p.d_out, s, i - 1, head, width);
    const float *aqk = w.d_aqk[0], *akk = w.d_lower[0];
    if (saved) {
      const SavedChunk now = saved_chunk(p, saved, i * slot_step);
      aqk = now.aqk, akk = now.akk;
    } else {
      chunk_scores(c, p.scale, w.d_aqk[0], w.d_lower[0]);
    }
    grad_v_new(w, aqk, first, cols);
    grad_solve(w, akk, first, cols);
    grad_state(w, first, cols);
  }
  if (p.d_initial_state) store_state(w.dh[0], p, first, last, (float*)state_of(p.d_initial_state, p, n, head));
}

}  // namespace KCP_ISA
