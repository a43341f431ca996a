// Choice of the instruction set, work items, and reductions over their results.
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
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
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
int columns_per_item(long columns, long heads) {
  const long threads = num_threads(), panels = columns / kLane;
  if (heads >= threads || heads == 0) return (int)columns;
  const long parts = (threads + heads - 1) / heads < panels ? (threads + heads - 1) / heads : panels;
  return (int)((panels + parts - 1) / parts) * kLane;
}

void run_chunks(const Problem& p, const Sizes& n, const std::function<void(long, long, long, void*)>& work) {
  std::vector<long> owner;  // sequence of every chunk
  for (long s = 0; s < p.num_sequences; s++)
    for (long t = p.sequences[s].begin; t < p.sequences[s].end; t += p.chunk) owner.push_back(s);
  run_items((long)owner.size() * p.num_heads, [&](long item, void* scratch) {
    const long chunk = item / p.num_heads, s = owner[chunk];
    work(s, n.head_begin + item % p.num_heads, chunk + p.sequences[0].chunk - p.sequences[s].chunk, scratch);
  });
}

void reduce_groups(const Problem& p, const Sizes& n, const View& from, const View& to) {
  const long strip = 256, strips = (n.tokens + strip - 1) / strip, key_heads = p.num_heads / p.group;
  run_items(n.batch * key_heads * strips, [&](long item, void*) {
    const long t = item % strips * strip, h = n.head_begin / p.group + item / strips % key_heads,
               b = item / strips / key_heads;
    kernels().reduce_group(p, from, to, b, t, n.tokens - t < strip ? n.tokens - t : strip, h);
  });
}

WideGradients::WideGradients(Problem& p, const Sizes& n) {
  if (p.group == 1) return;
  const long head = p.key_width * 4, token = p.num_heads * head, floats = n.batch * n.tokens * token / 4;
  dq = allocate(floats), dk = allocate(floats);
  p.dq = {(char*)dq.get() - n.head_begin * head, kFloat32, n.tokens * token, token, head};
  p.dk = {(char*)dk.get() - n.head_begin * head, kFloat32, n.tokens * token, token, head};
}

void sum_parameters(const float* parts, long ld, long width, bool wanted, long heads, long chunks, float* to,
                    long size) {
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

}  // namespace kcp
