// A small matrix of calls in one program, for sanitizers and for processors that are emulated: every entry point,
// packs, groups, odd widths, all storage types, 1 to 4 threads, concurrent callers, and a fork. Checks that results are
// finite, that they do not depend on the number of threads, and that the stages agree with the fused operator. Exit
// code 0: all is well.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "native_entries.h"
extern "C" {
const char* kcp_isa();
}

static std::atomic<int> failures{0};
static void expect(bool ok, const std::string& what) {
  if (!ok) failures++, printf("FAILED: %s\n", what.c_str());
}

struct Array {
  std::vector<int64_t> shape;
  std::string dtype;
  std::vector<char> bytes;  // exactly as large as the tensor, so that address sanitizer sees every step beyond
  Array() {}
  Array(std::vector<int64_t> s, std::string type = "float32") : shape(s), dtype(type) {
    size_t n = type == "float32" || type == "int32" ? 4 : type == "int64" ? 8 : 2;
    for (int64_t d : s) n *= d;
    bytes.resize(n);
  }
  float* f() { return (float*)bytes.data(); }
  size_t count() const {
    return bytes.size() / (dtype == "int64" ? 8 : dtype == "float32" || dtype == "int32" ? 4 : 2);
  }
};

static thread_local uint64_t seed = 1;
static float normal() {
  float sum = 0;
  for (int i = 0; i < 12; i++) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    sum += (float)(seed >> 40) / (1 << 24);
  }
  return sum - 6;
}
static Array random_array(std::vector<int64_t> shape, std::string dtype, float factor = 1) {
  Array a(shape, dtype);
  for (size_t i = 0; i < a.count(); i++) {
    const float x = normal() * factor;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (dtype == "float32") a.f()[i] = x;
    else if (dtype == "bfloat16") ((uint16_t*)a.bytes.data())[i] = bits >> 16;
    else ((uint16_t*)a.bytes.data())[i] = (bits >> 16 & 0x8000) | (0x3800 + (bits >> 13 & 0x7ff));
  }
  return a;
}
static int call(Entry* entry, std::vector<Array*> arrays) {
  std::vector<void*> data;
  std::vector<int> ranks;
  std::vector<int64_t*> shapes;
  std::vector<const char*> dtypes;
  for (Array* a : arrays)
    data.push_back(a->bytes.data()), ranks.push_back((int)a->shape.size()), shapes.push_back(a->shape.data()),
        dtypes.push_back(a->dtype.c_str());
  return entry((int)arrays.size(), data.data(), ranks.data(), shapes.data(), dtypes.data(), nullptr, nullptr);
}
static bool finite(const Array& a) {
  if (a.dtype != "float32") return true;
  for (size_t i = 0; i < a.count(); i++)
    if (!isfinite(((const float*)a.bytes.data())[i])) return false;
  return true;
}
static double difference(Array& a, Array& b) {
  double d = 0, n = 1e-30;
  for (size_t i = 0; i < a.count(); i++) d += pow((double)a.f()[i] - b.f()[i], 2), n += pow((double)b.f()[i], 2);
  return sqrt(d / n);
}

struct Shape {
  int batch, tokens, heads, key_heads, key, value, chunk, gate;
  std::vector<int> bounds;
  std::string dtype;
};
static Array options(const Shape& s, int present, int layout = 0) {
  Array a({14}, "int64");
  int64_t* o = (int64_t*)a.bytes.data();
  const int64_t words[] = {layout, s.gate, 1, 1, 0, 0, present, 0, 0};
  memcpy(o, words, sizeof words);
  const double reals[] = {1 / sqrt((double)s.key), -5.0, 1e-6};
  memcpy(o + 9, reals, sizeof reals);
  o[12] = s.chunk, o[13] = 1;
  return a;
}
static int64_t chunks_of(const Shape& s, int chunk) {
  if (s.bounds.empty()) return (s.tokens + chunk - 1) / chunk;
  int64_t n = 0;
  for (size_t i = 0; i + 1 < s.bounds.size(); i++) n += (s.bounds[i + 1] - s.bounds[i] + chunk - 1) / chunk;
  return n;
}
static int64_t padded(int64_t w) { return (w + 31) / 32 * 32; }

