// A libFuzzer target for the entry points (scripts/fuzz_native.sh). The bytes choose an entry point, sizes, dtypes, layout, flags and
// boundaries; a valid call must be served, and up to three hostile changes (a size, an axis, a dtype, an option, a boundary, a tensor
// too many) may be refused with a code. Every buffer is exactly as large as its shape says, so that a step beyond it is reported.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

#include "native_entries.h"

namespace {
typedef std::vector<int64_t> Dims;

struct Bytes {
  const uint8_t* data;
  size_t left;
  int next(int limit) {  // 0 .. limit - 1
    if (!left) return 0;
    left--;
    return *data++ % limit;
  }
  int64_t word() {
    int64_t x = 0;
    for (int i = 0; i < 8; i++) x = x << 8 | next(256);
    return x;
  }
};
struct Tensor {
  Dims shape;
  std::string dtype = "float32";
};
int64_t product(const Dims& dims) {
  int64_t n = 1;
  for (int64_t d : dims) n *= d;
  return n;
}
size_t width(const std::string& dtype) { return dtype == "int64" ? 8 : dtype == "float32" || dtype == "int32" ? 4 : 2; }

struct Problem {
  Entry* entry;
  std::vector<Tensor> tensors;  // [0]: the options
  int64_t options[14];
  std::vector<int32_t> integers;  // of the one int32 tensor
};
void set_real(Problem& p, int at, double x) { memcpy(p.options + at, &x, 8); }

const char* const kTypes[] = {"float32", "bfloat16", "float16"};
const int kWidths[] = {1, 2, 16, 20, 31, 32, 33, 64, 100, 128, 255, 256};

Problem attention(int which, Bytes& in) {
  Problem p = {};
  const int64_t G = 1 + in.next(3), H = G * (1 + in.next(3)), C = 16 << in.next(3);
  int64_t K = kWidths[in.next(12)], V = kWidths[in.next(12)], T = in.next(150), B = 1 + in.next(3);
  if (K * V * H > 16384) T %= 40;
  else if (K * V * H <= 1024 && in.next(4) == 0) T *= 8;  // more than one segment
  const int flags = in.next(256), head_major = in.next(2);
  const bool packed = flags & 1, initial = flags & 2, final = flags & 4, cached = flags & 8, bias = flags & 16, want_m = flags & 32,
             flat = flags & 64, range = flags & 128;
  std::string type = kTypes[in.next(3)];
  int64_t N = B, chunks = (T + C - 1) / C;
  if (packed) {
    B = 1, N = 1 + in.next(6), chunks = 0;
    p.integers.push_back(0);
    for (int64_t i = 0; i < N; i++) {
      const int room = (int)T - p.integers.back();
      p.integers.push_back(p.integers.back() + in.next(room + 1));
      chunks += (p.integers[i + 1] - p.integers[i] + C - 1) / C;
    }
  }
  const int gate = in.next(3);
  const bool a_log = bias || gate == 2;
  int64_t* o = p.options;
  o[0] = head_major, o[1] = gate, o[2] = in.next(2), o[3] = in.next(2), o[4] = in.next(2), o[5] = in.next(2);
  o[12] = C, o[13] = 1;
  set_real(p, 9, 1 / sqrt((double)K)), set_real(p, 10, -5.0), set_real(p, 11, 1e-6);
  int64_t heads = H;
  if (which < 4 && range && G > 1) {
    o[7] = H / G * in.next((int)G);
    heads = H / G * (1 + in.next((int)(G - o[7] / (H / G))));
    o[8] = o[7] + heads;
  }
  const bool stages = which >= 4;
  const auto rows = [&](int64_t n, int64_t w, bool by_head, bool may_be_flat) {
    Dims d = by_head ? Dims{B, n, T, w} : Dims{B, T, n, w};
    if (flat && B == 1 && may_be_flat) d.erase(d.begin());
    return d;
  };
  const auto scalars = [&](int64_t n, bool by_head) {
    Dims d = rows(n, 1, by_head, true);
    d.pop_back();
    return d;
  };
  const Dims state{N, stages ? H : heads, o[5] ? V : K, o[5] ? K : V}, one{1};
  const Tensor none{one}, bounds{Dims{packed ? N + 1 : 1}, "int32"};
  const auto row = [&](int64_t w) { return Tensor{Dims{B, H, T, w}}; };
  const Tensor hk = row(K), hv = row(V), hc = row(C), many{Dims{packed ? 1 : B, chunks, H, K, V}}, sum{Dims{N, heads, K, V + K}};
  const bool by_head = head_major;
  int64_t has = (a_log ? 1 : 0) | (bias ? 2 : 0) | (packed ? 8 : 0);
  const auto token = [&](int64_t n, int64_t w, bool first) { return Tensor{rows(n, w, first, true), type}; };
  std::vector<Tensor> inputs = {Tensor{Dims{14}, "int64"},
                                token(G, K, by_head),
                                token(G, K, by_head),
                                token(H, V, by_head),
                                token(H, K, by_head),
                                Tensor{scalars(H, by_head), type},
                                a_log ? Tensor{Dims{H}} : none,
                                bias ? Tensor{Dims{H, K}} : none};
  const auto add = [&](std::vector<Tensor> more) { inputs.insert(inputs.end(), more.begin(), more.end()); };
  const auto start = [&](std::vector<Tensor> all) { inputs = all, inputs.insert(inputs.begin(), Tensor{Dims{14}, "int64"}); };
  const int64_t Kp = (K + 31) / 32 * 32, Vp = (V + 31) / 32 * 32, slots = (packed ? 1 : B) * chunks * heads * (Kp * Vp + C * (Vp + 128)) + 32;
  const int64_t inner = B * T / (32 * C) * heads * K * V;
  const Tensor cache = cached || inner ? Tensor{Dims{cached ? slots : inner}} : none, given = initial ? Tensor{state} : none;
  const Tensor dy = final ? Tensor{state} : none;
  switch (which) {
    case 0:
      p.entry = kcp_forward, has |= (initial ? 4 : 0) | (final ? 16 : 0) | (cached ? 32 : 0);
      add({given, bounds, token(H, V, false), dy, cache});
      break;
    case 1:
      p.entry = kcp_backward, has |= (initial ? 4 : 0) | (final ? 64 : 0) | (cached ? 32 : 0);
      add({given, bounds, token(H, V, false), dy, cache, token(G, K, by_head), token(G, K, by_head), token(H, V, by_head),
           token(H, K, by_head), Tensor{scalars(H, by_head), type}, a_log ? Tensor{Dims{heads}} : none,
           bias ? Tensor{Dims{heads, K}} : none, given});
      break;
    case 2:
      p.entry = kcp_summary, has |= (initial ? 4 : 0) | (want_m ? 128 : 0);
      add({given, bounds, want_m ? sum : Tensor{Dims{N, heads, K, V}}});
      break;
    case 3:
      p.entry = kcp_backward_summary, has |= final ? 64 : 0;
      add({dy, bounds, token(H, V, false), cache, Tensor{state}}), has |= cached ? 32 : 0;
      break;
    case 4: {
      const Tensor key{Dims{B, G, T, K}}, norm{o[2] ? Dims{B, G, T} : one};
      p.entry = kcp_fwd_prepare;
      add({none, bounds, hk, hc, hc, hk, hv, hk, hk, hk, key, key, norm, norm, Tensor{Dims{B, H, T}}});
      break;
    }
    case 5:
      p.entry = kcp_pre_process_fwd, has |= initial ? 4 : 0;
      start({hk, hk, hv, hk, given, bounds, Tensor{Dims{N, H, K, V + K}}});
      break;
    case 6:
      p.entry = kcp_fwd_h, has |= initial ? 4 : 0;
      start({hk, hk, hv, hk, given, bounds, many, hv, Tensor{state}});
      break;
    case 7:
      p.entry = kcp_fwd_finalize;
      start({hk, hc, hv, many, bounds, Tensor{rows(H, V, by_head, false), type}});
      break;
    case 8:
      p.entry = kcp_bwd_prepare;
      start({hc, hv, Tensor{rows(H, V, by_head, false), type}, many, bounds, hc, hv, hk});
      break;
    case 9:
    case 10:
      p.entry = which == 9 ? kcp_pre_process_bwd : kcp_bwd_dhu, has |= final ? 64 : 0;
      start({hk, hk, hk, Tensor{Dims{B, H, T, V}, type}, hv, hk, dy, bounds});
      if (which == 9) add({Tensor{Dims{N, H, K, V + K}}});
      else add({many, Tensor{state}, hv});
      break;
    default: {
      o[0] = 1, type = "float32";
      const bool token_major = flags & 128;
      const Tensor norm{o[2] ? Dims{B, G, T} : one}, key{Dims{B, G, T, K}};
      const auto result = [&](int64_t n, int64_t w) { return Tensor{token_major ? Dims{B, T, n, w} : Dims{B, n, T, w}}; };
      p.entry = kcp_bwd_finalize, has |= token_major ? 256 : 0;
      start({key, key, hv, hk, Tensor{Dims{B, H, T}}, a_log ? Tensor{Dims{H}} : none, bias ? Tensor{Dims{H, K}} : none, none, bounds, hc,
             hv, many, many, hv, hc, hk, norm, norm, result(G, K), result(G, K), result(H, V),
             Tensor{token_major ? Dims{B, T, H} : Dims{B, H, T}}, result(H, K), a_log ? Tensor{Dims{H}} : none,
             bias ? Tensor{Dims{H, K}} : none});
    }
  }
  o[6] = has;
  p.tensors = inputs;
  return p;
}

Problem layer(int which, Bytes& in) {
  Problem p = {};
  const int64_t B = 1 + in.next(3), T = in.next(140), D = 1 + in.next(90), E = 1 + in.next(4), taps = 1 + in.next(8);
  const int flags = in.next(8);
  const Tensor none{Dims{1}}, x{Dims{B, T, D}}, options{Dims{14}, "int64"}, row{Dims{D}};
  const Tensor gate = flags & 1 ? x : none;
  set_real(p, 11, 1e-5);
  p.options[6] = flags;
  const int64_t keys = T % 40 + 1 + in.next(9), queries = T % 40;
  const bool softmax = which == 6 || which == 7;
  const Tensor into{flags & 4 ? Dims{flags & 2 ? 1 : B, softmax ? queries : T, 1} : Dims{1}, "int32"};
  if (which >= 4 && which < 8)
    for (int64_t i = 0; i < product(into.shape); i++) p.integers.push_back(in.next(softmax && queries ? (int)(keys - queries + i % queries + 1) : 40));
  const Tensor halo{Dims{B, taps - 1, D}}, kernel{Dims{D, 1, taps}}, bias = flags & 2 ? row : none;
  const Tensor scores{Dims{B, E, queries, keys}}, ends{Dims{E}, "int32"};
  const int64_t wide = 32 * (1 + in.next(3)), narrow = 32 * (1 + in.next(3));
  switch (which) {
    case 0: p.entry = kcp_norm, p.tensors = {options, x, row, gate, x}; break;
    case 1: p.entry = kcp_norm_backward, p.tensors = {options, x, row, gate, x, x, row, gate}; break;
    case 2: p.entry = kcp_glu, p.tensors = {options, x, x, x}; break;
    case 3: p.entry = kcp_glu_backward, p.tensors = {options, x, x, x, x, x}; break;
    case 4: p.entry = kcp_conv, p.tensors = {options, x, halo, kernel, bias, into, x}; break;
    case 5: p.entry = kcp_conv_backward, p.tensors = {options, x, halo, kernel, bias, into, x, x, halo, kernel, bias}; break;
    case 6: p.options[7] = keys - queries, p.entry = kcp_softmax, p.tensors = {options, scores, into, scores}; break;
    case 7: p.options[7] = keys - queries, p.entry = kcp_softmax_backward, p.tensors = {options, scores, scores, into, scores}; break;
    case 10:
    case 11:
      for (int64_t i = 0; i < T; i++) p.integers.push_back(in.next((int)D + 2) - 1);
      p.entry = which == 10 ? kcp_cross_entropy : kcp_cross_entropy_backward;
      p.tensors = {options, Tensor{Dims{T, D}}, Tensor{Dims{T}, "int32"}, Tensor{Dims{T}}};
      if (which == 11) p.tensors.push_back(Tensor{Dims{T, D}});
      break;
    default: {
      for (int64_t e = 0, end = 0; e < E; e++) p.integers.push_back((int32_t)(end += 16 * in.next(4)));
      const Tensor rows{Dims{p.integers.back() + 16 * in.next(3), narrow}}, outs{Dims{rows.shape[0], wide}}, w{Dims{wide, narrow}};
      p.tensors = {options, rows, ends};
      p.entry = which == 8 ? kcp_grouped : kcp_grouped_backward;
      if (which == 9) p.tensors.push_back(outs);
      for (int64_t e = 0; e < E; e++) p.tensors.push_back(w);
      p.tensors.push_back(which == 8 ? outs : rows);
      if (which == 9)
        for (int64_t e = 0; e < E; e++) p.tensors.push_back(w);
    }
  }
  return p;
}

void make_hostile(Problem& p, Bytes& in) {
  static const char* const types[] = {"float32", "bfloat16", "float16", "int32", "int64", "float64", ""};
  static const int sizes[] = {0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 257};
  Tensor& t = p.tensors[in.next((int)p.tensors.size())];
  const int axis = t.shape.empty() ? 0 : in.next((int)t.shape.size());
  switch (in.next(8)) {
    case 0: if (!t.shape.empty()) t.shape[axis] = sizes[in.next(11)]; break;
    case 1: if (!t.shape.empty()) t.shape.erase(t.shape.begin() + axis); break;
    case 2: t.shape.insert(t.shape.begin() + axis, 1 + in.next(2)); break;
    case 3: t.dtype = types[in.next(7)]; break;
    case 4: p.options[in.next(14)] = in.word(); break;
    case 5: p.options[in.next(14)] = in.next(256) - 8; break;
    case 6: if (!p.integers.empty()) p.integers[in.next((int)p.integers.size())] = in.next(2) ? (int32_t)in.word() : in.next(256) - 8; break;
    default:
      if (in.next(2)) p.tensors.pop_back();
      else p.tensors.push_back(t);
  }
}

// numbers of a call: tame ones, or with a few that are huge, infinite or not numbers
void fill(char* to, size_t bytes, const std::string& dtype, uint64_t& seed, int kind) {
  for (size_t i = 0; i < bytes / width(dtype); i++) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    float x = (float)(seed >> 40) / (1 << 23) - 1;
    const int special = seed >> 33 & 127;
    if (kind == 1) x *= 30;
    if (kind == 2 && special < 4) x = special == 0 ? NAN : special == 1 ? INFINITY : special == 2 ? -1e30f : 1e-40f;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint16_t half = (uint16_t)((bits >> 16 & 0x8000) | (0x3000 + (bits >> 13 & 0x7ff)));
    if (dtype == "float32") memcpy(to + 4 * i, &x, 4);
    else if (dtype == "bfloat16") ((uint16_t*)to)[i] = (uint16_t)(bits >> 16);
    else if (width(dtype) == 2) ((uint16_t*)to)[i] = half;
  }
}
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes in = {data, size};
  setenv("KCP_NUM_THREADS", in.next(4) ? "1" : "3", 1);
  const int which = in.next(24), hostile = in.next(4), kind = in.next(3);
  uint64_t seed = (uint64_t)in.next(256) + 1;
  Problem p = which < 12 ? attention(which, in) : layer(which - 12, in);
  for (int i = 0; i < hostile; i++)
    if (!p.tensors.empty()) make_hostile(p, in);
  std::vector<char*> buffers;
  std::vector<void*> pointers;
  std::vector<int> ranks;
  std::vector<int64_t*> shapes;
  std::vector<const char*> dtypes;
  bool too_large = false, first = true;
  for (Tensor& t : p.tensors) too_large |= product(t.shape) > (1 << 22);
  if (too_large) return -1;
  for (Tensor& t : p.tensors) {
    const size_t bytes = product(t.shape) * (t.dtype == "float64" ? 8 : width(t.dtype));
    char* buffer = (char*)malloc(bytes);
    fill(buffer, bytes, t.dtype, seed, kind);
    if (first) memset(buffer, 0, bytes), memcpy(buffer, p.options, bytes < sizeof p.options ? bytes : sizeof p.options);
    if (t.dtype == "int32" && bytes && !p.integers.empty())
      memset(buffer, 0, bytes), memcpy(buffer, p.integers.data(), bytes < 4 * p.integers.size() ? bytes : 4 * p.integers.size());
    first = false;
    buffers.push_back(buffer), pointers.push_back(buffer), ranks.push_back((int)t.shape.size()), shapes.push_back(t.shape.data()),
        dtypes.push_back(t.dtype.c_str());
  }
  // a cache comes from a forward: its first number says where the slots begin
  const size_t cache = p.entry == kcp_backward_summary ? 11 : 12;
  if ((p.entry == kcp_backward_summary || p.entry == kcp_backward) && p.tensors.size() > cache && product(p.tensors[cache].shape) > 1 &&
      p.tensors[cache].dtype == "float32")
    *(float*)buffers[cache] = (float)(((uintptr_t)buffers[cache] + 4 + 63) / 64 * 64 - (uintptr_t)buffers[cache]) / 4;
  const int code = p.entry((int)p.tensors.size(), pointers.data(), ranks.data(), shapes.data(), dtypes.data(), nullptr, nullptr);
  if (code < 0 || code > 1 || (code && !hostile)) {
    printf("entry %d returned %d after %d hostile changes\n", which, code, hostile);
    abort();
  }
  for (char* buffer : buffers) free(buffer);
  return 0;
}
