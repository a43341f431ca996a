// The entry points of the native kernels, as MindSpore calls a custom operator.
#pragma once
#include <stdint.h>

typedef int Entry(int, void**, int*, int64_t**, const char**, void*, void*);
extern "C" {
Entry kcp_forward, kcp_backward, kcp_summary, kcp_backward_summary, kcp_fwd_prepare, kcp_pre_process_fwd, kcp_fwd_h,
    kcp_fwd_finalize, kcp_bwd_prepare, kcp_pre_process_bwd, kcp_bwd_dhu, kcp_bwd_finalize, kcp_norm, kcp_norm_backward,
    kcp_glu, kcp_glu_backward, kcp_conv, kcp_conv_backward, kcp_softmax, kcp_softmax_backward, kcp_grouped,
    kcp_grouped_backward, kcp_cross_entropy, kcp_cross_entropy_backward;
}