static std::vector<Array> fused(const Shape& s, bool saved, bool stages) {
  seed = 7;
  const int64_t B = s.batch, T = s.tokens, H = s.heads, G = s.key_heads, K = s.key, V = s.value;
  const int64_t N = s.bounds.empty() ? B : (int64_t)s.bounds.size() - 1;
  Array q = random_array({B, T, G, K}, s.dtype), k = random_array({B, T, G, K}, s.dtype),
        v = random_array({B, T, H, V}, s.dtype), g = random_array({B, T, H, K}, s.dtype),
        beta = random_array({B, T, H}, s.dtype), a_log = random_array({H}, "float32", 0.5f),
        bias = random_array({H, K}, "float32"), h0 = random_array({N, H, K, V}, "float32"),
        dht = random_array({N, H, K, V}, "float32"), d_out = random_array({B, T, H, V}, s.dtype), nothing({1}),
        cu({(int64_t)(s.bounds.empty() ? 1 : s.bounds.size())}, "int32");
  for (size_t i = 0; i < s.bounds.size(); i++) ((int32_t*)cu.bytes.data())[i] = s.bounds[i];
  const int base = 1 + 2 + 4 + (s.bounds.empty() ? 0 : 8), cached = saved ? 32 : 0;
  const int64_t slot = padded(K) * padded(V) + s.chunk * (padded(V) + 2 * 64);
  Array out({B, T, H, V}, s.dtype), ht({N, H, K, V}),
      cache({saved ? (s.bounds.empty() ? B : 1) * chunks_of(s, s.chunk) * H * slot + 32
                   : std::max<int64_t>(1, B * T / (32 * s.chunk) * H * K * V)});
  Array forward = options(s, base + 16 + cached), backward = options(s, base + 64 + cached);
  expect(call(kcp_forward, {&forward, &q, &k, &v, &g, &beta, &a_log, &bias, &h0, &cu, &out, &ht, &cache}) == 0,
         "forward");
  Array dq = q, dk = k, dv = v, dg = g, dbeta = beta, da({H}), db({H, K}), dh0({N, H, K, V});
  expect(call(kcp_backward, {&backward, &q,     &k,  &v,  &g,  &beta, &a_log, &bias, &h0, &cu, &d_out,
                             &dht,      &cache, &dq, &dk, &dv, &dg,   &dbeta, &da,   &db, &dh0}) == 0,
         "backward");
  Array summary({N, H, K, V + K}), both = options(s, base + 128), dE({N, H, K, V}),
                                   gradient = options(s, base - 4 + 64 + cached);
  expect(call(kcp_summary, {&both, &q, &k, &v, &g, &beta, &a_log, &bias, &h0, &cu, &summary}) == 0, "summary");
  expect(call(kcp_backward_summary,
              {&gradient, &q, &k, &v, &g, &beta, &a_log, &bias, &dht, &cu, &d_out, &cache, &dE}) == 0,
         "backward_summary");
  expect(difference(dE, dh0) < 1e-5, "state gradient alone");
  std::vector<Array> results = {out, ht, dq, dk, dv, dg, dbeta, da, db, dh0, summary, dE};
  if (!stages) return results;
  const int64_t C = s.chunk, Nc = chunks_of(s, s.chunk);
  Array row({B, H, T, K}), scores({B, H, T, C}), key_row({B, G, T, K}), vrow({B, H, T, V}), rstd({B, G, T}),
      one({B, H, T}), states({B, Nc, H, K, V});
  Array gk = row, aqk = scores, akk = scores, w = row, u = vrow, qg = row, kg = row, qs = row, qh = key_row,
        kh = key_row, qr = rstd, kr = rstd, be = one;
  Array o = options(s, base), oh = options(s, base, 1), od = options(s, base + 64, 1), sum2({N, H, K, V + K}),
        sum3 = sum2;
  expect(call(kcp_fwd_prepare, {&o,   &q, &k, &v,  &g,  &beta, &a_log, &bias, &nothing, &cu, &gk, &aqk,
                                &akk, &w, &u, &qg, &kg, &qs,   &qh,    &kh,   &qr,      &kr, &be}) == 0,
         "prepare");
  Array h = states, vn = vrow, ht2 = ht, out2({B, T, H, V}), dA = scores, dvl = vrow, dqr = row, dh = states,
        dh02 = dh0, dvs = vrow;
  expect(call(kcp_fwd_h, {&o, &kg, &w, &u, &gk, &h0, &cu, &h, &vn, &ht2}) == 0, "fwd_h");
  expect(call(kcp_pre_process_fwd, {&o, &kg, &w, &u, &gk, &h0, &cu, &sum2}) == 0, "pre_process_fwd");
  expect(call(kcp_fwd_finalize, {&o, &qs, &aqk, &vn, &h, &cu, &out2}) == 0, "fwd_finalize");
  expect(call(kcp_bwd_prepare, {&o, &aqk, &vn, &d_out, &h, &cu, &dA, &dvl, &dqr}) == 0, "bwd_prepare");
  Array dout_hm = vrow;
  for (int64_t b = 0; b < B; b++)
    for (int64_t t = 0; t < T; t++)
      for (int64_t hh = 0; hh < H; hh++)
        for (int64_t j = 0; j < V; j++)
          dout_hm.f()[((b * H + hh) * T + t) * V + j] = d_out.f()[((b * T + t) * H + hh) * V + j];
  expect(call(kcp_bwd_dhu, {&od, &qg, &kg, &w, &dout_hm, &dvl, &gk, &dht, &cu, &dh, &dh02, &dvs}) == 0, "bwd_dhu");
  expect(call(kcp_pre_process_bwd, {&od, &qg, &kg, &w, &dout_hm, &dvl, &gk, &dht, &cu, &sum3}) == 0, "pre_process_bwd");
  auto heads_first = [&](Array& x, int64_t n, int64_t width) {
    Array y(width ? std::vector<int64_t>{B, n, T, width} : std::vector<int64_t>{B, n, T});
    const int64_t wd = width ? width : 1;
    for (int64_t b = 0; b < B; b++)
      for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < n; i++)
          memcpy(y.f() + ((b * n + i) * T + t) * wd, x.f() + ((b * T + t) * n + i) * wd, wd * 4);
    return y;
  };
  Array v2 = heads_first(v, H, V), g2 = heads_first(g, H, K), b2 = heads_first(beta, H, 0);
  Array fin = options(s, base + 256, 1), dq2(q.shape), dk2(q.shape), dv2(v.shape), dg2(g.shape), dbeta2(beta.shape),
        da2 = da, db2 = db;
  expect(call(kcp_bwd_finalize, {&fin, &qh, &kh,  &v2, &g2, &b2,  &a_log, &bias, &nothing, &cu,  &akk, &vn, &h, &dh,
                                 &dvs, &dA, &dqr, &qr, &kr, &dq2, &dk2,   &dv2,  &dbeta2,  &dg2, &da2, &db2}) == 0,
         "bwd_finalize");
  struct Pair {
    const char* name;
    Array *a, *b;
  };
  for (Pair pair : {Pair{"out", &out2, &out},
                    {"final state", &ht2, &ht},
                    {"dq", &dq2, &dq},
                    {"dk", &dk2, &dk},
                    {"dv", &dv2, &dv},
                    {"dg", &dg2, &dg},
                    {"dbeta", &dbeta2, &dbeta},
                    {"dh0", &dh02, &dh0},
                    {"summary", &sum2, &summary}})
    expect(difference(*pair.a, *pair.b) < 1e-5, std::string("stages: ") + pair.name);
  for (Array& a : {std::ref(gk), std::ref(akk), std::ref(be), std::ref(sum3), std::ref(da2), std::ref(db2)})
    expect(finite(a), "stages are finite");
  return results;
}
static bool same(const std::vector<Array>& a, const std::vector<Array>& b) {
  for (size_t i = 0; i < a.size(); i++)
    if (a[i].bytes != b[i].bytes) return false;
  return true;
}

