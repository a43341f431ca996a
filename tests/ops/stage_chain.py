"""The nine stages chained by hand, as a caller that puts communication between them would."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from mindspore import Tensor
from op_cases import STORED, Problem, boundaries, rounded, tensor_of, to_numpy

from kcp import ops as kcp_ops

PREPARE_NAMES = (
    "gk", "aqk", "akk", "w", "u", "qg", "kg", "qg_scaled", "q_hat", "k_hat", "q_rstd", "k_rstd", "beta_eff",
)  # fmt: skip


@dataclass
class Chain:
    """One problem, all tensors head-major; every method calls one stage with the arguments that it takes."""

    problem: Problem
    cu_form: str = "host"
    use_exp2: bool = True
    default_scale: bool = False

    def __post_init__(self):
        inputs, options = self.problem.inputs, self.problem.options
        self.values = {n: tensor_of(n, x, "BNSD", self.problem.dtype) for n, x in inputs.items()}
        self.tokens = inputs["q"].shape[1]
        self.scale = None if self.default_scale else options.get("scale") or inputs["q"].shape[-1] ** -0.5
        self.cu = boundaries(options.get("cu_seqlens"), self.cu_form, self.tokens, padding=0)
        self.chunk_size = options.get("chunk_size", 64)
        self.v_first = options.get("state_v_first", False)
        self.gate = {n: options[n] for n in ("safe_gate", "use_gate_in_kernel")}
        self.gate["lower_bound"] = options.get("lower_bound", -5.0)
        self.beta = {
            "use_beta_sigmoid_in_kernel": options["use_beta_sigmoid_in_kernel"],
            "allow_neg_eigval": options.get("allow_neg_eigval", False),
        }
        self.packing = {"cu_seqlens": self.cu}
        self.d_o = None if self.problem.d_out is None else tensor_of("v", self.problem.d_out, "BNSD")

    def parameter(self, name: str) -> Tensor | None:
        return self.values.get(name)

    def prepare(self, mode: str = "save") -> dict[str, Tensor | None]:
        options = self.problem.options
        result = kcp_ops.chunk_kda_fwd_prepare(
            *(self.values[n] for n in STORED), self.scale, self.chunk_size, layout="BNSD",
            a_log=self.parameter("a_log"), dt_bias=self.parameter("dt_bias"), epsilon=options.get("epsilon", 1e-6),
            use_qk_l2norm_in_kernel=options["use_qk_l2norm_in_kernel"], use_exp2=self.use_exp2, backward_mode=mode,
            **self.gate, **self.beta, **self.packing,
        )  # fmt: skip
        assert len(result) == 13
        return dict(zip(PREPARE_NAMES, result, strict=True))

    def summary(self, c: dict) -> Tensor:
        result = kcp_ops.chunk_kda_pre_process_fwd(c["kg"], c["w"], c["u"], gk=c["gk"], cu_seqlens=self.cu, chunk_size=self.chunk_size)
        return result[0]

    def states(self, c: dict, initial_state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return kcp_ops.chunk_kda_fwd_h(
            c["kg"], c["w"], c["u"], gk=c["gk"], initial_state=initial_state, output_final_state=True,
            chunk_size=self.chunk_size, use_exp2=self.use_exp2, state_v_first=self.v_first, **self.packing,
        )  # fmt: skip

    def output(self, c: dict, v_new: Tensor, h: Tensor) -> Tensor:
        return kcp_ops.chunk_kda_fwd_finalize(
            c["qg_scaled"], c["aqk"], v_new, h, output_layout="BSND", state_v_first=self.v_first, **self.packing
        )

    def local(self, c: dict, v_new: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return kcp_ops.chunk_kda_bwd_prepare(
            c["aqk"], v_new, self.d_o, h, scale=self.scale, layout="BNSD", chunk_size=self.chunk_size,
            state_v_first=self.v_first, **self.packing,
        )  # fmt: skip

    def back_summary(self, c: dict, dv_local: Tensor) -> Tensor:
        return kcp_ops.chunk_kda_pre_process_bwd(
            c["qg"], c["kg"], c["w"], self.d_o, dv_local, self.scale, self.chunk_size, gk=c["gk"], cu_seqlens=self.cu
        )

    def state_gradients(self, c: dict, dv_local: Tensor, h0: Tensor | None, dht: Tensor | None):
        return kcp_ops.chunk_kda_bwd_dhu(
            c["qg"], c["kg"], c["w"], self.d_o, dv_local, self.scale, self.chunk_size, gk=c["gk"], h0=h0, dht=dht,
            use_exp2=self.use_exp2, state_v_first=self.v_first, **self.packing,
        )  # fmt: skip

    def input_gradients(self, c: dict, v_new, h, dh, dv_scan, d_aqk, dq_raw, layout: str = "BSND"):
        result = kcp_ops.chunk_kda_bwd_finalize(
            c["q_hat"], c["k_hat"], self.values["v"], c["gk"], self.values["g"], self.values["beta"],
            self.parameter("a_log"), self.parameter("dt_bias"), c["akk"], v_new, h, dh, dv_scan, d_aqk, dq_raw,
            scale=self.scale, chunk_size=self.chunk_size, use_exp2=self.use_exp2, state_v_first=self.v_first,
            q_rstd=c["q_rstd"], k_rstd=c["k_rstd"], output_layout=layout, **self.gate, **self.beta, **self.packing,
        )  # fmt: skip
        return dict(zip(("q", "k", "v", "beta", "g", "a_log", "dt_bias"), result, strict=True))

    def run(self) -> dict[str, np.ndarray]:
        """Outputs and gradients, as the oracle names them, rounded to what the op returns: caches are float32."""
        h0 = self.parameter("initial_state")
        dht = None if self.problem.d_final_state is None else Tensor(self.problem.d_final_state)
        c = self.prepare()
        h, v_new, final_state = self.states(c, h0)
        out = self.output(c, v_new, h)
        d_aqk, dv_local, dq_raw = self.local(c, v_new, h)
        dh, dh0, dv_scan = self.state_gradients(c, dv_local, h0, dht)
        grads = self.input_gradients(c, v_new, h, dh, dv_scan, d_aqk, dq_raw)
        assert (dh0 is None) == (h0 is None)
        result = {n: g for n, g in grads.items() if n in self.values}
        result |= {"out": out, "final_state": final_state} | ({} if h0 is None else {"initial_state": dh0})
        result = {n: to_numpy(x) for n, x in result.items()}
        result.update({n: rounded(result[n], self.problem.dtype) for n in (*STORED, "out")})
        if "dt_bias" in result:
            result["dt_bias"] = result["dt_bias"].reshape(self.problem.inputs["dt_bias"].shape)
        return result
