// Entry points of the fused operators: forward, backward, forward summary, backward summary. Inputs 0..9 of all four are
// options, q, k, v, g, beta, a_log, dt_bias, state, cu_seqlens (absent ones are any one-element tensor); outputs and states
// hold the heads of the range only.
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "entry.h"

namespace kcp {
namespace {

const Kernels* choose() {
#if defined(__x86_64__)
  const char* wish = getenv("KCP_ISA");
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bw");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx512 && (!wish || !strcmp(wish, "avx512"))) return &kcp_avx512::table;
  if (avx2 && (!wish || strcmp(wish, "baseline"))) return &kcp_avx2::table;
#endif
  return &kcp_baseline::table;
}

// Denormals cost microcode on some processors, and decays produce many. Restored on exit.
class FlushDenormals {
#if defined(__SSE__)
 public:
  FlushDenormals() : old_(_mm_getcsr()) { _mm_setcsr(old_ | 0x8040); }
  ~FlushDenormals() {
    _mm_setcsr(old_);
    _mm_sfence();  // streamed stores are seen by whoever learns that the item is done
  }

 private:
  unsigned old_;
#elif defined(__aarch64__)
 public:
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(old_));
    asm volatile("msr fpcr, %0" ::"r"(old_ | (1ul << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(old_)); }

 private:
  unsigned long old_;
#endif
};

// floats saved per chunk and head, and in all
long slot_floats(const Problem& p) { return p.key_padded * p.value_padded + kMaxChunk * p.value_padded + 2 * kMaxChunk * kMaxChunk; }
long saved_floats(const Problem& p, const Sizes& n) { return n.num_chunks * p.num_heads * slot_floats(p); }
// The slots of a cache tensor start on the first cache line after its first number, which says where that is: the tensor
// may have moved when the backward reads it.
const long kCacheHeader = 32;
float* cache_slots(const Call& call, int i, const Problem& p, const Sizes& n, bool fresh) {
  float* base = call.floats(i, call.has(kHasCache), saved_floats(p, n) + kCacheHeader);
  if (!base) return nullptr;
  if (fresh) base[0] = (float)(((((uintptr_t)base + 4) + 63) / 64 * 64 - (uintptr_t)base) / 4);
  if (!(base[0] >= 1 && base[0] < kCacheHeader)) Call::fail("tensor %d is not a cache of the forward", i);
  return base + (long)base[0] - n.head_begin * slot_floats(p);
}
long state_floats(const Problem& p) { return p.num_sequences * p.num_heads * p.key_width * p.value_width; }

// a pointer that absolute head numbers index, to a tensor that starts at the first head of the range
template <class T>
T* at_first_head(T* x, const Sizes& n, long floats_per_head) {
  return x ? x - n.head_begin * floats_per_head : nullptr;
}
template <class Work>
void each_head(const Problem& p, const Sizes& n, int columns, Work work) {
  const long parts = (p.value_padded + columns - 1) / columns;
  run_items(p.num_sequences * p.num_heads * parts, [&](long item, void* scratch) {
    const long part = item % parts, head = n.head_begin + item / parts % p.num_heads, sequence = item / parts / p.num_heads;
    const int first = (int)part * columns, last = first + columns;
    work(sequence, head, first, last < p.value_padded ? last : (int)p.value_padded, scratch);
  });
}
void forward_columns(const Problem& p, const Sizes& n) {
  each_head(p, n, columns_per_item(p, p.num_sequences * p.num_heads),
            [&](long s, long h, int first, int last, void* scratch) { kernels().forward(p, s, h, first, last, scratch); });
}

void forward(const Call& call) {
  call.expect(13);
  Problem p = {};
  std::vector<Sequence> sequences;
  const Sizes n = read_problem(call, p, sequences, kMaxChunk);
  const long state = p.key_width * p.value_width;
  p.initial_state = at_first_head(call.floats(8, call.has(kHasInitialState), state_floats(p)), n, state);
  p.out = call.view(10, false, false, n.head_begin);
  p.final_state = at_first_head(call.floats(11, call.has(kWantFinalState), state_floats(p)), n, state);
  p.cache = cache_slots(call, 12, p, n, true);
  forward_columns(p, n);
  zero_tail(p, n, p.out, p.value_width, n.head_begin, p.num_heads);
}

void summary(const Call& call) {
  call.expect(11);
  Problem p = {};
  std::vector<Sequence> sequences;
  const Sizes n = read_problem(call, p, sequences, kMaxChunk);
  const bool want_m = call.has(kWantM);
  const long K = p.key_width, width = p.value_width + (want_m ? K : 0);
  p.initial_state = at_first_head(call.floats(8, call.has(kHasInitialState), state_floats(p)), n, K * p.value_width);
  float* to = at_first_head(call.floats(10, true, p.num_sequences * p.num_heads * K * width), n, K * width);
  each_head(p, n, (int)p.value_padded, [&](long s, long h, int, int, void* scratch) { kernels().summary(p, s, h, want_m, to, scratch); });
}

// q, k gradients of several value heads -> their key head
void reduce_groups(const Problem& p, const Sizes& n, const View& from, const View& to) {
  const long strip = 256, strips = (n.tokens + strip - 1) / strip, key_heads = p.num_heads / p.group;
  run_items(n.batch * key_heads * strips, [&](long item, void*) {
    const long t = item % strips * strip, h = n.head_begin / p.group + item / strips % key_heads, b = item / strips / key_heads;
    kernels().reduce_group(p, from, to, b, t, n.tokens - t < strip ? n.tokens - t : strip, h);
  });
}

// Few heads for the threads: the dh recurrence over value columns first, then all chunks at once.
void backward_wide(Problem& p, const Sizes& n) {
  Buffer saved, states = allocate(n.num_chunks * p.num_heads * p.key_padded * p.value_padded);
  if (!p.cache) {
    saved = allocate(saved_floats(p, n));
    p.cache = at_first_head(saved.get(), n, slot_floats(p));
    forward_columns(p, n);
  }
  p.state_gradient = at_first_head(states.get(), n, p.key_padded * p.value_padded);
  each_head(p, n, columns_per_item(p, p.num_sequences * p.num_heads),
            [&](long s, long h, int first, int last, void* scratch) { kernels().state_gradient(p, s, h, first, last, true, scratch); });
  std::vector<long> owner;
  for (long s = 0; s < p.num_sequences; s++)
    for (long t = p.sequences[s].begin; t < p.sequences[s].end; t += kMaxChunk) owner.push_back(s);
  run_items(n.num_chunks * p.num_heads, [&](long item, void* scratch) {
    const long chunk = item / p.num_heads, s = owner[chunk];
    kernels().backward_chunk(p, s, n.head_begin + item % p.num_heads, chunk - p.sequences[s].chunk, scratch);
  });
}

// to[head][0..width) = the sum over the chunks of parts[chunk][head][0..ld), always in the same order; zeros if not wanted
void sum_parameters(const float* parts, long ld, long width, bool wanted, long heads, long chunks, float* to, long size) {
  if (!wanted) {
    memset(to, 0, size * sizeof(float));
    return;
  }
  for (long i = 0; i < heads * width; i++) {
    double sum = 0;
    for (long c = 0; c < chunks; c++) sum += parts[(c * heads + i / width) * ld + i % width];
    to[i] = (float)sum;
  }
}

void backward(const Call& call) {
  call.expect(21);
  Problem p = {};
  std::vector<Sequence> sequences;
  const Sizes n = read_problem(call, p, sequences, kMaxChunk);
  const bool head_major = call.option(kHeadMajor);
  const long K = p.key_width, V = p.value_width, heads = p.num_heads, rows = n.batch * n.tokens;
  p.initial_state = at_first_head(call.floats(8, call.has(kHasInitialState), state_floats(p)), n, K * V);
  p.d_out = call.view(10, false, false, 0);
  p.d_final_state = at_first_head(call.floats(11, call.has(kHasDFinalState), state_floats(p)), n, K * V);
  p.cache = cache_slots(call, 12, p, n, false);
  const View dq = call.view(13, head_major, false, n.head_begin / p.group), dk = call.view(14, head_major, false, n.head_begin / p.group);
  p.dq = dq, p.dk = dk;
  p.dv = call.view(15, head_major, false, n.head_begin);
  p.dg = call.view(16, head_major, false, n.head_begin);
  p.dbeta = call.view(17, head_major, true, n.head_begin);
  float *da_log = call.floats(18, true, call.has(kHasALog) ? heads : 1), *ddt_bias = call.floats(19, true, call.has(kHasDtBias) ? heads * K : 1);
  float* d_initial = call.floats(20, true, call.has(kHasInitialState) ? state_floats(p) : 1);
  if (call.has(kHasInitialState)) p.d_initial_state = at_first_head(d_initial, n, K * V);
  else memset(d_initial, 0, call.size(20) * sizeof(float));
  Buffer wide_dq, wide_dk, parts = allocate(n.num_chunks * heads * (1 + K));
  if (p.group > 1) {
    wide_dq = allocate(rows * heads * K), wide_dk = allocate(rows * heads * K);
    const long head = K * 4, token = heads * head;
    p.dq = {(char*)wide_dq.get() - n.head_begin * head, kFloat32, n.tokens * token, token, head};
    p.dk = {(char*)wide_dk.get() - n.head_begin * head, kFloat32, n.tokens * token, token, head};
  }
  p.d_parameters = at_first_head(parts.get(), n, 1 + K);
  zero_tail(p, n, p.dq, K, n.head_begin, p.group > 1 ? heads : heads / p.group);
  zero_tail(p, n, p.dk, K, n.head_begin, p.group > 1 ? heads : heads / p.group);
  zero_tail(p, n, p.dv, V, n.head_begin, heads);
  zero_tail(p, n, p.dg, K, n.head_begin, heads);
  zero_tail(p, n, p.dbeta, 1, n.head_begin, heads);
  if (p.num_sequences * heads < num_threads() && n.num_chunks > p.num_sequences) {
    backward_wide(p, n);
  } else {
    run_items(p.num_sequences * heads, [&](long item, void* scratch) {
      const long s = item / heads, h = n.head_begin + item % heads;
      const long chunks = (p.sequences[s].end - p.sequences[s].begin + kMaxChunk - 1) / kMaxChunk;
      const ThreadRoom room(p.cache ? 0 : chunks * slot_floats(p));
      kernels().backward(p, s, h, room.data, scratch);
    });
  }
  if (p.group > 1) reduce_groups(p, n, p.dq, dq), reduce_groups(p, n, p.dk, dk);
  sum_parameters(parts.get(), 1 + K, 1, call.has(kHasALog), heads, n.num_chunks, da_log, call.size(18));
  sum_parameters(parts.get() + 1, 1 + K, K, call.has(kHasDtBias), heads, n.num_chunks, ddt_bias, call.size(19));
}

void backward_summary(const Call& call) {
  call.expect(13);
  Problem p = {};
  std::vector<Sequence> sequences;
  const Sizes n = read_problem(call, p, sequences, kMaxChunk);
  const long K = p.key_width, V = p.value_width;
  p.d_final_state = at_first_head(call.floats(8, call.has(kHasDFinalState), state_floats(p)), n, K * V);
  p.d_out = call.view(10, false, false, 0);
  p.cache = cache_slots(call, 11, p, n, false);
  p.d_initial_state = at_first_head(call.floats(12, true, state_floats(p)), n, K * V);
  each_head(p, n, columns_per_item(p, p.num_sequences * p.num_heads),
            [&](long s, long h, int first, int last, void* scratch) { kernels().state_gradient(p, s, h, first, last, false, scratch); });
}

}  // namespace

const Kernels& kernels() {
  static const Kernels* table = choose();
  return *table;
}
void run_items(long count, const std::function<void(long, void*)>& work) {
  const size_t bytes = kernels().scratch_bytes;
  parallel_for(count, [&](long i) {
    const FlushDenormals flush;
    work(i, thread_scratch(bytes));
  });
}
int columns_per_item(const Problem& p, long heads) {
  const long threads = num_threads(), panels = p.value_padded / kLane;
  if (heads >= threads || heads == 0) return (int)p.value_padded;
  const long parts = (threads + heads - 1) / heads < panels ? (threads + heads - 1) / heads : panels;
  return (int)((panels + parts - 1) / parts) * kLane;
}

}  // namespace kcp

KCP_ENTRY(kcp_forward) { return kcp::guarded([&] { kcp::forward(kcp::Call(count, data, ranks, shapes, dtypes)); }); }
KCP_ENTRY(kcp_backward) { return kcp::guarded([&] { kcp::backward(kcp::Call(count, data, ranks, shapes, dtypes)); }); }
KCP_ENTRY(kcp_summary) { return kcp::guarded([&] { kcp::summary(kcp::Call(count, data, ranks, shapes, dtypes)); }); }
KCP_ENTRY(kcp_backward_summary) { return kcp::guarded([&] { kcp::backward_summary(kcp::Call(count, data, ranks, shapes, dtypes)); }); }
extern "C" __attribute__((visibility("default"))) const char* kcp_isa() { return kcp::kernels().name; }
extern "C" __attribute__((visibility("default"))) int kcp_num_threads() { return kcp::num_threads(); }
