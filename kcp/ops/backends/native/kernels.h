// The kernels of one instruction set, as a table. Defined once per instruction set by kernels.cc.
#pragma once
#include "layer_calls.h"
#include "problem.h"
#include "stage_tensors.h"

struct Kernels {
  const char* name;
  size_t scratch_bytes;  // 64-byte aligned, zeroed when first used, kept by the thread
  // value columns [first, last) of one head
  void (*forward)(const Problem&, long n, long head, int first, int last, void* scratch);
  void (*summary)(const Problem&, long n, long head, int first, int last, bool want_m, float* to, void* scratch);
  // `priv`: room for the saved tensors of this head when p.cache is absent (recompute)
  void (*backward)(const Problem&, long n, long head, float* priv, void* scratch);
  void (*state_gradient)(const Problem&, long n, long head, int first, int last, bool keep, void* scratch);
  void (*backward_chunk)(const Problem&, long n, long head, long chunk, void* scratch);
  // the explicit stages
  void (*prepare)(const Problem&, const StageTensors&, float scale, long n, long head, long chunk, void* scratch);
  void (*scan)(const Problem&, const StageTensors&, long n, long head, void* scratch);
  void (*out)(const Problem&, const StageTensors&, long n, long head, long chunk, void* scratch);
  void (*grad_out)(const Problem&, const StageTensors&, long n, long head, long chunk, void* scratch);
  void (*grad_scan)(const Problem&, const StageTensors&, long n, long head, void* scratch);
  void (*grad_inputs)(const Problem&, const StageTensors&, long n, long head, long chunk, void* scratch);
  // sum of the q or k gradients of a group of value heads, for `tokens` tokens from t on
  void (*reduce_group)(const Problem&, const View& from, const View& to, long b, long t, long tokens, long key_head);
  // the layers around the attention: rows, elements, tokens of a batch row and columns, or columns [first, last)
  void (*norm)(const NormCall&, long first, long last);
  void (*norm_backward)(const NormCall&, long first, long last, float* d_weight);
  void (*glu)(const GluCall&, long first, long last);
  void (*glu_backward)(const GluCall&, long first, long last);
  void (*conv)(const ConvCall&, long b, long first, long last, long d0, long d1);
  void (*conv_backward)(const ConvCall&, long b, long first, long last, long d0, long d1, float* part);
  void (*softmax)(const SoftmaxCall&, long first, long last);
  void (*softmax_backward)(const SoftmaxCall&, long first, long last);
  void (*cross_entropy)(const CrossEntropyCall&, long first, long last);
  void (*cross_entropy_backward)(const CrossEntropyCall&, long first, long last);
  void (*grouped_forward)(const GroupedCall&, long first, long last, float* panel);
  void (*grouped_input_gradient)(const GroupedCall&, long first, long last);
  void (*grouped_weight_gradient)(const GroupedCall&, long first, long last);
};

namespace kcp_baseline {
extern const Kernels table;
}
#if defined(__x86_64__)
namespace kcp_avx2 {
extern const Kernels table;
}
namespace kcp_avx512 {
extern const Kernels table;
}
#endif
