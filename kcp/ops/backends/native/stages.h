// The chunk step cut into explicit stages over token-indexed tensors, for callers that put communication between them.
// `prepare`, `out`, `grad_out` and `grad_inputs` are independent from chunk to chunk; `scan` and `grad_scan` go along a
// head.
#pragma once
#include "backward_head.h"
#include "stage_tensors.h"

namespace KCP_ISA {

struct alignas(64) StageScratch {
  ForwardScratch forward;
  Mat w, u, kg, qg, d_out, dv;
  float decay[kMaxWidth];
};

KCP_INLINE float* rows_of(float* x, const StageTensors& st, long b, long h, long t, long width) {
  return x + ((b * st.heads + h) * st.tokens + t) * width;
}
KCP_INLINE float* state_at(float* x, const Problem& p, const Sequence& s, long i, long head) {
  return x + ((s.chunk + i) * p.num_heads + head) * p.key_width * p.value_width;
}
KCP_INLINE int stage_tokens(const Problem& p, const Sequence& s, long i) {
  const long left = s.end - s.begin - i * p.chunk;
  return left < p.chunk ? (int)left : p.chunk;
}
KCP_INLINE long stage_chunks(const Problem& p, const Sequence& s) { return (s.end - s.begin + p.chunk - 1) / p.chunk; }
KCP_INLINE int whole_blocks(int n) { return (n + kBlock - 1) / kBlock * kBlock; }
KCP_INLINE void put_rows(const float* from, long ld, float* to, int rows, int width) {
  store_rows_as<kFloat32>((char*)to, width * 4L, rows, width, false,
                          [=](int i, int d) { return load(from + i * ld + d); });
}
KCP_INLINE void take_rows(const float* from, int n, int width, int padded, float* to) {
  gather_as<kFloat32>((const char*)from, width * 4L, n, whole_blocks(n), width, padded, to);
}
// scores [n, columns] <-> scratch [64, 64]; above the diagonal they are 0
KCP_INLINE void put_scores(const float* from, float* to, int n, int columns) {
  for (int i = 0; i < n; i++)
    for (int j = 0; j < columns; j++) to[i * columns + j] = j <= i ? from[i * kMaxChunk + j] : 0.f;
}
KCP_INLINE void take_scores(const float* from, float* to, int n, int columns) {
  const int rows = whole_blocks(n);
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < rows; j++) to[i * kMaxChunk + j] = i < n && j <= i && j < columns ? from[i * columns + j] : 0.f;
}
// state of one chunk, [K,V] or [V,K] -> scratch
KCP_INLINE void take_state(const float* from, const Problem& p, int v_first, float* to) {
  Problem as = p;
  as.state_v_first = v_first;
  load_state(from, as, to);
}
KCP_INLINE void put_state(const float* from, const Problem& p, int v_first, float* to) {
  Problem as = p;
  as.state_v_first = v_first;
  store_state(from, as, 0, p.value_width, to);
}

// gk of the chunk: running sums inside 16-token blocks on top of the blocks' exact sums
KCP_NOINLINE void put_log_decays(const Problem& p, const Sequence& s, long head, long t, int use_exp2, Chunk& c,
                                 Mat& gates, float* to) {
  const float unit = use_exp2 ? 1.f : 0.6931471805599453f;
  gather(p.g, row_at(p.g, s.batch, t, head), c.tokens, c.rows, (int)p.key_width, c.padded, gates[0]);
  for (int d = 0; d < c.padded; d += kLanes) {
    Vec before = (Vec){};
    for (int b = 0; b < c.tokens; b += kBlock) {
      Vec run = (Vec){};
      for (int i = b; i < c.tokens && i < b + kBlock; i++) {
        Vec slope, slope_log, x = load(&gates[i][d]) + load(c.bias + d);
        if (p.gate == kGateLowerBound)
          x = log2_decay<false, kGateLowerBound>(p.lower_bound, c.gate_gain, x, slope, slope_log);
        else if (p.gate == kGateSoftplus)
          x = log2_decay<false, kGateSoftplus>(p.lower_bound, c.gate_gain, x, slope, slope_log);
        else x = log2_decay<false, kGateNone>(p.lower_bound, c.gate_gain, x, slope, slope_log);
        run += x;
        store(&gates[i][d], (before + run) * unit);
      }
      before += run;
    }
  }
  put_rows(gates[0], kLd, to, c.tokens, (int)p.key_width);
}

