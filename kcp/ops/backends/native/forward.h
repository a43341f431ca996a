// Forward of one head of one sequence, chunk by chunk. With kx = k 2^G, per chunk
//     rb = beta (v - kx h)      v_new = Akk rb      o = scale q 2^G h + Aqk v_new      h <- 2^G_last h + (k
//     2^(G_last-G))^T v_new
// which is the textbook form without w = Akk (beta kx) and u = Akk (beta v): they are never formed.
// Columns of the state are independent, so the work goes in panels of 32 columns that stay in the nearest cache.
#pragma once
#include "scores.h"

namespace KCP_ISA {

enum { kPanel = 32 };

struct alignas(64) ForwardScratch {
  Chunk chunk;
  Mat rb, v_new, v, out;
  Rows<kMaxChunk, kMaxChunk> aqk, akk;
  Rows<kMaxWidth> h, m;
};

// v_new of one panel; no v stands for zeros; `keep`: a second copy, or nullptr
KCP_NOINLINE void panel_v_new(Chunk& c, const float* akk, const float* h, Source v, float* rb, float* v_new,
                              float* keep, long ld_keep) {
  const float* beta = c.beta;
  const Product kx_h{c.k_in[0], kLd, h, kLd, c.padded};
  if (v.at)
    multiply<false>(c.prefetch, c.rows, kPanel, kx_h,
                    [=](int i, int j, Vec x) { store(rb + i * kLd + j, (load(v.at + i * v.ld + j) - x) * beta[i]); });
  else
    multiply<false>(c.prefetch, c.rows, kPanel, kx_h,
                    [=](int i, int j, Vec x) { store(rb + i * kLd + j, x * -beta[i]); });
  multiply<false, kLower>(c.prefetch, c.rows, kPanel, {akk, kMaxChunk, rb, kLd, c.rows}, [=](int i, int j, Vec x) {
    store(v_new + i * kLd + j, x);
    if (keep) stream(keep + i * ld_keep + j, x);
  });
}
// o = scale q 2^G h + Aqk v_new
KCP_NOINLINE void panel_out(Chunk& c, const float* aqk, const float* h, const float* v_new, float* out) {
  multiply_add<false, false, kLower>(c.prefetch, c.rows, kPanel, {c.q_in[0], kLd, h, kLd, c.padded},
                                     {aqk, kMaxChunk, v_new, kLd, c.rows},
                                     [=](int i, int j, Vec x) { store(out + i * kLd + j, x); });
}
// h <- 2^G_last h + k_out^T v_new in place; `keep`: a second copy, or nullptr
KCP_NOINLINE void panel_advance(Chunk& c, const float* v_new, float* h, float* keep, long ld_keep) {
  const float* total = c.total;
  multiply<true>(c.prefetch, c.padded, kPanel, {c.k_out[0], kLd, v_new, kLd, c.rows}, [=](int i, int j, Vec x) {
    x += total[i] * load(h + i * kLd + j);
    store(h + i * kLd + j, x);
    if (keep) stream(keep + i * ld_keep + j, x);
  });
}

KCP_INLINE long saved_size(const Problem& p) {
  return p.key_padded * p.value_padded + p.chunk * (p.value_padded + 2 * kMaxChunk);
}
KCP_INLINE SavedChunk saved_chunk(const Problem& p, float* base, long slot) {
  float* h = base + slot * saved_size(p);
  float* v_new = h + p.key_padded * p.value_padded;
  float* aqk = v_new + p.chunk * p.value_padded;
  return {h, v_new, aqk, aqk + p.chunk * kMaxChunk};
}
KCP_INLINE long num_chunks(const Problem& p, const Sequence& s) { return (s.end - s.begin + p.chunk - 1) / p.chunk; }
KCP_INLINE int chunk_tokens(const Problem& p, const Sequence& s, long c) {
  const long left = s.end - s.begin - c * p.chunk;
  return left < p.chunk ? (int)left : p.chunk;
}
// rows of chunk c of a tensor, to be brought in while another chunk is worked on
KCP_INLINE void prefetch_chunk(Prefetch& f, const Problem& p, const View& x, const Sequence& s, long c, long head,
                               long width) {
  f.add(row_at(x, s.batch, s.begin + c * p.chunk, head), x.token, chunk_tokens(p, s, c), width * dtype_size(x.dtype));
}
KCP_INLINE void prefetch_gates(Prefetch& f, const Problem& p, const Sequence& s, long c, long head) {
  prefetch_chunk(f, p, p.q, s, c, head / p.group, p.key_width);
  prefetch_chunk(f, p, p.k, s, c, head / p.group, p.key_width);
  prefetch_chunk(f, p, p.g, s, c, head, p.key_width);
}
KCP_INLINE View columns_from(View x, long first) {
  if (x.data) x.data += first * dtype_size(x.dtype);
  return x;
}
KCP_INLINE const float* state_of(const float* states, const Problem& p, long n, long head) {
  return states ? states + (n * p.num_heads + head) * p.key_width * p.value_width : nullptr;
}

// blocks on and below the diagonal
KCP_NOINLINE void keep_scores(const float* from, int rows, float* to) {
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < (i & ~(kBlock - 1)) + kBlock; j += kLanes)
      stream(to + i * kMaxChunk + j, load(from + i * kMaxChunk + j));
}

