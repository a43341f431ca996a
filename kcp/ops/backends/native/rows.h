// Rows in and out: conversion between the storage types and float32, any width, any strides.
// Nothing past the end of a row is read or written, so tensors need no slack.
#pragma once
#include "vec.h"

namespace KCP_ISA {

template <int dtype>
struct Storage;
template <>
struct Storage<kFloat32> {
  typedef float Element;
  static inline __attribute__((always_inline)) Vec get(const float* p) { return load(p); }
  static inline __attribute__((always_inline)) void put(float* p, Vec x) { store(p, x); }
};
template <>
struct Storage<kBFloat16> {
  typedef uint16_t Element;
  static inline __attribute__((always_inline)) Vec get(const uint16_t* p) {
    HVec h;
    memcpy(&h, p, sizeof h);
    return (Vec)(__builtin_convertvector(h, UVec) << 16);
  }
  // to nearest, ties to even; a NaN stays a NaN
  static inline __attribute__((always_inline)) void put(uint16_t* p, Vec x) {
    const UVec bits = (UVec)x;
    const UVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const UVec nan = (UVec)(x != x);
    const HVec h = __builtin_convertvector((rounded & ~nan) | (((bits >> 16) | 0x40) & nan), HVec);
    memcpy(p, &h, sizeof h);
  }
};
template <>
struct Storage<kFloat16> {
  typedef uint16_t Element;
  // by integers, so that subnormal halves survive a processor that flushes denormals
  static inline __attribute__((always_inline)) Vec get(const uint16_t* p) {
    HVec h;
    memcpy(&h, p, sizeof h);
    const UVec u = __builtin_convertvector(h, UVec), sign = (u & 0x8000) << 16, exponent = u & 0x7c00;
    const UVec special = (UVec)(exponent == 0x7c00), tiny = (UVec)(exponent == 0);
    const UVec normal = ((u & 0x7fff) << 13) + (112u << 23) + (special & (112u << 23));
    const UVec subnormal = (UVec)(__builtin_convertvector((IVec)(u & 0x3ff), Vec) * 0x1p-24f);
    return (Vec)(sign | (normal & ~tiny) | (subnormal & tiny));
  }
  static inline __attribute__((always_inline)) void put(uint16_t* p, Vec x) {
    const UVec bits = (UVec)x, sign = (bits >> 16) & 0x8000;
    const Vec a = absolute(x);
    const UVec b = (UVec)a, normal = (b - (112u << 23) + 0xfff + ((b >> 13) & 1)) >> 13;
    const UVec subnormal = (UVec)(a * 0x1p24f + 12582912.f) & 0x7ff;
    const UVec tiny = (UVec)(a < 0x1p-14f), large = (UVec)(a >= 65520.f), nan = (UVec)(x != x);
    const UVec finite = (normal & ~tiny) | (subnormal & tiny);
    const UVec h = (finite & ~large & ~nan) | (large & 0x7c00) | (nan & 0x7e00) | sign;
    const HVec half = __builtin_convertvector(h, HVec);
    memcpy(p, &half, sizeof half);
  }
};

// visit(row, column, vector) for every vector of rows x width; lanes past the width are 0
template <int dtype, class Visit>
KCP_INLINE void load_rows_as(const char* from, long stride, int rows, int width, Visit visit) {
  typedef typename Storage<dtype>::Element E;
  const int whole = width & ~(kLanes - 1);
  for (int i = 0; i < rows; i++) {
    const E* row = (const E*)(from + i * stride);
    for (int d = 0; d < whole; d += kLanes) visit(i, d, Storage<dtype>::get(row + d));
    if (whole < width) {
      E rest[kLanes] = {};
      memcpy(rest, row + whole, (width - whole) * sizeof(E));
      visit(i, whole, Storage<dtype>::get(rest));
    }
  }
}
// fewer bytes than a vector has, an even number, without a call of memcpy
KCP_INLINE void copy_ragged(char* to, const char* from, long bytes) {
  typedef float Quad __attribute__((vector_size(16), aligned(1), may_alias));
  typedef uint16_t Half __attribute__((aligned(1), may_alias));
  for (; bytes >= 16; bytes -= 16, to += 16, from += 16) *(Quad*)to = *(const Quad*)from;
  for (; bytes >= 2; bytes -= 2, to += 2, from += 2) *(Half*)to = *(const Half*)from;
}
// Finished rows leave for memory: whole vectors go around the caches, ragged ends through them. A vector that one row
// begins and the next one, right behind it, ends is written once: a part written alone would wait for its line.
// value() is asked for vectors at any column, up to kLanes - 1 columns past the width.
template <int dtype, class Value>
KCP_INLINE void stream_rows_as(char* to, long stride, int rows, int width, Value value) {
  typedef typename Storage<dtype>::Element E;
  enum { line = sizeof(Vec) / sizeof(E) };
  alignas(64) E buffer[kMaxWidth + 2 * line];
  const bool joined = stride == (long)(width * sizeof(E)) && width >= line;
  int begun = 0;  // elements of the row before at the start of the buffer
  for (int i = 0; i < rows; i++) {
    E* row = (E*)(to + i * stride);
    int d = begun ? line - begun : -((uintptr_t)row / sizeof(E)) & (line - 1);
    if (d > width) d = width;
    if (dtype == kFloat32) {
      if (d) Storage<dtype>::put(buffer + begun, value(i, 0));
    } else {
      for (int j = 0; j < width; j += kLanes) Storage<dtype>::put(buffer + begun + j, value(i, j));
    }
    if (begun) stream((float*)(row - begun), load((const float*)buffer));
    else copy_ragged((char*)row, (const char*)buffer, d * sizeof(E));
    const E* from = buffer + begun;
    for (; d + line <= width; d += line) {
      if (dtype == kFloat32) stream((float*)(row + d), value(i, d));
      else stream((float*)(row + d), load((const float*)(from + d)));
    }
    const int rest = width - d;
    begun = joined && i + 1 < rows ? rest : 0;
    if (!rest) continue;
    if (dtype == kFloat32) Storage<dtype>::put(buffer, value(i, d));
    else memmove(buffer, from + d, rest * sizeof(E));
    if (!begun) copy_ragged((char*)(row + d), (const char*)buffer, rest * sizeof(E));
  }
}
// row <- value(row, column); only the first `width` columns are written. streamed: the tensors are too large for the
// caches.
template <int dtype, class Value>
KCP_INLINE void store_rows_as(char* to, long stride, int rows, int width, bool streamed, Value value) {
  typedef typename Storage<dtype>::Element E;
  if (streamed) return stream_rows_as<dtype>(to, stride, rows, width, value);
  const int whole = width & ~(kLanes - 1);
  for (int i = 0; i < rows; i++) {
    E* row = (E*)(to + i * stride);
    for (int d = 0; d < whole; d += kLanes) Storage<dtype>::put(row + d, value(i, d));
    if (whole < width) {
      E rest[kLanes];
      Storage<dtype>::put(rest, value(i, whole));
      memcpy(row + whole, rest, (width - whole) * sizeof(E));
    }
  }
}
template <class Value>
KCP_INLINE void store_rows(const View& x, char* to, int rows, int width, bool streamed, Value value) {
  if (x.dtype == kFloat32) store_rows_as<kFloat32>(to, x.token, rows, width, streamed, value);
  else if (x.dtype == kBFloat16) store_rows_as<kBFloat16>(to, x.token, rows, width, streamed, value);
  else store_rows_as<kFloat16>(to, x.token, rows, width, streamed, value);
}
// scratch <- rows of a tensor, zero-filled to `padded` columns and `rows_padded` rows
template <int dtype>
KCP_NOINLINE void gather_as(const char* from, long stride, int rows, int rows_padded, int width, int padded,
                            float* to) {
  load_rows_as<dtype>(from, stride, rows, width, [=](int i, int d, Vec x) { store(to + i * kLd + d, x); });
  const int filled = (width + kLanes - 1) & ~(kLanes - 1);
  if (filled < padded) zero_rows(to + filled, kLd, rows, padded - filled);
  if (rows < rows_padded) zero_rows(to + rows * kLd, kLd, rows_padded - rows, padded);
}
KCP_INLINE void gather(const View& x, const char* from, int rows, int rows_padded, int width, int padded, float* to) {
  if (x.dtype == kFloat32) gather_as<kFloat32>(from, x.token, rows, rows_padded, width, padded, to);
  else if (x.dtype == kBFloat16) gather_as<kBFloat16>(from, x.token, rows, rows_padded, width, padded, to);
  else gather_as<kFloat16>(from, x.token, rows, rows_padded, width, padded, to);
}
// Rows as float32 where they lie, if they can be read like scratch; else gathered into `buffer`.
struct Source {
  const float* at;
  long ld;
};
KCP_INLINE Source rows_or_gather(const View& x, const char* from, int rows, int rows_padded, int width, int padded,
                                 float* buffer) {
  if (x.dtype == kFloat32 && rows == rows_padded && width == padded) return {(const float*)from, x.token / 4};
  gather(x, from, rows, rows_padded, width, padded, buffer);
  return {buffer, kLd};
}
KCP_NOINLINE void scatter(const float* from, const View& x, char* to, int rows, int width, bool streamed) {
  store_rows(x, to, rows, width, streamed, [=](int i, int d) { return load(from + i * kLd + d); });
}
KCP_INLINE float load_scalar(const char* p, int dtype) {
  if (dtype == kFloat32) return *(const float*)p;
  uint16_t lanes[kLanes] = {};
  memcpy(lanes, p, 2);
  return dtype == kBFloat16 ? Storage<kBFloat16>::get(lanes)[0] : Storage<kFloat16>::get(lanes)[0];
}
KCP_INLINE void store_scalar(char* p, int dtype, float x) {
  if (dtype == kFloat32) {
    *(float*)p = x;
    return;
  }
  uint16_t lanes[kLanes];
  if (dtype == kBFloat16) Storage<kBFloat16>::put(lanes, splat(x));
  else Storage<kFloat16>::put(lanes, splat(x));
  memcpy(p, lanes, 2);
}
KCP_INLINE long dtype_size(int dtype) { return dtype == kFloat32 ? 4 : 2; }
// first row of head h at token t of batch row b
KCP_INLINE char* row_at(const View& x, long b, long t, long h) {
  return x.data + b * x.batch + t * x.token + h * x.head;
}

// state [K,V] (or [V,K]) of one sequence and head <-> scratch [Kp][kLd]
KCP_NOINLINE void load_state(const float* s, const Problem& p, float* h) {
  const long K = p.key_width, V = p.value_width;
  zero_rows(h, kLd, p.key_padded, p.value_padded);
  if (!s) return;
  if (p.state_v_first) {
    for (long j = 0; j < V; j++)
      for (long i = 0; i < K; i++) h[i * kLd + j] = s[j * K + i];
  } else {
    for (long i = 0; i < K; i++) memcpy(h + i * kLd, s + i * V, V * sizeof(float));
  }
}
// columns [first, last) of the state
KCP_NOINLINE void store_state(const float* h, const Problem& p, long first, long last, float* s) {
  const long K = p.key_width, V = p.value_width;
  if (last > V) last = V;
  if (p.state_v_first) {
    for (long j = first; j < last; j++)
      for (long i = 0; i < K; i++) s[j * K + i] = h[i * kLd + j];
  } else {
    for (long i = 0; i < K; i++)
      if (first < last) memcpy(s + i * V + first, h + i * kLd + first, (last - first) * sizeof(float));
  }
}

}  // namespace KCP_ISA
