// Built once per instruction set with -DKCP_ISA=<namespace> -DKCP_LANES=<floats per vector>. Everything but the table
// is static, and no std templates are used: a weak symbol compiled here could replace one of another instruction set.
#include "kernels.h"

#include "backward_head.h"
#include "layers.h"
#include "stages.h"

#define KCP_STRING(x) #x
#define KCP_NAME(x) KCP_STRING(x)

namespace KCP_ISA {

union alignas(64) Scratch {
  ForwardScratch forward;
  BackwardScratch backward;
  StageScratch stage;
  Scratch() {}
};

static float* saved_of(const Problem& p, long n, long head) {
  return p.cache ? saved_chunk(p, p.cache, p.sequences[n].chunk * p.num_heads + head).h : nullptr;
}
static void run_forward(const Problem& p, long n, long head, int first, int last, void* scratch) {
  forward_head(p, n, head, first, last, ((Scratch*)scratch)->forward, saved_of(p, n, head), p.num_heads,
               p.out.data != nullptr);
}
static void run_summary(const Problem& p, long n, long head, int first, int last, bool want_m, float* to, void* scratch) {
  summary_head(p, n, head, first, last, ((Scratch*)scratch)->forward, want_m, to);
}
static void run_backward(const Problem& p, long n, long head, float* priv, void* scratch) {
  Scratch& s = *(Scratch*)scratch;
  if (priv) forward_head(p, n, head, 0, (int)p.value_padded, s.forward, priv, 1, false);
  backward_head(p, n, head, priv ? priv : saved_of(p, n, head), priv ? 1 : p.num_heads, s.backward);
}
static void run_state_gradient(const Problem& p, long n, long head, int first, int last, bool keep, void* scratch) {
  state_gradient_head(p, n, head, first, last, saved_of(p, n, head), p.num_heads, keep, ((Scratch*)scratch)->backward);
}
static void run_backward_chunk(const Problem& p, long n, long head, long chunk, void* scratch) {
  BackwardScratch& w = ((Scratch*)scratch)->backward;
  const long slot = (p.sequences[n].chunk + chunk) * p.num_heads + head;
  begin_head(p, head, w.chunk);
  copy_rows(p.state_gradient + slot * p.key_padded * p.value_padded, p.value_padded, w.dh[0], kLd, p.key_padded,
            p.value_padded);
  const SavedChunk saved = saved_chunk(p, p.cache, slot);
  backward_chunk(p, n, head, chunk, saved, saved.h, false, w);
}
static void run_prepare(const Problem& p, const StageTensors& st, float scale, long n, long head, long chunk,
                        void* scratch) {
  stage_prepare(p, st, scale, n, head, chunk, ((Scratch*)scratch)->stage);
}
static void run_scan(const Problem& p, const StageTensors& st, long n, long head, void* scratch) {
  stage_scan(p, st, n, head, ((Scratch*)scratch)->stage);
}
static void run_out(const Problem& p, const StageTensors& st, long n, long head, long chunk, void* scratch) {
  stage_out(p, st, n, head, chunk, ((Scratch*)scratch)->stage);
}
static void run_grad_out(const Problem& p, const StageTensors& st, long n, long head, long chunk, void* scratch) {
  stage_grad_out(p, st, n, head, chunk, ((Scratch*)scratch)->backward);
}
static void run_grad_scan(const Problem& p, const StageTensors& st, long n, long head, void* scratch) {
  stage_grad_scan(p, st, n, head, ((Scratch*)scratch)->stage);
}
static void run_grad_inputs(const Problem& p, const StageTensors& st, long n, long head, long chunk, void* scratch) {
  stage_grad_inputs(p, st, n, head, chunk, ((Scratch*)scratch)->backward);
}
static void reduce_group(const Problem& p, const View& from, const View& to, long b, long t, long tokens,
                         long key_head) {
  const long group = p.group, first = key_head * group;
  store_rows(to, row_at(to, b, t, key_head), (int)tokens, (int)p.key_width, false, [&](int i, int d) {
    Vec sum = (Vec){};
    for (long h = first; h < first + group; h++) sum += load((const float*)row_at(from, b, t + i, h) + d);
    return sum;
  });
}

extern const Kernels table;
const Kernels table = {KCP_NAME(KCP_ISA),  sizeof(Scratch),    run_forward,     run_summary, run_backward,
                       run_state_gradient, run_backward_chunk, run_prepare,     run_scan,    run_out,
                       run_grad_out,       run_grad_scan,      run_grad_inputs, reduce_group,
                       norm_rows,          norm_rows_backward, glu,             glu_backward, conv,
                       conv_backward,      softmax_rows,       softmax_rows_backward, cross_entropy_rows,
                       cross_entropy_rows_backward, grouped_forward, grouped_input_gradient, grouped_weight_gradient};

}  // namespace KCP_ISA