// Value columns [first, last) of head `head` of sequence n, multiples of 32. saved: where chunk 0 keeps what the
// backward needs (nullptr: nowhere), the next chunk's slot being `slot_step` slots on. want_out = false computes the
// saved part alone.
KCP_NOINLINE void forward_head(const Problem& p, long n, long head, int first, int last, ForwardScratch& w,
                               float* saved, long slot_step, bool want_out) {
  const Sequence& s = p.sequences[n];
  const long chunks = num_chunks(p, s), Vp = p.value_padded;
  const int width = (int)(p.value_width < last ? p.value_width : last) - first;
  const View values = columns_from(p.v, first), out = columns_from(p.out, first);
  Chunk& c = w.chunk;
  begin_head(p, head, c);
  load_state(state_of(p.initial_state, p, n, head), p, w.h[0]);
  for (long i = 0; i < chunks; i++) {
    const long t = s.begin + i * p.chunk;
    const int tokens = chunk_tokens(p, s, i);
    const bool more = i + 1 < chunks;
    prepare_chunk<false>(p, s, head, t, tokens, c);
    SavedChunk now = {}, next = {};
    const float *aqk = w.aqk[0], *akk = w.akk[0];
    if (saved) {
      now = saved_chunk(p, saved, i * slot_step);
      if (more) next = saved_chunk(p, saved, (i + 1) * slot_step);
      if (i == 0) copy_rows(w.h[0] + first, kLd, now.h + first, Vp, p.key_padded, last - first);
    }
    c.prefetch.clear();
    if (more) prefetch_gates(c.prefetch, p, s, i + 1, head), prefetch_chunk(c.prefetch, p, values, s, i + 1, head, width);
    chunk_scores(c, p.scale, w.aqk[0], w.akk[0]);
    if (saved && first == 0) keep_scores(aqk, c.rows, now.aqk), keep_scores(akk, c.rows, now.akk);
    const Source v = rows_or_gather(p.v, row_at(values, s.batch, t, head), tokens, c.rows, width, last - first, w.v[0]);
    for (int j = first; j < last; j += kPanel) {
      float *h = w.h[0] + j, *v_new = w.v_new[0] + j;
      panel_v_new(c, akk, h, {v.at + j - first, v.ld}, w.rb[0] + j, v_new, saved ? now.v_new + j : nullptr, Vp);
      if (want_out) panel_out(c, aqk, h, v_new, w.out[0] + j);
      if (more || p.final_state) panel_advance(c, v_new, h, next.h ? next.h + j : nullptr, Vp);
    }
    if (want_out) scatter(w.out[0] + first, out, row_at(out, s.batch, t, head), tokens, width, p.streamed);
    if (more && p.inner_states && (i + 1) % kSegment == 0)
      store_state(w.h[0], p, first, last,
                  (float*)state_of(p.inner_states, p, s.inner + (i + 1) / kSegment - 1, head));
  }
  if (want_out && p.final_state) store_state(w.h[0], p, first, last, (float*)state_of(p.final_state, p, n, head));
}

// Affine summary of one head: h_out = M h_in + E. E is the forward from the initial state (or 0), M the same chunk step
// from the identity with v = 0. Writes [K, V+K], or [K, V] without M. [first, last) are columns, multiples of 32, of E and
// M next to each other, each padded to a multiple of 32.
KCP_NOINLINE void summary_head(const Problem& p, long n, long head, int first, int last, ForwardScratch& w, bool want_m,
                               float* summary) {
  const Sequence& s = p.sequences[n];
  const long chunks = num_chunks(p, s), K = p.key_width, V = p.value_width, Vp = p.value_padded, ld = want_m ? V + K : V;
  Chunk& c = w.chunk;
  begin_head(p, head, c);
  load_state(state_of(p.initial_state, p, n, head), p, w.h[0]);
  zero_rows(w.m[0], kLd, p.key_padded, p.key_padded);
  for (long d = 0; d < K; d++) w.m[d][d] = 1.f;
  for (long i = 0; i < chunks; i++) {
    const long t = s.begin + i * p.chunk;
    const int tokens = chunk_tokens(p, s, i);
    prepare_chunk<false>(p, s, head, t, tokens, c);
    c.prefetch.clear();
    if (i + 1 < chunks)
      prefetch_gates(c.prefetch, p, s, i + 1, head), prefetch_chunk(c.prefetch, p, p.v, s, i + 1, head, V);
    chunk_scores(c, p.scale, w.aqk[0], w.akk[0]);
    Source v = {};
    if (first < Vp)
      v = rows_or_gather(p.v, row_at(p.v, s.batch, t, head), tokens, c.rows, (int)V, (int)Vp, w.v[0]);
    for (int j = first; j < last; j += kPanel) {
      const bool of_m = j >= Vp;
      float* h = of_m ? w.m[0] + j - Vp : w.h[0] + j;
      panel_v_new(c, w.akk[0], h, of_m ? Source{} : Source{v.at + j, v.ld}, w.rb[0], w.v_new[0], nullptr, 0);
      panel_advance(c, w.v_new[0], h, nullptr, 0);
    }
  }
  float* to = summary + (n * p.num_heads + head) * K * ld;
  const long e_end = last < V ? last : V, m_begin = first > Vp ? first - Vp : 0, m_end = last - Vp < K ? last - Vp : K;
  for (long d = 0; d < K; d++) {
    if (first < e_end) memcpy(to + d * ld + first, w.h[d] + first, (e_end - first) * sizeof(float));
    if (m_begin < m_end) memcpy(to + d * ld + V + m_begin, w.m[d] + m_begin, (m_end - m_begin) * sizeof(float));
  }
}

}  // namespace KCP_ISA
