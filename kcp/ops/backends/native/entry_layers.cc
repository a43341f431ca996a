// Entry points of the layers around the attention. Input 0 of each holds the options; absent optional inputs are any
// one-element tensor. Every result is computed by one item, or summed over items in a fixed order.
#include "entry.h"

namespace kcp {
namespace {

enum LayerPresent { kHasGate = 1, kHasBias = 2, kHasInto = 4 };  // bits of kPresent
bool present(const Call& call, LayerPresent bit) { return call.option(kPresent) & bit; }

// to[0..size) = the sum of `count` rows, in their order
void sum_rows(const float* rows, long count, long size, float* to) {
  const long strip = 512;
  run_items((size + strip - 1) / strip, [&](long item, void*) {
    const long first = item * strip, last = first + strip < size ? first + strip : size;
    for (long d = first; d < last; d++) {
      double sum = 0;
      for (long r = 0; r < count; r++) sum += rows[r * size + d];
      to[d] = (float)sum;
    }
  });
}
// body(first, last) over [0, count) in items of `size`
template <class Body>
void ranges(long count, long size, Body body) {
  run_items((count + size - 1) / size, [&](long item, void*) {
    const long first = item * size;
    body(item, first, first + size < count ? first + size : count);
  });
}

// options, x, weight, gate | out
NormCall read_norm(const Call& call) {
  NormCall c = {};
  c.width = call.dim(1, -1);
  if (c.width < 1) Call::fail("rows of no numbers can't be normalized");
  c.x = call.floats(1, true, call.size(1));
  c.weight = call.floats(2, true, c.width);
  c.gate = call.floats(3, present(call, kHasGate), call.size(1));
  c.epsilon = call.real(kEpsilon);
  return c;
}
const long kRowsPerItem = 64;
void norm(const Call& call) {
  call.expect(5);
  NormCall c = read_norm(call);
  c.out = call.floats(4, true, call.size(1));
  ranges(call.size(1) / c.width, kRowsPerItem, [&](long, long first, long last) { kernels().norm(c, first, last); });
}
// options, x, weight, gate, d_out | dx, d_weight, d_gate
void norm_backward(const Call& call) {
  call.expect(8);
  NormCall c = read_norm(call);
  c.d_out = call.floats(4, true, call.size(1));
  c.dx = call.floats(5, true, call.size(1));
  c.d_gate = call.floats(7, present(call, kHasGate), call.size(1));
  if (!c.gate) memset(call.floats(7, true, 1), 0, call.size(7) * sizeof(float));
  const long rows = call.size(1) / c.width, items = (rows + kRowsPerItem - 1) / kRowsPerItem;
  const Buffer parts = allocate(items * c.width);
  memset(parts.get(), 0, items * c.width * sizeof(float));
  ranges(rows, kRowsPerItem, [&](long item, long first, long last) {
    kernels().norm_backward(c, first, last, parts.get() + item * c.width);
  });
  sum_rows(parts.get(), items, c.width, call.floats(6, true, c.width));
}

// options, gate, up | out;  options, gate, up, d_out | d_gate, d_up
const long kElementsPerItem = 1 << 15;
void glu(const Call& call) {
  call.expect(4);
  const long n = call.size(1);
  GluCall c = {};
  c.gate = call.floats(1, true, n), c.up = call.floats(2, true, n), c.out = call.floats(3, true, n);
  ranges(n, kElementsPerItem, [&](long, long first, long last) { kernels().glu(c, first, last); });
}
void glu_backward(const Call& call) {
  call.expect(6);
  const long n = call.size(1);
  GluCall c = {};
  c.gate = call.floats(1, true, n), c.up = call.floats(2, true, n), c.d_out = call.floats(3, true, n);
  c.d_gate = call.floats(4, true, n), c.d_up = call.floats(5, true, n);
  ranges(n, kElementsPerItem, [&](long, long first, long last) { kernels().glu_backward(c, first, last); });
}

// tokens into their document, of the tokens from `begin` on: one row for all, or one a batch row
void check_into(const Call& call, int i, long batch, long tokens, long begin) {
  const int32_t* into = call.ints(i);
  if (call.size(i) != tokens && call.size(i) != batch * tokens)
    Call::fail("tensor %d holds %ld tokens; %ld or %ld are allowed", i, call.size(i), tokens, batch * tokens);
  for (long at = 0; at < call.size(i); at++)
    if (into[at] < 0 || into[at] > begin + at % tokens)
      Call::fail("a token is %d tokens into its document; 0 to %ld is allowed", into[at], begin + at % tokens);
}
// options, x [B,T,D], halo [B,size-1,D], taps [D,1,size] newest last, bias [D], into [B or 1,T,1]
struct ConvTensors {
  ConvCall call = {};
  Buffer taps;
  explicit ConvTensors(const Call& from) {
    if (from.rank(1) != 3) Call::fail("x has rank %d; 3 is needed", from.rank(1));
    call.batch = from.dim(1, 0), call.tokens = from.dim(1, 1), call.width = from.dim(1, 2), call.size = from.dim(3, -1);
    if (call.size < 1 || call.size > kMaxTaps) Call::fail("%ld taps; 1 to %d are allowed", call.size, kMaxTaps);
    call.x = from.floats(1, true, call.batch * call.tokens * call.width);
    call.halo = from.floats(2, call.size > 1, call.batch * (call.size - 1) * call.width);
    const float* weight = from.floats(3, true, call.width * call.size);
    taps = allocate(call.size * call.width);
    for (long j = 0; j < call.size; j++)
      for (long d = 0; d < call.width; d++)
        taps.get()[j * call.width + d] = weight[d * call.size + call.size - 1 - j];
    call.taps = taps.get();
    call.bias = from.floats(4, present(from, kHasBias), call.width);
    if (present(from, kHasInto)) {
      call.into = from.ints(5);
      call.into_batch = from.size(5) > call.tokens ? call.tokens : 0;
      check_into(from, 5, call.batch, call.tokens, INT32_MAX);
    }
  }
  long strips() const { return (call.tokens + kConvStrip - 1) / kConvStrip; }
  template <class Body>
  void each(Body body) const {
    const long blocks = (call.width + kConvColumns - 1) / kConvColumns;
    run_items(call.batch * strips() * blocks, [&](long item, void*) {
      const long d0 = item % blocks * kConvColumns, strip = item / blocks % strips(), b = item / blocks / strips();
      const long t0 = strip * kConvStrip, t1 = t0 + kConvStrip, d1 = d0 + kConvColumns;
      body(b, strip, t0, t1 < call.tokens ? t1 : call.tokens, d0, d1 < call.width ? d1 : call.width);
    });
  }
};
void conv(const Call& call) {
  call.expect(7);
  ConvTensors c(call);
  c.call.out = call.floats(6, true, call.size(1));
  c.each([&](long b, long, long t0, long t1, long d0, long d1) { kernels().conv(c.call, b, t0, t1, d0, d1); });
}
// ..., d_out | dx, d_halo, d_taps, d_bias
void conv_backward(const Call& call) {
  call.expect(11);
  ConvTensors c(call);
  const long size = c.call.size, width = c.call.width, part = (size + 1) * width, parts = c.call.batch * c.strips();
  c.call.d_out = call.floats(6, true, call.size(1));
  c.call.dx = call.floats(7, true, call.size(1));
  c.call.d_halo = call.floats(8, true, c.call.batch * (size - 1) * width);
  const Buffer gradients = allocate(parts * part), sum = allocate(part);
  c.each([&](long b, long strip, long t0, long t1, long d0, long d1) {
    kernels().conv_backward(c.call, b, t0, t1, d0, d1, gradients.get() + (b * c.strips() + strip) * part);
  });
  sum_rows(gradients.get(), parts, part, sum.get());
  float *d_taps = call.floats(9, true, size * width), *d_bias = call.floats(10, true, c.call.bias ? width : 1);
  for (long d = 0; d < width; d++)
    for (long j = 0; j < size; j++) d_taps[d * size + size - 1 - j] = sum.get()[j * width + d];
  if (c.call.bias) memcpy(d_bias, sum.get() + size * width, width * sizeof(float));
  else memset(d_bias, 0, call.size(10) * sizeof(float));
}

// options, scores [B,H,Tq,Tk] (backward: probabilities, then their gradient), into [B or 1,Tq,1] | the same shape
SoftmaxCall read_softmax(const Call& call, int into) {
  SoftmaxCall c = {};
  c.heads = call.dim(1, 1), c.queries = call.dim(1, 2), c.keys = call.dim(1, 3);
  c.begin = call.option(kHeadBegin);
  if (call.rank(1) != 4 || c.keys < 1) Call::fail("scores must have 4 axes and at least one key");
  if (c.begin < 0 || c.begin > c.keys - c.queries)
    Call::fail("%ld queries from key %ld on of %ld keys", c.queries, c.begin, c.keys);
  c.scores = call.floats(1, true, call.size(1));
  if (present(call, kHasInto)) {
    c.into = call.ints(into);
    c.into_batch = call.size(into) > c.queries ? c.queries : 0;
    check_into(call, into, call.dim(1, 0), c.queries, c.begin);
  }
  return c;
}
void softmax(const Call& call) {
  call.expect(4);
  SoftmaxCall c = read_softmax(call, 2);
  c.out = call.floats(3, true, call.size(1));
  ranges(call.size(1) / c.keys, 16, [&](long, long first, long last) { kernels().softmax(c, first, last); });
}
void softmax_backward(const Call& call) {
  call.expect(5);
  SoftmaxCall c = read_softmax(call, 3);
  c.d_out = call.floats(2, true, call.size(1));
  c.out = call.floats(4, true, call.size(1));
  ranges(call.size(1) / c.keys, 16, [&](long, long first, long last) { kernels().softmax_backward(c, first, last); });
}

// options, logits [N,V], labels [N] (backward: and the losses' gradients [N]) | losses [N] (the logits' gradients)
CrossEntropyCall read_cross_entropy(const Call& call) {
  CrossEntropyCall c = {};
  if (call.rank(1) != 2 || call.dim(1, 1) < 1) Call::fail("logits must have 2 axes and at least one column");
  c.width = call.dim(1, 1);
  c.logits = call.floats(1, true, call.size(1));
  c.labels = call.ints(2);
  if (call.size(2) != call.dim(1, 0)) Call::fail("%ld labels for %ld rows", call.size(2), call.dim(1, 0));
  return c;
}
long rows_per_item(const CrossEntropyCall& c) { return c.width < 16384 ? 16384 / c.width : 1; }
void cross_entropy(const Call& call) {
  call.expect(4);
  CrossEntropyCall c = read_cross_entropy(call);
  c.out = call.floats(3, true, call.dim(1, 0));
  ranges(call.dim(1, 0), rows_per_item(c), [&](long, long first, long last) { kernels().cross_entropy(c, first, last); });
}
void cross_entropy_backward(const Call& call) {
  call.expect(5);
  CrossEntropyCall c = read_cross_entropy(call);
  c.d_loss = call.floats(3, true, call.dim(1, 0));
  c.out = call.floats(4, true, call.size(1));
  ranges(call.dim(1, 0), rows_per_item(c),
         [&](long, long first, long last) { kernels().cross_entropy_backward(c, first, last); });
}

// Experts' rows: ends [E] multiples of 16, the last one at most R; rows behind it become 0 in row-wise results.
struct Groups {
  const int32_t* ends;
  long experts, rows, used;
  Groups(const Call& call, int i, long rows) : ends(call.ints(i)), experts(call.size(i)), rows(rows), used(0) {
    for (long e = 0; e < experts; e++) {
      if (ends[e] < used || ends[e] > rows || ends[e] % kBlock)
        Call::fail("rows of expert %ld end at %d; a multiple of %d from %ld to %ld is needed", e, ends[e], kBlock, used,
                   rows);
      used = ends[e];
    }
  }
  long begin(long e) const { return e ? ends[e - 1] : 0; }
  long count(long e) const { return ends[e] - begin(e); }
};
void check_widths(long in, long out) {
  if (in % kLane || out % kLane) Call::fail("widths are %ld and %ld; multiples of %d are needed", in, out, kLane);
}
// body(expert, first column, last column) over the columns of every expert
template <class Body>
void each_panel(const Groups& g, long width, Body body) {
  const long panels = (width + kGroupColumns - 1) / kGroupColumns;
  run_items(g.experts * panels, [&](long item, void*) {
    const long first = item % panels * kGroupColumns, last = first + kGroupColumns;
    body(item / panels, first, last < width ? last : width);
  });
}
void zero_behind(const Groups& g, float* to, long width) {
  memset(to + g.used * width, 0, (g.rows - g.used) * width * sizeof(float));
}
// `count` tensors [out][in] from input or output i on
std::vector<float*> matrices(const Call& call, int i, long count, long floats) {
  std::vector<float*> found;
  for (long e = 0; e < count; e++) found.push_back(call.floats(i + (int)e, true, floats));
  return found;
}
// options, x [R,I], ends [E], E weights [O,I] | [R,O]
void grouped(const Call& call) {
  const Groups g(call, 2, call.dim(1, 0));
  const int experts = (int)g.experts;
  call.expect(4 + experts);
  const long in = call.dim(1, 1), out = call.dim(3, 0);
  check_widths(in, out);
  const float* x = call.floats(1, true, g.rows * in);
  float* to = call.floats(3 + experts, true, g.rows * out);
  const std::vector<float*> weights = matrices(call, 3, experts, in * out);
  each_panel(g, out, [&](long e, long first, long last) {
    const ThreadRoom panel(in * kGroupColumns + 16);
    float* aligned = (float*)(((uintptr_t)panel.data + 63) & ~(uintptr_t)63);
    const GroupedCall c = {x + g.begin(e) * in, weights[e], nullptr, to + g.begin(e) * out, g.count(e), in, out};
    kernels().grouped_forward(c, first, last, aligned);
  });
  zero_behind(g, to, out);
}
// options, x [R,I], ends [E], d_out [R,O], E weights [O,I] | dx [R,I], E gradients [O,I]
void grouped_backward(const Call& call) {
  const Groups g(call, 2, call.dim(1, 0));
  const int experts = (int)g.experts;
  call.expect(5 + 2 * experts);
  const long in = call.dim(1, 1), out = call.dim(3, 1);
  check_widths(in, out);
  const float *x = call.floats(1, true, g.rows * in), *d_out = call.floats(3, true, g.rows * out);
  float* dx = call.floats(4 + experts, true, g.rows * in);
  const std::vector<float*> weights = matrices(call, 4, experts, in * out),
                            gradients = matrices(call, 5 + experts, experts, in * out);
  each_panel(g, in, [&](long e, long first, long last) {
    const long at = g.begin(e);
    const GroupedCall c = {nullptr, weights[e], d_out + at * out, dx + at * in, g.count(e), in, out};
    kernels().grouped_input_gradient(c, first, last);
  });
  each_panel(g, in, [&](long e, long first, long last) {
    const long at = g.begin(e);
    const GroupedCall c = {x + at * in, nullptr, d_out + at * out, gradients[e], g.count(e), in, out};
    kernels().grouped_weight_gradient(c, first, last);
  });
  zero_behind(g, dx, in);
}

}  // namespace
}  // namespace kcp

#define KCP_LAYER(entry, function)                                                             \
  KCP_ENTRY(entry) {                                                                           \
    return kcp::guarded([&] { kcp::function(kcp::Call(count, data, ranks, shapes, dtypes)); }); \
  }
KCP_LAYER(kcp_norm, norm)
KCP_LAYER(kcp_norm_backward, norm_backward)
KCP_LAYER(kcp_glu, glu)
KCP_LAYER(kcp_glu_backward, glu_backward)
KCP_LAYER(kcp_conv, conv)
KCP_LAYER(kcp_conv_backward, conv_backward)
KCP_LAYER(kcp_softmax, softmax)
KCP_LAYER(kcp_softmax_backward, softmax_backward)
KCP_LAYER(kcp_cross_entropy, cross_entropy)
KCP_LAYER(kcp_cross_entropy_backward, cross_entropy_backward)
KCP_LAYER(kcp_grouped, grouped)
KCP_LAYER(kcp_grouped_backward, grouped_backward)