// p.scale is 1 here (so that q_in = q 2^G), `scale` the real one
KCP_NOINLINE void stage_prepare(const Problem& p, const StageTensors& st, float scale, long n, long head, long i,
                                StageScratch& w) {
  const Sequence& s = p.sequences[n];
  const long t = s.begin + i * p.chunk, K = p.key_width, V = p.value_width;
  const int tokens = stage_tokens(p, s, i);
  ForwardScratch& f = w.forward;
  Chunk& c = f.chunk;
  begin_head(p, head, c);
  prepare_chunk<false, kNormalised>(p, s, head, t, tokens, c);
  chunk_scores(c, scale, f.aqk[0], f.akk[0]);
  put_scores(f.aqk[0], rows_of(st.aqk, st, s.batch, head, t, st.columns), tokens, st.columns);
  put_scores(f.akk[0], rows_of(st.akk, st, s.batch, head, t, st.columns), tokens, st.columns);
  put_log_decays(p, s, head, t, st.use_exp2, c, f.out, rows_of(st.gk, st, s.batch, head, t, K));
  put_rows(c.q_in[0], kLd, rows_of(st.qg, st, s.batch, head, t, K), tokens, (int)K);
  put_rows(c.k_out[0], kLd, rows_of(st.kg, st, s.batch, head, t, K), tokens, (int)K);
  store_rows_as<kFloat32>((char*)rows_of(st.qg_scaled, st, s.batch, head, t, K), K * 4, tokens, (int)K, false,
                          [&](int r, int d) { return load(&c.q_in[r][d]) * scale; });
  memcpy(rows_of(st.beta, st, s.batch, head, t, 1), c.beta, tokens * sizeof(float));
  if (head % p.group == 0) {
    const long key_row = (s.batch * st.key_heads + head / p.group) * st.tokens + t;
    put_rows(c.q[0], kLd, st.q_hat + key_row * K, tokens, (int)K);
    put_rows(c.k[0], kLd, st.k_hat + key_row * K, tokens, (int)K);
    if (p.l2norm)
      memcpy(st.q_rstd + key_row, c.q_rstd, tokens * sizeof(float)),
          memcpy(st.k_rstd + key_row, c.k_rstd, tokens * sizeof(float));
  }
  // w = Akk (beta k 2^G), u = Akk (beta v)
  gather(p.v, row_at(p.v, s.batch, t, head), tokens, c.rows, (int)V, (int)p.value_padded, f.v[0]);
  auto solve = [&](Mat& x, int padded, float* to, long width) {
    float* result = f.v_new[0];
    for (int r = 0; r < c.rows; r++)
      for (int d = 0; d < padded; d += kLanes) store(&f.rb[r][d], load(&x[r][d]) * c.beta[r]);
    multiply<false, kLower>(c.prefetch, c.rows, padded, {f.akk[0], kMaxChunk, f.rb[0], kLd, c.rows},
                            [=](int r, int d, Vec y) { store(result + r * kLd + d, y); });
    put_rows(result, kLd, to, tokens, (int)width);
  };
  solve(c.k_in, c.padded, rows_of(st.w, st, s.batch, head, t, K), K);
  solve(f.v, (int)p.value_padded, rows_of(st.u, st, s.batch, head, t, V), V);
}