// ---- the layers around the attention (entry_layers.cc): outputs and gradients of all of them
static Array layer_options(int64_t present, int64_t begin, double epsilon) {
  Array a({14}, "int64");
  int64_t* n = (int64_t*)a.bytes.data();
  n[6] = present, n[7] = begin;
  memcpy(n + 11, &epsilon, 8);
  return a;
}
static Array integers(std::vector<int64_t> shape, std::function<int32_t(int)> value) {
  Array a(shape, "int32");
  for (size_t i = 0; i < a.count(); i++) ((int32_t*)a.bytes.data())[i] = value((int)i);
  return a;
}
static std::vector<Array> layers(int64_t width, int64_t tokens) {
  seed = 7;
  std::vector<Array> out;
  const auto run = [&](Entry* entry, std::vector<Array*> inputs, std::vector<std::vector<int64_t>> shapes) {
    const size_t first = out.size();
    for (const auto& shape : shapes) out.push_back(Array(shape));
    for (size_t i = first; i < out.size(); i++) inputs.push_back(&out[i]);
    expect(call(entry, inputs) == 0, "a layer is served");
  };
  out.reserve(64);
  Array one({1}), no_boundary = integers({1}, [](int) { return 0; });
  Array x = random_array({2, tokens, width}, "float32"), y = random_array({2, tokens, width}, "float32", 4),
        d = random_array({2, tokens, width}, "float32"), weight = random_array({width}, "float32");
  const std::vector<int64_t> shape = x.shape;
  for (int gated = 0; gated < 2; gated++) {
    Array options = layer_options(gated, 0, 1e-5);
    Array* gate = gated ? &y : &one;
    run(kcp_norm, {&options, &x, &weight, gate}, {shape});
    run(kcp_norm_backward, {&options, &x, &weight, gate, &d}, {shape, {width}, gate->shape});
  }
  Array plain = layer_options(0, 0, 0);
  run(kcp_glu, {&plain, &y, &x}, {shape});
  run(kcp_glu_backward, {&plain, &y, &x, &d}, {shape, shape});
  for (int packed = 0; packed < 2; packed++) {
    Array options = layer_options(2 + 4 * packed, 0, 0), taps = random_array({width, 1, 4}, "float32"),
          halo = random_array({2, 3, width}, "float32");
    Array into = packed ? integers({1, tokens, 1}, [](int t) { return t % 7; }) : no_boundary;
    run(kcp_conv, {&options, &x, &halo, &taps, &weight, &into}, {shape});
    run(kcp_conv_backward, {&options, &x, &halo, &taps, &weight, &into, &d}, {shape, halo.shape, taps.shape, {width}});
    Array rows = layer_options(4 * packed, 3, 0), scores = random_array({2, 3, tokens, tokens + 5}, "float32", 9);
    run(kcp_softmax, {&rows, &scores, &into}, {scores.shape});
    Array probabilities = out.back();
    run(kcp_softmax_backward, {&rows, &probabilities, &scores, &into}, {scores.shape});
  }
  Array logits = random_array({tokens, width}, "float32", 9), losses = random_array({tokens}, "float32"),
        labels = integers({tokens}, [=](int t) { return (int32_t)(t % (width + 2)) - 1; });  // some outside the rows
  run(kcp_cross_entropy, {&plain, &logits, &labels}, {{tokens}});
  run(kcp_cross_entropy_backward, {&plain, &logits, &labels, &losses}, {logits.shape});
  const int64_t total = 112, in = 64, wide = 96;  // experts with 48, 0 and 32 rows, and 32 rows of nobody
  Array ends = integers({3}, [](int e) { return e < 2 ? 48 : 80; }), rows = random_array({total, in}, "float32"),
        grad = random_array({total, wide}, "float32"), w0 = random_array({wide, in}, "float32"),
        w1 = random_array({wide, in}, "float32"), w2 = random_array({wide, in}, "float32");
  run(kcp_grouped, {&plain, &rows, &ends, &w0, &w1, &w2}, {{total, wide}});
  run(kcp_grouped_backward, {&plain, &rows, &ends, &grad, &w0, &w1, &w2}, {rows.shape, w0.shape, w1.shape, w2.shape});
  for (size_t i = 0; i < w1.count(); i++) expect(out[out.size() - 2].f()[i] == 0, "no gradient without rows");
  Array wrong = integers({3}, [](int e) { return 8 * e; }), to({total, wide});
  expect(call(kcp_grouped, {&plain, &rows, &wrong, &w0, &w1, &w2, &to}) != 0, "rows that are no multiple of 16");
  for (const Array& a : out) expect(finite(a), "finite layers");
  return out;
}

