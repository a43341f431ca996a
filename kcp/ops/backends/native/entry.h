// What the entry points share: the choice of the instruction set, and work spread over the pool.
#pragma once
#include "call.h"
#include "kernels.h"
#include "pool.h"

namespace kcp {

// The best table this processor can run; KCP_ISA (avx512, avx2, baseline) may ask for a lesser one.
const Kernels& kernels();

// work(item, scratch of the thread) for every item; denormals are flushed while the kernels run.
void run_items(long count, const std::function<void(long, void*)>& work);

// Of `columns` columns of one head, how many go into an item, so that few heads still occupy all threads: a multiple of 32.
int columns_per_item(long columns, long heads);

// work(n, head, chunk, scratch) for every chunk of p.chunk tokens of every head
void run_chunks(const Problem& p, const Sizes& n, const std::function<void(long, long, long, void*)>& work);

// q, k gradients of several value heads -> their key head
void reduce_groups(const Problem& p, const Sizes& n, const View& from, const View& to);

// Room for the q, k gradients of every value head when they are to be reduced over groups, as views p.dq and p.dk.
struct WideGradients {
  Buffer dq, dk;
  WideGradients(Problem& p, const Sizes& n);
};

// to[head][0..width) = the sum over the chunks of parts[chunk][head][0..ld), always in the same order; zeros if not
// wanted
void sum_parameters(const float* parts, long ld, long width, bool wanted, long heads, long chunks, float* to,
                    long size);

// body() with errors turned into a return code
template <class Body>
int guarded(Body body) {
  try {
    body();
    return 0;
  } catch (const BadCall&) {
    return 1;
  } catch (const std::exception& e) {
    fprintf(stderr, "kcp native kernels: %s\n", e.what());
    return 2;
  }
}

}  // namespace kcp

#define KCP_ENTRY(name)                                                                                            \
  extern "C" __attribute__((visibility("default"))) int name(int count, void** data, int* ranks, int64_t** shapes, \
                                                             const char** dtypes, void*, void*)
