#include "call.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kcp {
namespace {

long padded(long width) { return (width + kLane - 1) / kLane * kLane; }

void read_sequences(const Call& call, int boundaries, Sizes& n, std::vector<Sequence>& out, int chunk) {
  auto add = [&](long b, long begin, long end) {
    const long chunks = (end - begin + chunk - 1) / chunk;
    out.push_back({b, begin, end, n.num_chunks, n.num_inner});
    n.num_chunks += chunks;
    if (chunks) n.num_inner += (chunks - 1) / kSegment;
  };
  if (call.has(kHasCuSeqlens)) {
    const int32_t* bounds = call.ints(boundaries);
    const long count = call.size(boundaries);
    if (n.batch != 1) Call::fail("cu_seqlens needs a batch of 1, not %ld", n.batch);
    if (count < 2 || bounds[0] != 0) Call::fail("cu_seqlens must start with 0 and hold at least 2 numbers");
    for (long i = 0; i + 1 < count; i++) {
      if (bounds[i + 1] < bounds[i] || bounds[i + 1] > n.tokens)
        Call::fail("cu_seqlens must not decrease or exceed T=%ld: %d follows %d", n.tokens, bounds[i + 1], bounds[i]);
      add(0, bounds[i], bounds[i + 1]);
    }
  } else {
    for (long b = 0; b < n.batch; b++) add(b, 0, n.tokens);
  }
}

int read_chunk(const Call& call) {
  const long chunk = call.option(kChunk);
  if (chunk != 16 && chunk != 32 && chunk != kMaxChunk) Call::fail("chunk_size %ld: 16, 32 and 64 are allowed", chunk);
  return (int)chunk;
}

struct ThreadMemory {
  void* data = nullptr;
  size_t bytes = 0;
  ~ThreadMemory() { free(data); }
  void* grow(size_t wanted, bool zero) {
    if (bytes >= wanted) return data;
    free(data);
    const size_t page = size_t(2) << 20;
    bytes = (wanted + page - 1) / page * page;
    data = aligned_alloc(page, bytes);
    if (!data) {
      bytes = 0;
      Call::fail("out of memory: %zu bytes", wanted);
    }
#if defined(MADV_HUGEPAGE)
    madvise(data, bytes, MADV_HUGEPAGE);
#endif
    if (zero) memset(data, 0, bytes);
    return data;
  }
  void release() {
    free(data);
    data = nullptr;
    bytes = 0;
  }
};
thread_local ThreadMemory scratch_memory, room_memory;
const size_t kKeptRoom = size_t(64) << 20;
const long kStreamedBytes = 8 << 20;

}  // namespace

Sizes read_problem(const Call& call, Problem& p, std::vector<Sequence>& sequences) {
  const bool head_major = call.option(kHeadMajor);
  const int rank = call.rank(3);
  if (rank != 3 && rank != 4) Call::fail("v has rank %d; 3 and 4 are allowed", rank);
  const int head_axis = rank - 2 - (head_major ? 1 : 0), token_axis = rank - 2 - (head_major ? 0 : 1);
  Sizes n = {};
  n.batch = rank == 4 ? call.dim(3, 0) : 1;
  n.tokens = call.dim(3, token_axis);
  n.heads = call.dim(3, head_axis);
  n.key_heads = call.dim(1, head_axis);
  n.head_begin = call.option(kHeadBegin);
  n.head_end = call.option(kHeadEnd) ? call.option(kHeadEnd) : n.heads;
  p.key_width = call.dim(1, -1);
  p.value_width = call.dim(3, -1);
  if (n.key_heads < 1 || n.heads % n.key_heads)
    Call::fail("%ld value heads are not a multiple of %ld key heads", n.heads, n.key_heads);
  if (p.key_width < 1 || p.key_width > kMaxWidth || p.value_width < 1 || p.value_width > kMaxWidth)
    Call::fail("K=%ld, V=%ld: 1 to %d is allowed", p.key_width, p.value_width, (int)kMaxWidth);
  p.group = n.heads / n.key_heads;
  if (n.head_begin < 0 || n.head_end > n.heads || n.head_begin >= n.head_end || n.head_begin % p.group ||
      n.head_end % p.group)
    Call::fail("head range [%ld, %ld) of %ld heads: it must be whole groups of %ld", n.head_begin, n.head_end, n.heads,
               p.group);
  p.num_heads = n.head_end - n.head_begin;
  p.key_padded = padded(p.key_width);
  p.value_padded = padded(p.value_width);
  p.chunk = read_chunk(call);
  if (call.option(kGate) < kGateNone || call.option(kGate) > kGateSoftplus)
    Call::fail("gate %ld: %d to %d is allowed", call.option(kGate), kGateNone, kGateSoftplus);
  p.gate = (int)call.option(kGate);
  p.l2norm = (int)call.option(kL2Norm);
  p.beta_sigmoid = (int)call.option(kBetaSigmoid);
  p.neg_eigval = (int)call.option(kNegEigval);
  p.state_v_first = (int)call.option(kStateVFirst);
  p.scale = call.real(kScale);
  p.lower_bound = call.real(kLowerBound);
  p.epsilon = call.real(kEpsilon);
  const long rows = n.batch * n.tokens;
  p.streamed = rows * n.heads * (p.key_width + p.value_width) * 4 > kStreamedBytes;
  p.q = call.view(1, head_major, n, n.key_heads, p.key_width);
  p.k = call.view(2, head_major, n, n.key_heads, p.key_width);
  p.v = call.view(3, head_major, n, n.heads, p.value_width);
  p.g = call.view(4, head_major, n, n.heads, p.key_width);
  p.beta = call.view(5, head_major, n, n.heads, 1, true);
  p.a_log = call.floats(6, call.has(kHasALog), n.heads);
  p.dt_bias = call.floats(7, call.has(kHasDtBias), n.heads * p.key_width);
  if (p.gate == kGateSoftplus && !p.a_log) Call::fail("the softplus gate needs a_log");
  read_sequences(call, 9, n, sequences, p.chunk);
  p.sequences = sequences.data();
  p.num_sequences = (long)sequences.size();
  return n;
}

