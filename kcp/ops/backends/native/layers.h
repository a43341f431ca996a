// The layers around the attention: norms, SwiGLU, short convolution, softmax rows, products grouped by expert. float32.
#pragma once
#include "layer_calls.h"
#include "product.h"

namespace KCP_ISA {

KCP_INLINE Vec get(const float* p, long count) {
  if (count == kLanes) return load(p);
  float lanes[kLanes] = {};
  memcpy(lanes, p, count * sizeof(float));
  return load(lanes);
}
KCP_INLINE void put(float* p, Vec x, long count) {
  if (count == kLanes) {
    store(p, x);
    return;
  }
  float lanes[kLanes];
  store(lanes, x);
  memcpy(p, lanes, count * sizeof(float));
}
// body(column, lanes) over [first, last)
template <class Body>
KCP_INLINE void columns(long first, long last, Body body) {
  long d = first;
  for (; d + kLanes <= last; d += kLanes) body(d, (long)kLanes);
  if (d < last) body(d, last - d);
}

KCP_INLINE float norm_scale(const NormCall& c, const float* x) {
  Vec sum = (Vec){};
  columns(0, c.width, [&](long d, long n) {
    const Vec v = get(x + d, n);
    sum += v * v;
  });
  return 1.f / __builtin_sqrtf(lane_sum(sum) / c.width + c.epsilon);
}
static void norm_rows(const NormCall& c, long first, long last) {
  for (long r = first; r < last; r++) {
    const float *x = c.x + r * c.width, *gate = c.gate ? c.gate + r * c.width : nullptr;
    const float scale = norm_scale(c, x);
    columns(0, c.width, [&](long d, long n) {
      Vec y = get(x + d, n) * scale * get(c.weight + d, n), t;
      if (gate) y *= sigmoid(get(gate + d, n), t);
      put(c.out + r * c.width + d, y, n);
    });
  }
}
// d_weight: this call's share, added to
static void norm_rows_backward(const NormCall& c, long first, long last, float* d_weight) {
  for (long r = first; r < last; r++) {
    const long at = r * c.width;
    const float* x = c.x + at;
    const float scale = norm_scale(c, x);
    Vec dot = (Vec){};
    columns(0, c.width, [&](long d, long n) {
      const Vec normal = get(x + d, n) * scale, w = get(c.weight + d, n);
      Vec grad = get(c.d_out + at + d, n), t;
      if (c.gate) {
        const Vec s = sigmoid(get(c.gate + at + d, n), t);
        put(c.d_gate + at + d, grad * normal * w * s * (t * s), n);
        grad *= s;
      }
      put(d_weight + d, get(d_weight + d, n) + grad * normal, n);
      grad *= w;
      dot += grad * normal;
      put(c.dx + at + d, grad, n);
    });
    const float mean = lane_sum(dot) / c.width;
    columns(0, c.width, [&](long d, long n) {
      put(c.dx + at + d, (get(c.dx + at + d, n) - get(x + d, n) * scale * mean) * scale, n);
    });
  }
}

static void glu(const GluCall& c, long first, long last) {
  columns(first, last, [&](long d, long n) {
    const Vec g = get(c.gate + d, n);
    Vec t;
    put(c.out + d, g * sigmoid(g, t) * get(c.up + d, n), n);
  });
}
static void glu_backward(const GluCall& c, long first, long last) {
  columns(first, last, [&](long d, long n) {
    const Vec g = get(c.gate + d, n), grad = get(c.d_out + d, n);
    Vec t;
    const Vec s = sigmoid(g, t);
    put(c.d_up + d, grad * g * s, n);
    put(c.d_gate + d, grad * get(c.up + d, n) * s * (g * (t * s) + 1.f), n);
  });
}

// ---- short convolution
KCP_INLINE const float* conv_row(const ConvCall& c, long b, long t) {
  return t >= 0 ? c.x + (b * c.tokens + t) * c.width : c.halo + (b * (c.size - 1) + c.size - 1 + t) * c.width;
}
KCP_INLINE long conv_reach(const ConvCall& c, long b, long t) {
  const long most = c.size - 1;
  if (!c.into) return most;
  const long into = c.into[b * c.into_batch + t];
  return into < most ? into : most;
}
KCP_INLINE Vec conv_sum(const ConvCall& c, long b, long t, long reach, long d, long n) {
  Vec z = get(conv_row(c, b, t) + d, n) * get(c.taps + d, n);
  if (c.bias) z += get(c.bias + d, n);
  for (long j = 1; j <= reach; j++) z += get(conv_row(c, b, t - j) + d, n) * get(c.taps + j * c.width + d, n);
  return z;
}
static void conv(const ConvCall& c, long b, long first, long last, long d0, long d1) {
  for (long t = first; t < last; t++) {
    const long reach = conv_reach(c, b, t);
    columns(d0, d1, [&](long d, long n) {
      const Vec z = conv_sum(c, b, t, reach, d, n);
      Vec e;
      put(c.out + (b * c.tokens + t) * c.width + d, z * sigmoid(z, e), n);
    });
  }
}
// dz of later tokens, taken back to token t (negative: a row of the halo)
KCP_INLINE Vec conv_adjoint(const ConvCall& c, const float (*dz)[kConvColumns], long b, long first, long t, long d0,
                            long d, long n) {
  Vec sum = (Vec){};
  for (long j = t < 0 ? -t : 0; j < c.size && t + j < c.tokens; j++)
    if (j <= conv_reach(c, b, t + j)) sum += get(dz[t + j - first] + d - d0, n) * get(c.taps + j * c.width + d, n);
  return sum;
}
static void conv_backward(const ConvCall& c, long b, long first, long last, long d0, long d1, float* part) {
  float dz[kConvStrip + kMaxTaps][kConvColumns];
  const long end = last + c.size - 1 < c.tokens ? last + c.size - 1 : c.tokens;
  for (long t = first; t < end; t++) {
    const long reach = conv_reach(c, b, t);
    columns(d0, d1, [&](long d, long n) {
      const Vec z = conv_sum(c, b, t, reach, d, n);
      Vec e;
      const Vec s = sigmoid(z, e);
      put(dz[t - first] + d - d0, get(c.d_out + (b * c.tokens + t) * c.width + d, n) * s * (z * (e * s) + 1.f), n);
    });
  }
  for (long j = 0; j <= c.size; j++) memset(part + j * c.width + d0, 0, (d1 - d0) * sizeof(float));
  for (long t = first; t < last; t++) {
    const long reach = conv_reach(c, b, t);
    columns(d0, d1, [&](long d, long n) {
      put(c.dx + (b * c.tokens + t) * c.width + d, conv_adjoint(c, dz, b, first, t, d0, d, n), n);
      const Vec grad = get(dz[t - first] + d - d0, n);
      for (long j = 0; j <= reach; j++) {
        float* sum = part + j * c.width + d;
        put(sum, get(sum, n) + grad * get(conv_row(c, b, t - j) + d, n), n);
      }
      float* sum = part + c.size * c.width + d;
      put(sum, get(sum, n) + grad, n);
    });
  }
  if (first == 0)
    for (long t = 1 - c.size; t < 0; t++)
      columns(d0, d1, [&](long d, long n) {
        put(c.d_halo + (b * (c.size - 1) + c.size - 1 + t) * c.width + d, conv_adjoint(c, dz, b, 0, t, d0, d, n), n);
      });
}

// ---- softmax rows
struct Seen {
  long first, last;
};
KCP_INLINE Seen keys_of(const SoftmaxCall& c, long row) {
  const long query = row % c.queries, b = row / c.queries / c.heads, at = c.begin + query;
  return {c.into ? at - c.into[b * c.into_batch + query] : 0, at + 1 < c.keys ? at + 1 : c.keys};
}
KCP_INLINE float row_maximum(const float* x, long first, long last) {
  float highest = x[first];
  Vec most = splat(highest);
  columns(first, last, [&](long d, long n) {
    if (n == kLanes) {
      const Vec v = load(x + d);
      most = v > most ? v : most;
    } else {
      for (long i = 0; i < n; i++) highest = x[d + i] > highest ? x[d + i] : highest;
    }
  });
  for (int i = 0; i < kLanes; i++) highest = most[i] > highest ? most[i] : highest;
  return highest;
}
// to = exp(x - highest) unless it is nullptr, and their sum
KCP_INLINE double row_exponentials(const float* x, float highest, long first, long last, float* to) {
  const long block = 64 * kLanes;
  double total = 0;
  for (long from = first; from < last; from += block) {
    Vec sum = (Vec){};
    float rest = 0;
    columns(from, from + block < last ? from + block : last, [&](long d, long n) {
      const Vec e = exp2v((get(x + d, n) - highest) * 1.4426950408889634f);
      if (to) put(to + d, e, n);
      if (n == kLanes) sum += e;
      else
        for (long i = 0; i < n; i++) rest += e[i];
    });
    total += lane_sum(sum) + rest;
  }
  return total;
}
static void softmax_rows(const SoftmaxCall& c, long first, long last) {
  for (long r = first; r < last; r++) {
    const Seen seen = keys_of(c, r);
    const float* from = c.scores + r * c.keys;
    float* to = c.out + r * c.keys;
    memset(to, 0, seen.first * sizeof(float));
    memset(to + seen.last, 0, (c.keys - seen.last) * sizeof(float));
    const float highest = row_maximum(from, seen.first, seen.last),
                scale = 1.f / (float)row_exponentials(from, highest, seen.first, seen.last, to);
    columns(seen.first, seen.last, [&](long d, long n) { put(to + d, get(to + d, n) * scale, n); });
  }
}
static void softmax_rows_backward(const SoftmaxCall& c, long first, long last) {
  for (long r = first; r < last; r++) {
    const Seen seen = keys_of(c, r);
    const float *p = c.scores + r * c.keys, *grad = c.d_out + r * c.keys;
    float* to = c.out + r * c.keys;
    Vec dot = (Vec){};
    columns(seen.first, seen.last, [&](long d, long n) { dot += get(p + d, n) * get(grad + d, n); });
    const float mean = lane_sum(dot);
    memset(to, 0, seen.first * sizeof(float));
    memset(to + seen.last, 0, (c.keys - seen.last) * sizeof(float));
    columns(seen.first, seen.last, [&](long d, long n) { put(to + d, get(p + d, n) * (get(grad + d, n) - mean), n); });
  }
}

// ---- cross entropy rows
static void cross_entropy_rows(const CrossEntropyCall& c, long first, long last) {
  for (long r = first; r < last; r++) {
    const float* x = c.logits + r * c.width;
    const float highest = row_maximum(x, 0, c.width);
    const double log_sum = __builtin_log(row_exponentials(x, highest, 0, c.width, nullptr));
    const long label = c.labels[r];
    c.out[r] = (float)(log_sum - (label >= 0 && label < c.width ? x[label] - highest : 0.f));
  }
}
// d (softmax - one at the label)
static void cross_entropy_rows_backward(const CrossEntropyCall& c, long first, long last) {
  for (long r = first; r < last; r++) {
    const float *x = c.logits + r * c.width, d_loss = c.d_loss[r];
    float* to = c.out + r * c.width;
    if (d_loss == 0) {
      memset(to, 0, c.width * sizeof(float));
      continue;
    }
    const float scale = (float)(d_loss / row_exponentials(x, row_maximum(x, 0, c.width), 0, c.width, to));
    columns(0, c.width, [&](long d, long n) { put(to + d, get(to + d, n) * scale, n); });
    const long label = c.labels[r];
    if (label >= 0 && label < c.width) to[label] -= d_loss;
  }
}

// ---- products grouped by expert: columns [first, last) of the result, at most kGroupColumns of them
static void grouped_forward(const GroupedCall& c, long first, long last, float* panel) {
  const int cols = (int)(last - first);
  transpose(c.weight + first * c.in, c.in, panel, kGroupColumns, cols, (int)c.in);
  Prefetch none;
  none.clear();
  multiply<false>(none, (int)c.rows, cols, {c.x, c.in, panel, kGroupColumns, (int)c.in},
                  [&](long r, long d, Vec sum) { store(c.to + r * c.out + first + d, sum); });
}
static void grouped_input_gradient(const GroupedCall& c, long first, long last) {
  Prefetch none;
  none.clear();
  multiply<false>(none, (int)c.rows, (int)(last - first), {c.d_out, c.out, c.weight + first, c.in, (int)c.out},
                  [&](long r, long d, Vec sum) { store(c.to + r * c.in + first + d, sum); });
}
static void grouped_weight_gradient(const GroupedCall& c, long first, long last) {
  Prefetch none;
  none.clear();
  multiply<true>(none, (int)c.out, (int)(last - first), {c.d_out, c.out, c.x + first, c.in, (int)c.rows},
                 [&](long r, long d, Vec sum) { store(c.to + r * c.in + first + d, sum); });
}

}  // namespace KCP_ISA
