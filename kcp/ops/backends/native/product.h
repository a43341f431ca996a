// Register-blocked matrix products, and the prefetches spread over them.
#pragma once
#include "vec.h"

namespace KCP_ISA {

// Lines wanted soon, brought in one by one inside the products: in a token-major tensor the rows of one head lie a page
// apart, where no hardware prefetcher follows, and a burst of prefetches would fill the miss buffers and stall.
struct Prefetch {
  struct Range {
    const char* at;
    long stride;
    int rows, lines;
  } ranges[16];
  const char* at;  // next line
  int left;        // lines left in its row; 0: nothing is wanted
  int count, current, row;

  void clear() { left = count = current = row = 0; }
  void add(const void* from, long stride, int rows, long bytes) {
    const int lines = (int)((((uintptr_t)from & 63) + bytes + 63) / 64);
    ranges[count++] = {(const char*)from, stride, rows, lines};
    if (!left && current == count - 1) at = (const char*)from, left = lines;
  }
  __attribute__((noinline)) void next_row() {
    if (++row == ranges[current].rows) row = 0, current++;
    if (current == count) return;
    at = ranges[current].at + row * ranges[current].stride;
    left = ranges[current].lines;
  }
  inline __attribute__((always_inline)) void touch() {
    if (!left) return;
    __builtin_prefetch(at, 0, 2);
    at += 64;
    if (--left == 0) next_row();
  }
};

// Tile of the product: kRows x kVecs vectors; kStep terms between two prefetches.
#if KCP_LANES == 16
enum { kRows = 8, kVecs = 2, kStep = 8 };
#elif KCP_LANES == 8
enum { kRows = 4, kVecs = 2, kStep = 16 };
#elif defined(__aarch64__)
enum { kRows = 4, kVecs = 4, kStep = 16 };
#else
enum { kRows = 4, kVecs = 2, kStep = 16 };
#endif

// op(A) B with `depth` terms. A is read by broadcasts, so A and its transpose cost the same; B is read by vectors.
struct Product {
  const float* a;
  long lda;
  const float* b;
  long ldb;
  int depth;
};
enum Shape { kFull, kLower, kUpper };  // op(A) as a triangle of 16x16 blocks: blocks of zeros are skipped

// depth is a multiple of 16
template <int R, int W, bool transposed>
KCP_INLINE void accumulate(Prefetch& prefetch, Vec (&sum)[R][W], const float* __restrict a, long lda,
                           const float* __restrict b, long ldb, int depth) {
  for (int t = 0; t < depth; t += kStep) {
    prefetch.touch();
    for (int u = 0; u < kStep; u++, b += ldb, a += transposed ? lda : 1) {
      Vec row[W];
      KCP_UNROLL for (int j = 0; j < W; j++) row[j] = load(b + j * kLanes);
      KCP_UNROLL for (int i = 0; i < R; i++) {
        const Vec x = splat(transposed ? a[i] : a[i * lda]);
        KCP_UNROLL for (int j = 0; j < W; j++) sum[i][j] += x * row[j];
      }
    }
  }
}
template <int R, int W, bool transposed, int shape>
KCP_INLINE void add_tile(Prefetch& prefetch, Vec (&sum)[R][W], const Product& p, int m, int n) {
  const int begin = shape == kUpper ? m & ~(kBlock - 1) : 0;
  const int end = shape == kLower ? (m & ~(kBlock - 1)) + kBlock : p.depth;
  const float* a = p.a + (transposed ? m + begin * p.lda : m * p.lda + begin);
  accumulate<R, W, transposed>(prefetch, sum, a, p.lda, p.b + n + begin * p.ldb, p.ldb, end - begin);
}
// done(row, column, vector) receives op(A1) B1 (+ op(A2) B2) of `rows` x `cols`; the shape is that of the last product
template <int R, int W, bool two, bool trans1, bool trans2, int shape, class Done>
KCP_INLINE void tiles(Prefetch& prefetch, int rows, int cols, const Product& p1, const Product& p2, Done done) {
  for (int n = 0; n < cols; n += W * kLanes)
    for (int m = 0; m < rows; m += R) {
      Vec sum[R][W];
      KCP_UNROLL for (int i = 0; i < R; i++) KCP_UNROLL for (int j = 0; j < W; j++) sum[i][j] = (Vec){};
      add_tile<R, W, trans1, two ? kFull : shape>(prefetch, sum, p1, m, n);
      if (two) add_tile<R, W, trans2, shape>(prefetch, sum, p2, m, n);
      KCP_UNROLL for (int i = 0; i < R; i++) KCP_UNROLL for (int j = 0; j < W; j++)
          done(m + i, n + j * kLanes, sum[i][j]);
    }
}
// cols is a multiple of 32
template <bool trans, int shape = kFull, class Done>
KCP_INLINE void multiply(Prefetch& prefetch, int rows, int cols, Product p, Done done) {
  tiles<kRows, kVecs, false, trans, trans, shape>(prefetch, rows, cols, p, p, done);
}
template <bool trans1, bool trans2, int shape = kFull, class Done>
KCP_INLINE void multiply_add(Prefetch& prefetch, int rows, int cols, Product p1, Product p2, Done done) {
  tiles<kRows, kVecs, true, trans1, trans2, shape>(prefetch, rows, cols, p1, p2, done);
}
// 16 columns, rows a multiple of 16
template <bool trans, class Done>
KCP_INLINE void multiply16(Prefetch& prefetch, int rows, Product p, Done done) {
  tiles<(KCP_LANES == 16 ? 16 : kRows), (KCP_LANES == 16 ? 1 : kVecs), false, trans, trans, kFull>(prefetch, rows, 16,
                                                                                                   p, p, done);
}

}  // namespace KCP_ISA