int main() {
  const Shape shapes[] = {
      {1, 70, 2, 2, 32, 32, 64, 1, {}, "float32"},
      {2, 50, 4, 2, 20, 12, 32, 2, {}, "float32"},
      {1, 90, 2, 1, 33, 64, 16, 1, {0, 20, 20, 85, 86, 90}, "float32"},
      {1, 150, 1, 1, 64, 40, 64, 0, {}, "float32"},
      {1, 40, 2, 2, 16, 16, 64, 1, {0, 40}, "bfloat16"},
      {1, 40, 2, 1, 24, 16, 64, 2, {}, "float16"},
      {1, 66, 1, 1, 128, 256, 64, 1, {}, "float32"},
      {1, 1100, 1, 1, 20, 24, 16, 1, {}, "float32"},
      {1, 1200, 2, 2, 16, 40, 16, 1, {0, 513, 513, 1200}, "float32"},
  };
  printf("%s\n", kcp_isa());
  for (const Shape& s : shapes) {
    setenv("KCP_NUM_THREADS", "1", 1);
    const std::vector<Array> one = fused(s, true, s.dtype == "float32");
    for (const Array& a : one) expect(finite(a), "finite");
    expect(same(one, fused(s, false, false)), "recompute gives the bits of saved");
    for (const char* threads : {"2", "4"}) {
      setenv("KCP_NUM_THREADS", threads, 1);
      expect(same(one, fused(s, true, s.dtype == "float32")), std::string("bits with threads: ") + threads);
    }
  }
  for (int64_t width : {5, 300}) {
    setenv("KCP_NUM_THREADS", "1", 1);
    const std::vector<Array> one = layers(width, 70);
    for (const char* threads : {"2", "4"}) {
      setenv("KCP_NUM_THREADS", threads, 1);
      expect(same(one, layers(width, 70)), std::string("bits of layers with threads: ") + threads);
    }
  }
  const std::vector<Array> want = fused(shapes[0], true, false);
  {
    std::thread other([&] {
      for (int i = 0; i < 5; i++) expect(same(want, fused(shapes[0], true, false)), "bits beside another caller");
    });
    for (int i = 0; i < 5; i++) expect(same(want, fused(shapes[0], true, false)), "bits beside another caller");
    other.join();
    Array wrong({1});
    expect(call(kcp_forward, {&wrong}) != 0, "a wrong call is refused");
  }
  if (!getenv("KCP_SUITE_NO_FORK")) {  // user-mode emulators can't fork a process with threads
    const pid_t child = fork();
    if (child == 0) _exit(same(want, fused(shapes[0], true, false)) && !failures ? 0 : 1);
    int status = 1;
    waitpid(child, &status, 0);
    expect(status == 0, "a forked child computes too");
  }
  if (failures) printf("%d failures\n", failures.load());
  else printf("all is well\n");
  return failures != 0;
}
