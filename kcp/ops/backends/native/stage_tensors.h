// Tensors of the nine explicit stages. All float32 and head-major, [B,H,T,width] or, for states, [B,chunks,H,K,V]; a
// chunk holds p.chunk tokens. In the scans `qg` is unscaled.
#pragma once
#include "problem.h"

struct StageTensors {
  long tokens, heads, key_heads;
  int use_exp2;   // gk holds log2 decays, else natural ones
  int h_v_first;  // h is [.., V,K]
  int columns;    // row length of Aqk and Akk
  float *gk, *aqk, *akk, *w, *u, *qg, *kg, *qg_scaled;
  float *q_hat, *k_hat, *q_rstd, *k_rstd, *beta;
  float *h, *v_new;
  float *d_aqk, *dv, *dq_raw, *dh, *dv_scan;
  float* summary;  // [N,H,K,V+K]
};