// decay of the whole chunk, 2^G_last, from gk of its last token
KCP_INLINE void last_decay(const Problem& p, const StageTensors& st, const Sequence& s, long head, long t, int tokens,
                           float* decay) {
  const float unit = st.use_exp2 ? 1.f : 1.4426950408889634f;
  fill_zero(decay, p.key_padded);
  memcpy(decay, rows_of(st.gk, st, s.batch, head, t + tokens - 1, p.key_width), p.key_width * sizeof(float));
  for (long d = 0; d < p.key_padded; d += kLanes) store(decay + d, exp2v(load(decay + d) * unit));
}
// v_new = u - w h (u = nullptr: 0), then h <- 2^G_last h + kg^T v_new
KCP_NOINLINE void scan_step(const Problem& p, StageScratch& w, int rows, int cols, const float* u, float* h,
                            float* v_new) {
  Prefetch& f = w.forward.chunk.prefetch;
  const float* decay = w.decay;
  const int K = (int)p.key_padded;
  multiply<false>(f, rows, cols, {w.w[0], kLd, h, kLd, K},
                  [=](int i, int j, Vec x) { store(v_new + i * kLd + j, (u ? load(u + i * kLd + j) : (Vec){}) - x); });
  multiply<true>(f, K, cols, {w.kg[0], kLd, v_new, kLd, rows},
                 [=](int i, int j, Vec x) { store(h + i * kLd + j, decay[i] * load(h + i * kLd + j) + x); });
}
// Along one head: h at every chunk's start and v_new (st.h), or the affine summary [E | M] (st.summary).
KCP_NOINLINE void stage_scan(const Problem& p, const StageTensors& st, long n, long head, StageScratch& w) {
  const Sequence& s = p.sequences[n];
  const int K = (int)p.key_width, V = (int)p.value_width, Kp = (int)p.key_padded, Vp = (int)p.value_padded;
  float *h = w.forward.h[0], *m = w.forward.m[0], *v_new = w.forward.v_new[0];
  w.forward.chunk.prefetch.clear();
  load_state(state_of(p.initial_state, p, n, head), p, h);
  zero_rows(m, kLd, Kp, Kp);
  for (int d = 0; d < K; d++) m[d * kLd + d] = 1.f;
  for (long i = 0; i < stage_chunks(p, s); i++) {
    const long t = s.begin + i * p.chunk;
    const int tokens = stage_tokens(p, s, i), rows = whole_blocks(tokens);
    take_rows(rows_of(st.w, st, s.batch, head, t, K), tokens, K, Kp, w.w[0]);
    take_rows(rows_of(st.kg, st, s.batch, head, t, K), tokens, K, Kp, w.kg[0]);
    take_rows(rows_of(st.u, st, s.batch, head, t, V), tokens, V, Vp, w.u[0]);
    last_decay(p, st, s, head, t, tokens, w.decay);
    if (st.h) put_state(h, p, st.h_v_first, state_at(st.h, p, s, i, head));
    scan_step(p, w, rows, Vp, w.u[0], h, v_new);
    if (st.h) put_rows(v_new, kLd, rows_of(st.v_new, st, s.batch, head, t, V), tokens, V);
    if (st.summary) scan_step(p, w, rows, Kp, nullptr, m, v_new);
  }
  if (p.final_state) store_state(h, p, 0, V, (float*)state_of(p.final_state, p, n, head));
  for (long d = 0; st.summary && d < K; d++) {
    float* to = st.summary + ((n * p.num_heads + head) * K + d) * (V + K);
    memcpy(to, h + d * kLd, V * sizeof(float));
    memcpy(to + V, m + d * kLd, K * sizeof(float));
  }
}
// o = (scale q 2^G) h + Aqk v_new
KCP_NOINLINE void stage_out(const Problem& p, const StageTensors& st, long n, long head, long i, StageScratch& w) {
  const Sequence& s = p.sequences[n];
  const long t = s.begin + i * p.chunk;
  const int tokens = stage_tokens(p, s, i), rows = whole_blocks(tokens), K = (int)p.key_width, V = (int)p.value_width,
            Vp = (int)p.value_padded;
  ForwardScratch& f = w.forward;
  float* out = f.out[0];
  f.chunk.prefetch.clear();
  take_rows(rows_of(st.qg_scaled, st, s.batch, head, t, K), tokens, K, (int)p.key_padded, w.qg[0]);
  take_rows(rows_of(st.v_new, st, s.batch, head, t, V), tokens, V, Vp, f.v_new[0]);
  take_scores(rows_of(st.aqk, st, s.batch, head, t, st.columns), f.aqk[0], tokens, st.columns);
  take_state(state_at(st.h, p, s, i, head), p, st.h_v_first, f.h[0]);
  multiply_add<false, false, kLower>(f.chunk.prefetch, rows, Vp, {w.qg[0], kLd, f.h[0], kLd, (int)p.key_padded},
                                     {f.aqk[0], kMaxChunk, f.v_new[0], kLd, rows},
                                     [=](int r, int d, Vec x) { store(out + r * kLd + d, x); });
  scatter(out, p.out, row_at(p.out, s.batch, t, head), tokens, V, false);
}

