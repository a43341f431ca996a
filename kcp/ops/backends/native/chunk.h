// One chunk of one head: rows gathered, normalised, gated, and multiplied by their decays.
//
// Decays. a_t is the natural-log decay of token t, e_t = 2^(a_t / ln 2) its one-token decay, G the running sum of a /
// ln 2 inside the chunk. Blocks I = 0..3 hold 16 tokens; end(I) is the last row of block I. All factors below are <= 1:
//     to[I]   = 2^G_end(I-1)                 from chunk start to the start of block I
//     from[J] = 2^(G_last - G_end(J))        from the end of block J to the end of the chunk
//     over1, over2 = decay across block 1, 2
//     pre_i   = 2^(G_i - G_end(I-1))         from the start of row i's block to row i, a product of at most 16 factors
//     e suf_j   = 2^(G_end(J) - G_j)           from row j to the end of its block
// Decays between blocks come from exact sums of exponents, because products of many e would round systematically.
// Pairs (i, j) in different blocks factor at a reference row between them: row 31 for rows 32..63 against 0..31,
// rows 15 and 47 for block 1 against 0 and block 3 against 2.
#pragma once
#include "product.h"
#include "rows.h"

namespace KCP_ISA {

enum { kHalf = 32, kLdT = 80, kPairs = 144 };

// Scratch matrix. Its size is an odd number of cache lines, so that the same row of two matrices never lies a multiple
// of 4096 bytes apart: such accesses would share a cache set, and a load would wait for an unrelated store.
template <int kRowCount, int kLength = kLd>
struct alignas(64) Rows {
  float rows[kRowCount][kLength];
  float skew[5 * 16];
  float* operator[](long i) { return rows[i]; }
  const float* operator[](long i) const { return rows[i]; }
};
typedef Rows<kMaxChunk> Mat;

struct alignas(64) Chunk {
  int rows, blocks, padded, tokens;  // rows = 16 blocks >= tokens; padded = K rounded up to 32
  Mat q, k, e;                       // normalised q and k (see Keep); one-token decays
  Source q_rows, k_rows;             // where the diagonal scores read q and k,
  float q_factor[kMaxChunk], k_factor[kMaxChunk];  // and what normalises these rows
  Mat q_pre, k_pre;                  // q pre, k pre; blocks 1 and 3 only
  Mat k_suf;                         // k suf
  Mat q_in, k_in, k_out;             // scale q 2^G, k 2^G, k 2^(G_last - G)
  Rows<kHalf> q_far, k_far;          // rows 32..63 from row 31 on: pre, times over2 in block 3
  Rows<kHalf> k_near;                // rows 0..31 up to row 31: suf, times over1 in block 0
  Mat gate_slope, gate_slope_log;    // backward: d a / d raw gate, d a / d a_log
  float to[4][kMaxWidth], from[4][kMaxWidth], over1[kMaxWidth], over2[kMaxWidth], total[kMaxWidth];
  float beta[kMaxChunk], beta_slope[kMaxChunk], q_rstd[kMaxChunk], k_rstd[kMaxChunk];
  Rows<kMaxWidth, kLdT> k_T;         // transposed keys: [k_near (32) | k_suf of block 0 | k_suf of block 2]
  Rows<kMaxChunk, kMaxChunk> lower;  // L
  float square[kHalf][kHalf];
  float pairs[2][kPairs][kLanes];
  float bias[kMaxWidth], gate_gain;  // dt_bias, exp(a_log) of the head
  alignas(64) Prefetch prefetch;     // last: everything above starts on a cache line
};

KCP_NOINLINE void begin_head(const Problem& p, long head, Chunk& c) {
  c.padded = (int)p.key_padded;
  c.gate_gain = p.a_log ? __builtin_expf(p.a_log[head]) : 1.f;
  fill_zero(c.bias, c.padded);
  if (p.gate != kGateNone && p.dt_bias) memcpy(c.bias, p.dt_bias + head * p.key_width, p.key_width * sizeof(float));
  c.prefetch.clear();
}

// log2 decay of raw gate x, and for the backward slope = d a / d x, slope_log = d a / d a_log
template <bool backward, int gate>
KCP_INLINE Vec log2_decay(float lower_bound, float gain, Vec x, Vec& slope, Vec& slope_log) {
  const float log2e = 1.4426950408889634f;
  if (gate == kGateNone) {
    slope = splat(1.f);
    slope_log = (Vec){};
    return x * log2e;
  }
  if (gate == kGateLowerBound) {  // a = lower_bound sigmoid(gain x)
    Vec t;
    const Vec s = sigmoid(x * gain, t);
    if (backward) {
      slope = (t * s) * s * (lower_bound * gain);
      slope_log = slope * x;
    }
    return s * (lower_bound * log2e);
  }
  // a = -gain softplus(x), softplus(x) = max(x, 0) + log(1 + e^-|x|)
  const Vec t = exp2v(absolute(x) * -log2e), r = reciprocal(1.f + t), s = select(x >= 0.f, r, t * r);
  const Vec a = (select(x > 0.f, x, (Vec){}) + log1p_unit(t)) * -gain;
  if (backward) {
    slope = s * -gain;
    slope_log = a;
  }
  return a * log2e;
}

// raw gates -> one-token decays c.e; sums[I][d] = log2 decay across block I. Rows past `tokens` do not decay.
template <bool backward, int gate>
KCP_NOINLINE void decay_rows(const Problem& p, Source g, Chunk& c, float (*sums)[kMaxWidth]) {
  for (int I = 0; I < c.blocks; I++) {
    const int b = I * kBlock, n = c.tokens - b < kBlock ? c.tokens - b : kBlock;
    for (int d = 0; d < c.padded; d += kLanes) {
      Vec sum = (Vec){};
      const Vec bias = load(c.bias + d);
      _Pragma("GCC unroll 4") for (int i = b; i < b + n; i++) {
        Vec slope, slope_log;
        const Vec x = load(g.at + i * g.ld + d) + bias;
        const Vec decay = log2_decay<backward, gate>(p.lower_bound, c.gate_gain, x, slope, slope_log);
        sum += decay;
        store(&c.e[i][d], exp2v(decay));
        if (backward) store(&c.gate_slope[i][d], slope), store(&c.gate_slope_log[i][d], slope_log);
      }
      for (int i = b + n; i < b + kBlock; i++) store(&c.e[i][d], splat(1.f));
      store(&sums[I][d], sum);
    }
  }
}

// x rstd with rstd = 1 / sqrt(sum x^2 + epsilon): only rstd here, the product is taken with the decays
KCP_NOINLINE void row_rstd(Source x, int rows, int width, float epsilon, float (*partial)[kLanes], float* rstd) {
  for (int b = 0; b < rows; b += kBlock) {
    for (int i = 0; i < kBlock; i++) {
      Vec s = (Vec){}, t = (Vec){};
      for (int d = 0; d < width; d += 2 * kLanes) {
        const Vec x0 = load(x.at + (b + i) * x.ld + d), x1 = load(x.at + (b + i) * x.ld + d + kLanes);
        s += x0 * x0;
        t += x1 * x1;
      }
      store(partial[i], s + t);
    }
    float sums[kBlock];
    lane_sums(partial, kBlock, sums);
    for (int i = 0; i < kBlock; i++) rstd[b + i] = 1.f / __builtin_sqrtf(sums[i] + epsilon);
  }
}

// Whether normalised q and k are written to Chunk::q and k. The forward does without where its rows lie close together.
enum Keep { kRawRows, kNormalised };

// q, k times their decays, two vectors of columns at a time, block by block: what a block reads and writes stays in the
// nearest cache between its pass down (pre) and its pass up (suf)
template <bool backward, int keep>
KCP_NOINLINE void apply_decays(const Problem& p, Source q, Source k, Chunk& c, const float (*sums)[kMaxWidth]) {
  enum { W = 2 };
  const int blocks = c.blocks;
  const float scale = p.scale;
  for (int d0 = 0; d0 < c.padded; d0 += W * kLanes) {
    Vec before[W], over1[W], over2[W];  // before: log2 decay from the start of the chunk to the block
    KCP_UNROLL for (int w = 0; w < W; w++) {
      const int d = d0 + w * kLanes;
      Vec after = (Vec){};  // from the end of the block to the end of the chunk
      for (int I = blocks - 1; I >= 0; I--) store(&c.from[I][d], exp2v(after)), after += load(&sums[I][d]);
      before[w] = (Vec){};
      over1[w] = blocks > 1 ? exp2v(load(&sums[1][d])) : splat(1.f);
      over2[w] = blocks > 2 ? exp2v(load(&sums[2][d])) : splat(1.f);
      store(&c.over1[d], over1[w]), store(&c.over2[d], over2[w]);
    }
    for (int I = 0; I < blocks; I++) {
      Vec run[W], to[W], from[W];
      KCP_UNROLL for (int w = 0; w < W; w++) {
        const int d = d0 + w * kLanes;
        run[w] = splat(1.f);
        store(&c.to[I][d], to[w] = exp2v(before[w]));
        from[w] = load(&c.from[I][d]);
        before[w] += load(&sums[I][d]);
      }
      for (int i = I * kBlock; i < (I + 1) * kBlock; i++) {
        const float rq = c.q_rstd[i], rk = c.k_rstd[i];
        KCP_UNROLL for (int w = 0; w < W; w++) {
          const int d = d0 + w * kLanes;
          Vec x = load(q.at + i * q.ld + d) * rq, y = load(k.at + i * k.ld + d) * rk;
          if (keep) store(&c.q[i][d], x), store(&c.k[i][d], y);
          run[w] *= load(&c.e[i][d]);
          x *= run[w], y *= run[w];
          if (I & 1) store(&c.q_pre[i][d], x), store(&c.k_pre[i][d], y);
          if (I == 2) store(&c.q_far[i - kHalf][d], x), store(&c.k_far[i - kHalf][d], y);
          if (I == 3) store(&c.q_far[i - kHalf][d], x * over2[w]), store(&c.k_far[i - kHalf][d], y * over2[w]);
          store(&c.q_in[i][d], x * to[w] * scale), store(&c.k_in[i][d], y * to[w]);
        }
      }
      KCP_UNROLL for (int w = 0; w < W; w++) run[w] = splat(1.f);
      for (int i = (I + 1) * kBlock - 1; i >= I * kBlock; i--) KCP_UNROLL for (int w = 0; w < W; w++) {
          const int d = d0 + w * kLanes;
          const Vec x = (keep ? load(&c.k[i][d]) : load(k.at + i * k.ld + d) * c.k_rstd[i]) * run[w];
          if (backward || !(I & 1)) store(&c.k_suf[i][d], x);
          if (I == 0 && blocks > 2) store(&c.k_near[i][d], x * over1[w]);
          if (I == 1 && blocks > 2) store(&c.k_near[i][d], x);
          store(&c.k_out[i][d], x * from[w]);
          run[w] *= load(&c.e[i][d]);
        }
    }
    KCP_UNROLL for (int w = 0; w < W; w++) store(&c.total[d0 + w * kLanes], exp2v(before[w]));
  }
}

// Tokens t..t+n of head h of sequence s. Padded rows are inert: q = k = 0, beta = 0, no decay.
template <bool backward, int keep = backward ? kNormalised : kRawRows>
KCP_NOINLINE void prepare_chunk(const Problem& p, const Sequence& s, long head, long t, int n, Chunk& c) {
  const int width = (int)p.key_width, padded = c.padded;
  float sums[4][kMaxWidth];
  c.tokens = n;
  c.blocks = (n + kBlock - 1) / kBlock;
  c.rows = c.blocks * kBlock;
  const Source q = rows_or_gather(p.q, row_at(p.q, s.batch, t, head / p.group), n, c.rows, width, padded, c.q[0]);
  const Source k = rows_or_gather(p.k, row_at(p.k, s.batch, t, head / p.group), n, c.rows, width, padded, c.k[0]);
  const Source g = rows_or_gather(p.g, row_at(p.g, s.batch, t, head), n, c.rows, width, padded, c.e[0]);
  for (int i = 0; i < n; i++) c.beta[i] = load_scalar(row_at(p.beta, s.batch, t + i, head), p.beta.dtype);
  if (p.beta_sigmoid)
    for (int i = 0; i < c.rows; i += kLanes) {
      Vec t1;
      const Vec s1 = sigmoid(load(c.beta + i), t1), effective = s1 * (p.neg_eigval ? 2.f : 1.f);
      store(c.beta + i, effective);
      store(c.beta_slope + i, effective * (t1 * s1));
    }
  for (int i = n; i < c.rows; i++) c.beta[i] = 0.f;
  if (p.l2norm) {
    row_rstd(q, c.rows, padded, p.epsilon, c.pairs[0], c.q_rstd);
    row_rstd(k, c.rows, padded, p.epsilon, c.pairs[0], c.k_rstd);
  } else {
    for (int i = 0; i < c.rows; i++) c.q_rstd[i] = c.k_rstd[i] = 1.f;
  }
  if (p.gate == kGateLowerBound) decay_rows<backward, kGateLowerBound>(p, g, c, sums);
  else if (p.gate == kGateSoftplus) decay_rows<backward, kGateSoftplus>(p, g, c, sums);
  else decay_rows<backward, kGateNone>(p, g, c, sums);
  const bool close = q.ld <= kLd && k.ld <= kLd;  // rows a page apart would share their cache sets
  if (keep == kRawRows && close) {
    c.q_rows = q, c.k_rows = k;
    memcpy(c.q_factor, c.q_rstd, sizeof c.q_factor), memcpy(c.k_factor, c.k_rstd, sizeof c.k_factor);
    apply_decays<backward, kRawRows>(p, q, k, c, sums);
  } else {
    c.q_rows = {c.q[0], kLd}, c.k_rows = {c.k[0], kLd};
    for (int i = 0; i < c.rows; i++) c.q_factor[i] = c.k_factor[i] = 1.f;
    apply_decays<backward, kNormalised>(p, q, k, c, sums);
  }
}

}  // namespace KCP_ISA