Sizes read_caches(const Call& call, Problem& p, std::vector<Sequence>& sequences, long key_width, int value_tensor,
                  int boundaries) {
  Sizes n = {};
  if (call.rank(value_tensor) != 4)
    Call::fail("tensor %d must have 4 axes, not %d", value_tensor, call.rank(value_tensor));
  n.batch = call.dim(value_tensor, 0);
  n.heads = n.key_heads = n.head_end = p.num_heads = call.dim(value_tensor, 1);
  n.tokens = call.dim(value_tensor, 2);
  p.group = 1;
  p.key_width = key_width;
  p.value_width = call.dim(value_tensor, 3);
  if (key_width < 1 || key_width > kMaxWidth || p.value_width < 1 || p.value_width > kMaxWidth)
    Call::fail("K=%ld, V=%ld: 1 to %d is allowed", key_width, p.value_width, (int)kMaxWidth);
  p.key_padded = padded(key_width);
  p.value_padded = padded(p.value_width);
  p.chunk = read_chunk(call);
  p.state_v_first = (int)call.option(kStateVFirst);
  p.scale = call.real(kScale);
  read_sequences(call, boundaries, n, sequences, p.chunk);
  p.sequences = sequences.data();
  p.num_sequences = (long)sequences.size();
  return n;
}

Buffer allocate(size_t floats) {
  const size_t bytes = (floats * sizeof(float) + 63) / 64 * 64 + 64;
  void* data = aligned_alloc(64, bytes);
  if (!data) Call::fail("out of memory: %zu bytes", bytes);
#if defined(MADV_HUGEPAGE)
  if (bytes >= (size_t(8) << 20)) {
    const size_t page = size_t(2) << 20, from = ((size_t)data + page - 1) / page * page,
                 to = ((size_t)data + bytes) / page * page;
    madvise((void*)from, to - from, MADV_HUGEPAGE);
  }
#endif
  return Buffer((float*)data);
}

void* thread_scratch(size_t bytes) { return scratch_memory.grow(bytes, true); }

ThreadRoom::ThreadRoom(size_t floats)
    : data(floats ? (float*)room_memory.grow(floats * sizeof(float), false) : nullptr) {}
ThreadRoom::~ThreadRoom() {
  if (room_memory.bytes > kKeptRoom) room_memory.release();
}

void zero_tail(const Problem& p, const Sizes& n, const View& x, long width, long first_head, long heads) {
  if (!x.data || !p.num_sequences) return;
  const Sequence& last = p.sequences[p.num_sequences - 1];
  const long bytes = width * (x.dtype == kFloat32 ? 4 : 2);
  for (long t = last.end; t < n.tokens; t++)
    for (long h = first_head; h < first_head + heads; h++)
      memset(x.data + last.batch * x.batch + t * x.token + h * x.head, 0, bytes);
}

}  // namespace kcp
