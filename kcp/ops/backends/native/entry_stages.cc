// Entry points of the explicit stages. Caches are float32 and head-major; see docs/ops.md for every argument.
#include "entry.h"

namespace kcp {
namespace {

StageTensors stage_tensors(const Call& call, const Sizes& n, int columns_of) {
  StageTensors st = {};
  st.tokens = n.tokens;
  st.heads = n.heads;
  st.key_heads = n.key_heads;
  st.use_exp2 = (int)call.option(kUseExp2);
  st.h_v_first = (int)call.option(kStateVFirst);
  st.columns = columns_of ? (int)call.dim(columns_of, -1) : 0;
  return st;
}
// float32 tensor i holds width numbers for every token and head
float* token_rows(const Call& call, int i, const Sizes& n, long heads, long width) {
  return call.floats(i, true, n.batch * heads * n.tokens * width);
}
long state_floats(const Problem& p) { return p.num_sequences * p.num_heads * p.key_width * p.value_width; }
// states of every chunk; with boundaries in a tensor there may be room for more chunks than there are: zeros if it is a
// result
float* chunk_states(const Call& call, int i, const Problem& p, const Sizes& n, bool result) {
  const long used = n.num_chunks * p.num_heads * p.key_width * p.value_width;
  float* x = call.floats(i, true, used);
  if (result) memset(x + used, 0, (call.size(i) - used) * sizeof(float));
  return x;
}
void check_columns(const Problem& p, const StageTensors& st) {
  if (st.columns != p.chunk) Call::fail("Aqk and Akk have %d columns, the chunk %d tokens", st.columns, p.chunk);
}
void each_head(const Problem& p, const std::function<void(long, long, void*)>& work) {
  run_items(p.num_sequences * p.num_heads,
            [&](long item, void* scratch) { work(item / p.num_heads, item % p.num_heads, scratch); });
}

void prepare(const Call& call) {
  call.expect(23);
  Problem p = {};
  std::vector<Sequence> sequences;
  const Sizes n = read_problem(call, p, sequences);
  const long K = p.key_width, V = p.value_width;
  StageTensors st = stage_tensors(call, n, 11);
  check_columns(p, st);
  st.gk = token_rows(call, 10, n, n.heads, K);
  st.aqk = token_rows(call, 11, n, n.heads, p.chunk);
  st.akk = token_rows(call, 12, n, n.heads, p.chunk);
  st.w = token_rows(call, 13, n, n.heads, K);
  st.u = token_rows(call, 14, n, n.heads, V);
  st.qg = token_rows(call, 15, n, n.heads, K);
  st.kg = token_rows(call, 16, n, n.heads, K);
  st.qg_scaled = token_rows(call, 17, n, n.heads, K);
  st.q_hat = token_rows(call, 18, n, n.key_heads, K);
  st.k_hat = token_rows(call, 19, n, n.key_heads, K);
  st.q_rstd = call.floats(20, true, p.l2norm ? n.batch * n.key_heads * n.tokens : 1);
  st.k_rstd = call.floats(21, true, p.l2norm ? n.batch * n.key_heads * n.tokens : 1);
  if (!p.l2norm) st.q_rstd[0] = st.k_rstd[0] = 0.f;
  st.beta = token_rows(call, 22, n, n.heads, 1);
  const float scale = p.scale;
  p.scale = 1.f;
  run_chunks(p, n, [&](long s, long h, long i, void* scratch) { kernels().prepare(p, st, scale, s, h, i, scratch); });
}

// options, kg, w, u, gk, initial state, boundaries -> h, v_new, final state  or  [E | M]
void scan(const Call& call, bool summary) {
  call.expect(summary ? 8 : 10);
  Problem p = {};
  std::vector<Sequence> sequences;
  const Sizes n = read_caches(call, p, sequences, call.dim(1, -1), 3, 6);
  const long K = p.key_width, V = p.value_width;
  StageTensors st = stage_tensors(call, n, 0);
  st.kg = token_rows(call, 1, n, n.heads, K);
  st.w = token_rows(call, 2, n, n.heads, K);
  st.u = token_rows(call, 3, n, n.heads, V);
  st.gk = token_rows(call, 4, n, n.heads, K);
  p.initial_state = call.floats(5, call.has(kHasInitialState), state_floats(p));
  if (summary) {
    st.summary = call.floats(7, true, p.num_sequences * n.heads * K * (V + K));
  } else {
    st.h = chunk_states(call, 7, p, n, true);
    st.v_new = token_rows(call, 8, n, n.heads, V);
    p.final_state = call.floats(9, true, state_floats(p));
  }
  each_head(p, [&](long s, long h, void* scratch) { kernels().scan(p, st, s, h, scratch); });
}

// options, scale qg, Aqk, v_new, h, boundaries -> out
void finalize(const Call& call) {
  call.expect(7);
  Problem p = {};
  std::vector<Sequence> sequences;
  const Sizes n = read_caches(call, p, sequences, call.dim(1, -1), 3, 5);
  StageTensors st = stage_tensors(call, n, 2);
  check_columns(p, st);
  st.qg_scaled = token_rows(call, 1, n, n.heads, p.key_width);
  st.aqk = token_rows(call, 2, n, n.heads, p.chunk);
  st.v_new = token_rows(call, 3, n, n.heads, p.value_width);
  st.h = chunk_states(call, 4, p, n, false);
  p.out = call.view(6, call.option(kHeadMajor), n, n.heads, p.value_width);
  run_chunks(p, n, [&](long s, long h, long i, void* scratch) { kernels().out(p, st, s, h, i, scratch); });
}

// options, Aqk, v_new, do, h, boundaries -> dAqk, dv_local, dq_raw
void backward_prepare(const Call& call) {
  call.expect(9);
  Problem p = {};
  std::vector<Sequence> sequences;
  const Sizes n = read_caches(call, p, sequences, call.dim(8, -1), 2, 5);
  StageTensors st = stage_tensors(call, n, 1);
  check_columns(p, st);
  st.aqk = token_rows(call, 1, n, n.heads, p.chunk);
  st.v_new = token_rows(call, 2, n, n.heads, p.value_width);
  p.d_out = call.view(3, call.option(kHeadMajor), n, n.heads, p.value_width);
  st.h = chunk_states(call, 4, p, n, false);
  st.d_aqk = token_rows(call, 6, n, n.heads, p.chunk);
  st.dv = token_rows(call, 7, n, n.heads, p.value_width);
  st.dq_raw = token_rows(call, 8, n, n.heads, p.key_width);
  run_chunks(p, n, [&](long s, long h, long i, void* scratch) { kernels().grad_out(p, st, s, h, i, scratch); });
}

// options, qg, kg, w, do, dv_local, gk, final-state gradient, boundaries -> dh, dh0, dv_scan  or  [dE | dM]
void backward_scan(const Call& call, bool summary) {
  call.expect(summary ? 10 : 12);
  Problem p = {};
  std::vector<Sequence> sequences;
  const Sizes n = read_caches(call, p, sequences, call.dim(1, -1), 5, 8);
  const long K = p.key_width, V = p.value_width;
  StageTensors st = stage_tensors(call, n, 0);
  st.qg = token_rows(call, 1, n, n.heads, K);
  st.kg = token_rows(call, 2, n, n.heads, K);
  st.w = token_rows(call, 3, n, n.heads, K);
  p.d_out = call.view(4, true, n, n.heads, V);
  st.dv = token_rows(call, 5, n, n.heads, V);
  st.gk = token_rows(call, 6, n, n.heads, K);
  p.d_final_state = call.floats(7, call.has(kHasDFinalState), state_floats(p));
  if (summary) {
    st.summary = call.floats(9, true, p.num_sequences * n.heads * K * (V + K));
  } else {
    st.dh = chunk_states(call, 9, p, n, true);
    p.d_initial_state = call.floats(10, true, state_floats(p));
    st.dv_scan = token_rows(call, 11, n, n.heads, V);
  }
  each_head(p, [&](long s, long h, void* scratch) { kernels().grad_scan(p, st, s, h, scratch); });
}

// options, q_hat, k_hat, v, raw g, beta, a_log, dt_bias, -, boundaries, Akk, v_new, h, dh, dv_scan, dAqk, dq_raw,
// q_rstd, k_rstd
// -> dq, dk, dv, dbeta, dg, da_log, ddt_bias
void backward_finalize(const Call& call) {
  call.expect(26);
  Problem p = {};
  std::vector<Sequence> sequences;
  const Sizes n = read_problem(call, p, sequences);
  const long K = p.key_width, V = p.value_width;
  const bool head_major = !call.has(kOutTokenMajor);
  StageTensors st = stage_tensors(call, n, 10);
  check_columns(p, st);
  st.akk = token_rows(call, 10, n, n.heads, p.chunk);
  st.v_new = token_rows(call, 11, n, n.heads, V);
  st.h = chunk_states(call, 12, p, n, false);
  st.dh = chunk_states(call, 13, p, n, false);
  st.dv_scan = token_rows(call, 14, n, n.heads, V);
  st.d_aqk = token_rows(call, 15, n, n.heads, p.chunk);
  st.dq_raw = token_rows(call, 16, n, n.heads, K);
  st.q_rstd = call.floats(17, p.l2norm, n.batch * n.key_heads * n.tokens);
  st.k_rstd = call.floats(18, p.l2norm, n.batch * n.key_heads * n.tokens);
  const View dq = call.view(19, head_major, n, n.key_heads, K), dk = call.view(20, head_major, n, n.key_heads, K);
  p.dq = dq, p.dk = dk;
  p.dv = call.view(21, head_major, n, n.heads, V);
  p.dbeta = call.view(22, head_major, n, n.heads, 1, true);
  p.dg = call.view(23, head_major, n, n.heads, K);
  const WideGradients wide(p, n);
  const Buffer parts = allocate(n.num_chunks * n.heads * (1 + K));
  p.d_parameters = parts.get();
  run_chunks(p, n, [&](long s, long h, long i, void* scratch) { kernels().grad_inputs(p, st, s, h, i, scratch); });
  if (p.group > 1) reduce_groups(p, n, p.dq, dq), reduce_groups(p, n, p.dk, dk);
  float *da_log = call.floats(24, true, call.has(kHasALog) ? n.heads : 1),
        *ddt_bias = call.floats(25, true, call.has(kHasDtBias) ? n.heads * K : 1);
  sum_parameters(parts.get(), 1 + K, 1, call.has(kHasALog), n.heads, n.num_chunks, da_log, call.size(24));
  sum_parameters(parts.get() + 1, 1 + K, K, call.has(kHasDtBias), n.heads, n.num_chunks, ddt_bias, call.size(25));
}

}  // namespace
}  // namespace kcp

#define KCP_STAGE(name, body)           \
  KCP_ENTRY(name) {                     \
    return kcp::guarded([&] { body; }); \
  }
#define KCP_CALL kcp::Call(count, data, ranks, shapes, dtypes)
KCP_STAGE(kcp_fwd_prepare, kcp::prepare(KCP_CALL))
KCP_STAGE(kcp_pre_process_fwd, kcp::scan(KCP_CALL, true))
KCP_STAGE(kcp_fwd_h, kcp::scan(KCP_CALL, false))
KCP_STAGE(kcp_fwd_finalize, kcp::finalize(KCP_CALL))
KCP_STAGE(kcp_bwd_prepare, kcp::backward_prepare(KCP_CALL))
KCP_STAGE(kcp_pre_process_bwd, kcp::backward_scan(KCP_CALL, true))
KCP_STAGE(kcp_bwd_dhu, kcp::backward_scan(KCP_CALL, false))
KCP_STAGE(kcp_bwd_finalize, kcp::backward_finalize(KCP_CALL))
