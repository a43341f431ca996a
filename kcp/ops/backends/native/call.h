// Reads the arguments of an entry point. All entry points have the signature of MindSpore's "aot" custom operators:
// arrays of data pointers, ranks, shapes and dtype names, inputs first, then outputs. The first input holds the
// options.
#pragma once
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <vector>

#include "problem.h"

namespace kcp {

// Positions in the int64 options tensor; real numbers are stored as the bits of a double.
enum Option {
  kHeadMajor,
  kGate,
  kL2Norm,
  kBetaSigmoid,
  kNegEigval,
  kStateVFirst,
  kPresent,
  kHeadBegin,
  kHeadEnd,
  kScale,
  kLowerBound,
  kEpsilon,
  kChunk,
  kUseExp2,
  kNumOptions
};
// Bits of kPresent: which optional inputs are real and which optional outputs are wanted.
enum Present {
  kHasALog = 1,
  kHasDtBias = 2,
  kHasInitialState = 4,
  kHasCuSeqlens = 8,
  kWantFinalState = 16,
  kHasCache = 32,
  kHasDFinalState = 64,
  kWantM = 128,
  kOutTokenMajor = 256  // token gradients in another layout than the (head-major) inputs
};

struct Sizes {
  long batch, tokens, heads, key_heads;  // of the inputs
  long head_begin, head_end;
  long num_chunks, num_inner;  // chunks and inner segments of all sequences
};

struct BadCall {};  // thrown after the reason has been written to stderr

class Call {
 public:
  Call(int count, void** data, int* ranks, int64_t** shapes, const char** dtypes)
      : count_(count), data_(data), ranks_(ranks), shapes_(shapes), dtypes_(dtypes) {
    if (count < 1 || size(0) < kNumOptions || strcmp(dtypes[0], "int64"))
      fail("the first input must hold %d int64 options", kNumOptions);
    options_ = (const int64_t*)data[0];
  }
  [[noreturn]] static void fail(const char* format, ...) {
    va_list list;
    va_start(list, format);
    fprintf(stderr, "kcp native kernels: ");
    vfprintf(stderr, format, list);
    fprintf(stderr, "\n");
    va_end(list);
    throw BadCall();
  }
  void expect(int count) const {
    if (count_ != count) fail("%d tensors given, %d expected", count_, count);
  }
  long option(Option o) const { return options_[o]; }
  float real(Option o) const {
    double x;
    memcpy(&x, options_ + o, sizeof x);
    return (float)x;
  }
  bool has(Present bit) const { return options_[kPresent] & bit; }
  long size(int i) const {
    long n = 1;
    for (int d = 0; d < rank(i); d++) n *= shapes_[i][d];
    return n;
  }
  int rank(int i) const {
    if (i >= count_) fail("tensor %d is missing, %d tensors given", i, count_);
    return ranks_[i];
  }
  long dim(int i, int d) const {
    const int axis = d < 0 ? d + rank(i) : d;
    if (axis < 0 || axis >= rank(i)) fail("tensor %d has rank %d", i, rank(i));
    return shapes_[i][axis];
  }
  int dtype(int i) const {
    if (i >= count_) fail("tensor %d is missing, %d tensors given", i, count_);
    const char* name = dtypes_[i];
    if (!strcmp(name, "float32")) return kFloat32;
    if (!strcmp(name, "bfloat16")) return kBFloat16;
    if (!strcmp(name, "float16")) return kFloat16;
    fail("tensor %d has dtype %s; float32, bfloat16 and float16 are allowed", i, name);
  }
  // a float32 tensor of at least `least` elements, or nullptr if it is absent
  float* floats(int i, bool present, long least) const {
    if (!present) return nullptr;
    if (dtype(i) != kFloat32 || size(i) < least)
      fail("tensor %d must be float32 with %ld elements, not %s with %ld", i, least, dtypes_[i], size(i));
    return (float*)data_[i];
  }
  const int32_t* ints(int i) const {
    if (i >= count_) fail("tensor %d is missing, %d tensors given", i, count_);
    if (strcmp(dtypes_[i], "int32")) fail("tensor %d must be int32, not %s", i, dtypes_[i]);
    return (const int32_t*)data_[i];
  }
  // [B,T,heads,width] or [B,heads,T,width] (or without B); `scalar` tensors have no last axis. Indexed by absolute
  // heads although the tensor starts at head `first_head`.
  View view(int i, bool head_major, const Sizes& n, long heads, long value_width, bool scalar = false,
            long first_head = 0) const {
    const int axes = rank(i) + (scalar ? 1 : 0), token_axis = axes - 3 + (head_major ? 1 : 0);
    if (axes != 3 && axes != 4) fail("tensor %d has rank %d", i, ranks_[i]);
    if ((axes == 4 ? dim(i, 0) : 1) != n.batch || dim(i, token_axis) != n.tokens ||
        dim(i, axes - 2 - (head_major ? 1 : 0)) != heads || (!scalar && dim(i, -1) != value_width))
      fail("tensor %d must hold B=%ld, T=%ld, %ld heads and a width of %ld", i, n.batch, n.tokens, heads, value_width);
    const int64_t* shape = shapes_[i] + (axes == 4 ? 1 : 0);
    const int type = dtype(i);
    const long width = (scalar ? 1 : shape[2]) * (type == kFloat32 ? 4 : 2);
    View x{(char*)data_[i], type, shape[0] * shape[1] * width, 0, 0};
    x.token = head_major ? width : shape[1] * width;
    x.head = head_major ? shape[1] * width : width;
    x.data -= first_head * x.head;
    return x;
  }

 private:
  int count_;
  void** data_;
  int* ranks_;
  int64_t** shapes_;
  const char** dtypes_;
  const int64_t* options_;
};

// Fills everything that forward, summary and backward share from inputs 0..9: options, q, k, v, g, beta, a_log,
// dt_bias, state (initial or final-gradient), cu_seqlens. `sequences` must outlive the problem.
Sizes read_problem(const Call& call, Problem& p, std::vector<Sequence>& sequences);

// The same from two head-major tensors [B,H,T,K] and [B,H,T,V] and boundaries, for stages without q, k and v.
Sizes read_caches(const Call& call, Problem& p, std::vector<Sequence>& sequences, long key_width, int value_tensor,
                  int boundaries);

struct FreeDeleter {
  void operator()(void* p) const { free(p); }
};
typedef std::unique_ptr<float, FreeDeleter> Buffer;
// 64-byte aligned; freed at the end of the call
Buffer allocate(size_t floats);

// Memory of the calling thread, zeroed when it is first handed out and kept between calls.
void* thread_scratch(size_t bytes);
// The same, not kept when it is large.
class ThreadRoom {
 public:
  explicit ThreadRoom(size_t floats);
  ~ThreadRoom();
  float* data;
};

// Tokens from the last boundary to the end of the tensor belong to no sequence: their rows become 0.
void zero_tail(const Problem& p, const Sizes& n, const View& x, long width, long first_head, long heads);

}  // namespace kcp
