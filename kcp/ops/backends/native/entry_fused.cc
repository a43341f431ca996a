// Entry points of the fused operators: forward, backward, forward summary, backward summary. Inputs 0..9 of all four
// are options, q, k, v, g, beta, a_log, dt_bias, state, cu_seqlens (absent ones are any one-element tensor); states,
// caches and parameter gradients hold the heads of the range only. Token results hold the range or all heads: a range
// is then written where it belongs, so that the calls of all ranges fill one tensor (which the framework then sees as
// an input).
#include <algorithm>

#include "entry.h"

namespace kcp {
namespace {

// floats saved per chunk and head, and in all
long slot_floats(const Problem& p) {
  return p.key_padded * p.value_padded + p.chunk * (p.value_padded + 2 * kMaxChunk);
}
long saved_floats(const Problem& p, const Sizes& n) { return n.num_chunks * p.num_heads * slot_floats(p); }
// The slots of a cache tensor start on the first cache line after its first number, which says where that is: the
// tensor may have moved when the backward reads it.
const long kCacheHeader = 32;
float* cache_slots(const Call& call, int i, const Problem& p, const Sizes& n, bool fresh) {
  float* base = call.floats(i, call.has(kHasCache), saved_floats(p, n) + kCacheHeader);
  if (!base) return nullptr;
  if (fresh) base[0] = (float)(((((uintptr_t)base + 4) + 63) / 64 * 64 - (uintptr_t)base) / 4);
  if (!(base[0] >= 1 && base[0] < kCacheHeader)) Call::fail("tensor %d is not a cache of the forward", i);
  return base + (long)base[0] - n.head_begin * slot_floats(p);
}
long chunks_of(const Problem& p, const Sequence& s) { return (s.end - s.begin + p.chunk - 1) / p.chunk; }
long state_floats(const Problem& p) { return p.num_sequences * p.num_heads * p.key_width * p.value_width; }

// a pointer that absolute head numbers index, to a tensor that starts at the first head of the range
template <class T>
T* at_first_head(T* x, const Sizes& n, long floats_per_head) {
  return x ? x - n.head_begin * floats_per_head : nullptr;
}
// the tensor that holds the states of the inner segments where there is no cache
float* inner_states(const Call& call, int i, const Problem& p, const Sizes& n) {
  const long state = p.key_width * p.value_width;
  return at_first_head(call.floats(i, !call.has(kHasCache) && n.num_inner, n.num_inner * p.num_heads * state), n, state);
}
// a token result that holds the heads [first, last) or all of them
View result(const Call& call, int i, const Sizes& n, long width, bool head_major, bool scalar, long first, long last,
            long all) {
  const int axes = call.rank(i) + (scalar ? 1 : 0);
  const long heads = call.dim(i, axes - (head_major ? 3 : 2));
  if (heads != all && heads != last - first) Call::fail("tensor %d has %ld heads of %ld", i, heads, last - first);
  return call.view(i, head_major, n, heads, width, scalar, heads == all ? 0 : first);
}
// work(sequence, head, first, last, scratch) for ranges of `all` columns of every head
template <class Work>
void each_head(const Problem& p, const Sizes& n, long all, Work work) {
  const long columns = columns_per_item(all, p.num_sequences * p.num_heads), parts = (all + columns - 1) / columns;
  run_items(p.num_sequences * p.num_heads * parts, [&](long item, void* scratch) {
    const long part = item % parts, head = n.head_begin + item / parts % p.num_heads,
               sequence = item / parts / p.num_heads;
    const long first = part * columns, last = first + columns;
    work(sequence, head, (int)first, (int)(last < all ? last : all), scratch);
  });
}
void forward_columns(const Problem& p, const Sizes& n) {
  each_head(p, n, p.value_padded, [&](long s, long h, int first, int last, void* scratch) {
    kernels().forward(p, s, h, first, last, scratch);
  });
}

void forward(const Call& call) {
  call.expect(13);
  Problem p = {};
  std::vector<Sequence> sequences;
  const Sizes n = read_problem(call, p, sequences);
  const long state = p.key_width * p.value_width;
  p.initial_state = at_first_head(call.floats(8, call.has(kHasInitialState), state_floats(p)), n, state);
  p.out = result(call, 10, n, p.value_width, false, false, n.head_begin, n.head_end, n.heads);
  p.final_state = at_first_head(call.floats(11, call.has(kWantFinalState), state_floats(p)), n, state);
  p.cache = cache_slots(call, 12, p, n, true);
  p.inner_states = inner_states(call, 12, p, n);
  forward_columns(p, n);
  zero_tail(p, n, p.out, p.value_width, n.head_begin, p.num_heads);
}

void summary(const Call& call) {
  call.expect(11);
  Problem p = {};
  std::vector<Sequence> sequences;
  const Sizes n = read_problem(call, p, sequences);
  const bool want_m = call.has(kWantM);
  const long K = p.key_width, width = p.value_width + (want_m ? K : 0);
  p.initial_state = at_first_head(call.floats(8, call.has(kHasInitialState), state_floats(p)), n, K * p.value_width);
  float* to = at_first_head(call.floats(10, true, p.num_sequences * p.num_heads * K * width), n, K * width);
  each_head(p, n, p.value_padded + (want_m ? p.key_padded : 0),
            [&](long s, long h, int first, int last, void* scratch) {
              kernels().summary(p, s, h, first, last, want_m, to, scratch);
            });
}

// The chunks [first, last) of one sequence as a problem of their own: what a recomputing backward saves for a segment is
// still in the caches when it is read. The gradient of the state at its end arrives in `arriving`, that at its start goes
// to `leaving`, both indexed by head, unless the sequence ends or starts there.
struct Segment {
  Sequence sequence;
  Problem problem;
  Segment(const Problem& p, long n, long first, long last, float* arriving, float* leaving)
      : sequence(p.sequences[n]), problem(p) {
    const long states = p.num_heads * p.key_width * p.value_width, chunks = chunks_of(p, sequence);
    if (first > 0)
      problem.initial_state = p.inner_states ? p.inner_states + (sequence.inner + first / kSegment - 1) * states : nullptr;
    else if (p.initial_state)
      problem.initial_state = p.initial_state + n * states;
    problem.d_final_state = last < chunks ? arriving : p.d_final_state ? p.d_final_state + n * states : nullptr;
    problem.d_initial_state = first > 0 ? leaving : p.d_initial_state ? p.d_initial_state + n * states : nullptr;
    problem.inner_states = nullptr;
    problem.sequences = &sequence;
    problem.num_sequences = 1;
    if (last < chunks) sequence.end = sequence.begin + last * p.chunk;
    sequence.begin += first * p.chunk;
    sequence.chunk += first;
  }
  Segment(const Segment&) = delete;
};

// One head of one sequence, segment by segment from the end; with a cache in one go.
void backward_sequence(const Problem& p, long n, long head, void* scratch) {
  const long state = p.key_width * p.value_width, chunks = chunks_of(p, p.sequences[n]),
             step = p.cache || chunks < kSegment ? chunks : kSegment;
  const ThreadRoom room(p.cache ? 0 : step * slot_floats(p) + state);
  float* gradient = p.cache ? nullptr : room.data + step * slot_floats(p) - head * state;
  for (long last = chunks, first; last >= 0; last = first > 0 ? first : -1) {
    first = last > step ? (last - 1) / step * step : 0;
    const Segment segment(p, n, first, last, gradient, gradient);
    kernels().backward(segment.problem, 0, head, room.data, scratch);
  }
}

// Few heads for the threads: the dh recurrence over value columns first, then all chunks at once; both for all sequences
// or, where one is long, for segments long enough to occupy the threads.
void backward_wide(const Problem& p, const Sizes& n) {
  const long items = 4 * num_threads(), segment_items = kSegment * p.num_heads, slot = slot_floats(p),
             padded_state = p.key_padded * p.value_padded, state = p.key_width * p.value_width,
             step = (items + segment_items - 1) / segment_items * kSegment;
  long longest = 0;
  for (long s = 0; s < p.num_sequences; s++) longest = std::max(longest, chunks_of(p, p.sequences[s]));
  const long room = (longest > step ? step : n.num_chunks) * p.num_heads;
  const Buffer gradients = allocate(room * padded_state), saved = allocate(p.cache ? 0 : room * slot);
  auto chunks_at_once = [&](Problem q) {
    const long before = q.sequences[0].chunk * q.num_heads;
    if (!q.cache) {
      q.cache = at_first_head(saved.get(), n, slot) - before * slot;
      q.inner_states = nullptr;  // an input here
      forward_columns(q, n);
    }
    q.state_gradient = at_first_head(gradients.get(), n, padded_state) - before * padded_state;
    each_head(q, n, q.value_padded,
              [&](long s, long h, int first, int last, void* scratch) {
                kernels().state_gradient(q, s, h, first, last, true, scratch);
              });
    run_chunks(q, n,
               [&](long s, long h, long chunk, void* scratch) { kernels().backward_chunk(q, s, h, chunk, scratch); });
  };
  if (longest <= step) {
    chunks_at_once(p);
    return;
  }
  const Buffer even = allocate(p.num_heads * state), odd = allocate(p.num_heads * state);
  float *arriving = at_first_head(even.get(), n, state), *leaving = at_first_head(odd.get(), n, state);
  for (long s = 0; s < p.num_sequences; s++)
    for (long last = chunks_of(p, p.sequences[s]), first; last >= 0; last = first > 0 ? first : -1) {
      first = last > step ? (last - 1) / step * step : 0;
      chunks_at_once(Segment(p, s, first, last, arriving, leaving).problem);
      std::swap(arriving, leaving);
    }
}

void backward(const Call& call) {
  call.expect(21);
  Problem p = {};
  std::vector<Sequence> sequences;
  const Sizes n = read_problem(call, p, sequences);
  const bool head_major = call.option(kHeadMajor);
  const long K = p.key_width, V = p.value_width, heads = p.num_heads;
  p.initial_state = at_first_head(call.floats(8, call.has(kHasInitialState), state_floats(p)), n, K * V);
  p.d_out = call.view(10, false, n, n.heads, p.value_width);
  p.d_final_state = at_first_head(call.floats(11, call.has(kHasDFinalState), state_floats(p)), n, K * V);
  p.cache = cache_slots(call, 12, p, n, false);
  p.inner_states = inner_states(call, 12, p, n);
  const long first = n.head_begin, last = n.head_end;
  const View dq = result(call, 13, n, K, head_major, false, first / p.group, last / p.group, n.key_heads),
             dk = result(call, 14, n, K, head_major, false, first / p.group, last / p.group, n.key_heads);
  p.dq = dq, p.dk = dk;
  p.dv = result(call, 15, n, V, head_major, false, first, last, n.heads);
  p.dg = result(call, 16, n, K, head_major, false, first, last, n.heads);
  p.dbeta = result(call, 17, n, 1, head_major, true, first, last, n.heads);
  float *da_log = call.floats(18, true, call.has(kHasALog) ? heads : 1),
        *ddt_bias = call.floats(19, true, call.has(kHasDtBias) ? heads * K : 1);
  float* d_initial = call.floats(20, true, call.has(kHasInitialState) ? state_floats(p) : 1);
  if (call.has(kHasInitialState)) p.d_initial_state = at_first_head(d_initial, n, K * V);
  else memset(d_initial, 0, call.size(20) * sizeof(float));
  const WideGradients wide(p, n);
  const Buffer parts = allocate(n.num_chunks * heads * (1 + K));
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
      backward_sequence(p, item / heads, n.head_begin + item % heads, scratch);
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
  const Sizes n = read_problem(call, p, sequences);
  const long K = p.key_width, V = p.value_width;
  p.d_final_state = at_first_head(call.floats(8, call.has(kHasDFinalState), state_floats(p)), n, K * V);
  p.d_out = call.view(10, false, n, n.heads, p.value_width);
  p.cache = cache_slots(call, 11, p, n, false);
  p.d_initial_state = at_first_head(call.floats(12, true, state_floats(p)), n, K * V);
  each_head(p, n, p.value_padded,
            [&](long s, long h, int first, int last, void* scratch) {
              kernels().state_gradient(p, s, h, first, last, false, scratch);
            });
}

}  // namespace

}  // namespace kcp

KCP_ENTRY(kcp_forward) {
  return kcp::guarded([&] { kcp::forward(kcp::Call(count, data, ranks, shapes, dtypes)); });
}
KCP_ENTRY(kcp_backward) {
  return kcp::guarded([&] { kcp::backward(kcp::Call(count, data, ranks, shapes, dtypes)); });
}
KCP_ENTRY(kcp_summary) {
  return kcp::guarded([&] { kcp::summary(kcp::Call(count, data, ranks, shapes, dtypes)); });
}
KCP_ENTRY(kcp_backward_summary) {
  return kcp::guarded([&] { kcp::backward_summary(kcp::Call(count, data, ranks, shapes, dtypes)); });
}
extern "C" __attribute__((visibility("default"))) const char* kcp_isa() { return kcp::kernels().name; }
extern "C" __attribute__((visibility("default"))) int kcp_num_threads() { return kcp::num_threads(); }
extern "C" __attribute__((visibility("default"))) void kcp_set_default_threads(int n) { kcp::set_default_threads(n); }