// dAqk = scale tril(do v_new^T), dv_local = Aqk^T do, dq_raw = do h^T
KCP_NOINLINE void stage_grad_out(const Problem& p, const StageTensors& st, long n, long head, long i,
                                 BackwardScratch& w) {
  const Sequence& s = p.sequences[n];
  const long t = s.begin + i * p.chunk;
  const int tokens = stage_tokens(p, s, i), K = (int)p.key_width, V = (int)p.value_width, Vp = (int)p.value_padded;
  Chunk& c = w.chunk;
  float *a = w.d_aqk[0], *dv = w.dv_new[0], *dq = w.dq[0], scale = p.scale;
  c.prefetch.clear();
  c.rows = whole_blocks(tokens);
  gather(p.d_out, row_at(p.d_out, s.batch, t, head), tokens, c.rows, V, Vp, w.d_out[0]);
  take_rows(rows_of(st.v_new, st, s.batch, head, t, V), tokens, V, Vp, w.v[0]);
  take_scores(rows_of(st.aqk, st, s.batch, head, t, st.columns), w.d_lower[0], tokens, st.columns);
  take_state(state_at(st.h, p, s, i, head), p, st.h_v_first, w.dh[0]);
  transpose(w.v[0], kLd, w.v_new_T[0], kLdT, c.rows, Vp);
  transpose(w.dh[0], kLd, w.h_T[0], kLd, (int)p.key_padded, Vp);
  lower_outer(c, w.d_out[0], w.v_new_T[0], Vp, [=](int r, int d, Vec x) { store(a + r * kMaxChunk + d, x * scale); });
  multiply<true, kUpper>(c.prefetch, c.rows, Vp, {w.d_lower[0], kMaxChunk, w.d_out[0], kLd, c.rows},
                         [=](int r, int d, Vec x) { store(dv + r * kLd + d, x); });
  multiply<false>(c.prefetch, c.rows, (int)p.key_padded, {w.d_out[0], kLd, w.h_T[0], kLd, Vp},
                  [=](int r, int d, Vec x) { store(dq + r * kLd + d, x); });
  put_scores(a, rows_of(st.d_aqk, st, s.batch, head, t, st.columns), tokens, st.columns);
  put_rows(dv, kLd, rows_of(st.dv, st, s.batch, head, t, V), tokens, V);
  put_rows(dq, kLd, rows_of(st.dq_raw, st, s.batch, head, t, K), tokens, K);
}

// One chunk back on `cols` columns: dv_scan = dv + kg dh, then dh <- 2^G_last dh + scale qg^T do - w^T dv_scan.
// Without do and dv (nullptr): the transition dM.
KCP_NOINLINE void grad_scan_step(const Problem& p, StageScratch& w, int rows, int cols, const float* d_out,
                                 const float* dv, float* dh, float* dv_scan) {
  Prefetch& f = w.forward.chunk.prefetch;
  const float* decay = w.decay;
  const int K = (int)p.key_padded;
  float* minus = w.forward.rb[0];
  multiply<false>(f, rows, cols, {w.kg[0], kLd, dh, kLd, K}, [=](int i, int j, Vec x) {
    if (dv) x += load(dv + i * kLd + j);
    store(dv_scan + i * kLd + j, x);
    store(minus + i * kLd + j, -x);
  });
  auto put = [=](int i, int j, Vec x) { store(dh + i * kLd + j, decay[i] * load(dh + i * kLd + j) + x); };
  const Product through_w{w.w[0], kLd, minus, kLd, rows};
  if (d_out) multiply_add<true, true>(f, K, cols, {w.qg[0], kLd, d_out, kLd, rows}, through_w, put);
  else multiply<true>(f, K, cols, through_w, put);
}
// Along one head, backwards: dh at every chunk's end and dv_scan (st.dh), or the summary [dE | dM].
KCP_NOINLINE void stage_grad_scan(const Problem& p, const StageTensors& st, long n, long head, StageScratch& w) {
  const Sequence& s = p.sequences[n];
  const int K = (int)p.key_width, V = (int)p.value_width, Kp = (int)p.key_padded, Vp = (int)p.value_padded;
  float *dh = w.forward.h[0], *m = w.forward.m[0], *dv_scan = w.forward.v_new[0];
  w.forward.chunk.prefetch.clear();
  load_state(state_of(p.d_final_state, p, n, head), p, dh);
  zero_rows(m, kLd, Kp, Kp);
  for (int d = 0; d < K; d++) m[d * kLd + d] = 1.f;
  for (long i = stage_chunks(p, s) - 1; i >= 0; i--) {
    const long t = s.begin + i * p.chunk;
    const int tokens = stage_tokens(p, s, i), rows = whole_blocks(tokens);
    take_rows(rows_of(st.w, st, s.batch, head, t, K), tokens, K, Kp, w.w[0]);
    take_rows(rows_of(st.kg, st, s.batch, head, t, K), tokens, K, Kp, w.kg[0]);
    take_rows(rows_of(st.qg, st, s.batch, head, t, K), tokens, K, Kp, w.qg[0]);
    for (int r = 0; r < rows; r++)
      for (int d = 0; d < Kp; d += kLanes) store(&w.qg[r][d], load(&w.qg[r][d]) * p.scale);
    take_rows(rows_of(st.dv, st, s.batch, head, t, V), tokens, V, Vp, w.dv[0]);
    gather(p.d_out, row_at(p.d_out, s.batch, t, head), tokens, rows, V, Vp, w.d_out[0]);
    last_decay(p, st, s, head, t, tokens, w.decay);
    if (st.dh) put_state(dh, p, 0, state_at(st.dh, p, s, i, head));
    grad_scan_step(p, w, rows, Vp, w.d_out[0], w.dv[0], dh, dv_scan);
    if (st.dh) put_rows(dv_scan, kLd, rows_of(st.dv_scan, st, s.batch, head, t, V), tokens, V);
    if (st.summary) grad_scan_step(p, w, rows, Kp, nullptr, nullptr, m, dv_scan);
  }
  if (p.d_initial_state) store_state(dh, p, 0, V, (float*)state_of(p.d_initial_state, p, n, head));
  for (long d = 0; st.summary && d < K; d++) {
    float* to = st.summary + ((n * p.num_heads + head) * K + d) * (V + K);
    memcpy(to, dh + d * kLd, V * sizeof(float));
    memcpy(to + V, m + d * kLd, K * sizeof(float));
  }
}

