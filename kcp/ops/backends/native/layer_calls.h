// What the entry points of the layers hand to their kernels: float32, rows one after the other. Plain data.
#pragma once
#include <stdint.h>

// out = x rstd weight (sigmoid(gate)), rstd = 1/sqrt(mean x^2 + epsilon), one row at a time
struct NormCall {
  const float *x, *weight, *gate, *d_out;  // gate: nullptr without one
  float *out, *dx, *d_gate;
  long width;
  float epsilon;
};

// out = gate sigmoid(gate) up, element by element
struct GluCall {
  const float *gate, *up, *d_out;
  float *out, *d_gate, *d_up;
};

// y_t = silu(bias + sum_j taps[j] x_{t-j}) over [B,T,D]; j reaches back to the document's start, `into[t]` tokens before
// t. x_{-1} is the last of the size-1 rows of the halo.
enum { kConvStrip = 32, kConvColumns = 256, kMaxTaps = 32 };
struct ConvCall {
  const float *x, *halo, *taps, *bias, *d_out;  // taps [size][D], newest first; bias: nullptr without one
  const int32_t* into;                          // [B or 1][T], nullptr: no boundary inside
  long into_batch;                              // 0: the same for every batch row
  long batch, tokens, width, size;
  float *out, *dx, *d_halo;
  float* parts;  // [B][strips][size+1][D]: gradients of the taps and of the bias
};

// Rows of softmax over the keys that a query sees: its own position and before, back to its document's start.
struct SoftmaxCall {
  const float *scores, *d_out;  // scores [B,H,Tq,Tk]; in the backward the probabilities
  float* out;
  const int32_t* into;  // [B or 1][Tq]
  long into_batch;
  long heads, queries, keys, begin;  // begin: position of the first query
};

// Cross entropy of rows: log sum_v exp(x_v) - x_label. A label outside the row picks nothing: the row's loss is the log sum.
struct CrossEntropyCall {
  const float *logits, *d_loss;  // [rows][width], [rows]
  const int32_t* labels;
  float* out;  // the losses [rows], or the gradients of the logits
  long width;
};

// Rows of x are grouped by expert, rows [ends[e-1], ends[e]) belong to expert e; all ends are multiples of 16.
enum { kGroupColumns = 64 };
struct GroupedCall {
  const float *x, *weight, *d_out;  // of one expert: x [rows][in], weight [out][in], d_out [rows][out]
  float* to;                        // x W^T, d_out W, or d_out^T x
  long rows, in, out;
};
