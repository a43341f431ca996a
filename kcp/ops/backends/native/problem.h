// What a driver hands to the kernels, shared by every instruction-set build. Plain data, no code that could be inlined
// with the wrong instruction set.
//
// Symbols used in all files:  B batch, N sequences, T tokens, H value heads, Hk key heads, K key width, V value width,
// C chunk length.  A "row" is one token of one head.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum {
  kMaxChunk = 64,   // tokens of the longest chunk
  kBlock = 16,      // chunks are treated in blocks of 16 tokens
  kMaxWidth = 256,  // largest K and V
  kLane = 32,       // K and V are padded inside the kernels to multiples of this
  kSegment = 32,    // chunks that a recomputing backward treats at once
  kLd = 272,        // row length of scratch matrices: 17 cache lines, so that rows spread over all cache sets
};

enum DType { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum Gate { kGateNone = 0, kGateLowerBound = 1, kGateSoftplus = 2 };

// A tensor [B,T,H,width] in any order of the first three axes; strides in bytes, last axis contiguous.
struct View {
  char* data;  // nullptr: absent
  int dtype;
  long batch, token, head;
};

struct Sequence {
  long batch, begin, end;  // tokens [begin, end) of batch row `batch`
  long chunk;              // index of its first chunk among the chunks of all sequences
  long inner;              // the same of its first inner segment: every segment but a sequence's first is one
};

// One call. Head indices h are value heads of the inputs; outputs and states hold heads head_begin..head_end only,
// and their pointers are already shifted so that h indexes them too.
struct Problem {
  long num_sequences, num_heads, group, key_width, value_width;  // group = H / Hk
  long key_padded, value_padded;
  int chunk;     // tokens per chunk
  int streamed;  // outputs are too large to stay in the caches
  int gate, l2norm, beta_sigmoid, neg_eigval, state_v_first;
  float lower_bound, scale, epsilon;
  const Sequence* sequences;
  View q, k, v, g, beta;
  const float *a_log, *dt_bias;  // [H], [H,K]
  const float* initial_state;    // [N,H,K,V]
  float* final_state;
  View out;
  float* cache;  // see SavedChunk
  float* inner_states;  // [inner segments,H,K,V]: the state at their start, which the recomputing backward begins with
  // backward
  View d_out;
  const float* d_final_state;
  View dq, dk, dv, dg, dbeta;  // dq, dk per value head; float32 when group > 1
  float* d_parameters;         // [N,H,chunks,1+K]: da_log and ddt_bias of every chunk, summed by the caller
  float* d_initial_state;
  float* state_gradient;  // wide mode: dh at the end of every chunk
};

// Saved for the backward, per chunk and head: h [Kp,Vp] at the start, v_new [C,Vp], Aqk and Akk [C,kMaxChunk].
struct SavedChunk {
  float *h, *v_new, *aqk, *akk;
};