// Every input gradient of one chunk from dv_new, dh, dAqk and dq_raw. p.q and p.k are already normalised; p.l2norm says
// that st.q_rstd, st.k_rstd carry the norms whose adjoint is wanted.
KCP_NOINLINE void stage_grad_inputs(const Problem& p, const StageTensors& st, long n, long head, long i,
                                    BackwardScratch& w) {
  const Sequence& s = p.sequences[n];
  const long t = s.begin + i * p.chunk;
  const int tokens = stage_tokens(p, s, i), K = (int)p.key_width, V = (int)p.value_width, Kp = (int)p.key_padded,
            Vp = (int)p.value_padded;
  Chunk& c = w.chunk;
  Problem normalised = p;
  normalised.l2norm = 0;
  begin_head(p, head, c);
  prepare_chunk<true>(normalised, s, head, t, tokens, c);
  if (p.l2norm) {
    const long key_row = (s.batch * st.key_heads + head / p.group) * st.tokens + t;
    memcpy(c.q_rstd, st.q_rstd + key_row, tokens * sizeof(float)),
        memcpy(c.k_rstd, st.k_rstd + key_row, tokens * sizeof(float));
  }
  float *akk = w.d_aqk[0], *v_new = w.dg[0], *h = w.dh_T[0], *dq_raw = w.z[0];
  take_scores(rows_of(st.akk, st, s.batch, head, t, st.columns), akk, tokens, st.columns);
  take_rows(rows_of(st.dv_scan, st, s.batch, head, t, V), tokens, V, Vp, w.dv_new[0]);
  grad_solve(w, akk, 0, Vp);
  take_scores(rows_of(st.d_aqk, st, s.batch, head, t, st.columns), w.d_aqk[0], tokens, st.columns);
  take_rows(rows_of(st.v_new, st, s.batch, head, t, V), tokens, V, Vp, v_new);
  grad_scores(w, p, v_new, kLd, false);
  take_state(state_at(st.dh, p, s, i, head), p, 0, w.dh[0]);
  take_state(state_at(st.h, p, s, i, head), p, st.h_v_first, h);
  take_rows(rows_of(st.dq_raw, st, s.batch, head, t, K), tokens, K, Kp, dq_raw);
  grad_through_states(w, p, h, kLd, v_new, kLd, w.dh[0], dq_raw);
  grad_inside_chunk(w);
  const Source v = rows_or_gather(p.v, row_at(p.v, s.batch, t, head), tokens, c.rows, V, Vp, w.v[0]);
  finish_chunk(p, s, head, t, (s.chunk + i) * p.num_heads + head, v, w);
}

}  // namespace KCP_ISA
