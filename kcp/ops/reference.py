"""The oracle of the package: Kimi Delta Attention as a float64 recurrence over tokens, in NumPy.

Nothing here is chunked, fused or clever, so that the code can be checked against the paper by eye. Per value head, with
state ``S [K, V]``, natural-log decay ``a_t <= 0 [K]`` and write strength ``beta_t``::

    S'_t = exp(a_t) * S_{t-1}        r_t = v_t - S'_t^T k_t
    S_t  = S'_t + beta_t k_t r_t^T   o_t = scale * S_t^T q_t

and, walking back with ``dS`` the gradient of ``S_t``::

    dS  += scale q_t do_t^T          dq_t = scale * S_t do_t
    dr   = beta_t dS^T k_t           dv_t = dr         dbeta_t = k_t . (dS r_t)
    dS'  = dS - k_t dr^T             dk_t = beta_t dS r_t - S'_t dr
    da_t = sum_V dS' * S'_t          dS  <- exp(a_t) * dS'

The recurrence is equation 1 of the Kimi Linear report; gates, sigmoid and L2 norm are section 2 of the design.
Legend of shape suffixes: B batch, T tokens, H heads (k: of q and k, v: of v), K and V head sizes, N sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Result", "kda_reference", "kda_reference_grad"]

_BLOCK = 64
_SOFTPLUS_LINEAR_ABOVE = 20.0


@dataclass(frozen=True)
class Result:
    """What the recurrence returns, float64.

    Attributes:
        out: Attention output, ``[B, T, Hv, V]``.
        final_state: State after the last token of every sequence, ``[N, Hv, K, V]`` (``[N, Hv, V, K]`` V-first).
    """

    out: np.ndarray
    final_state: np.ndarray


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Logistic function, right to the last bits of float64 on both sides of zero."""
    return np.exp(-np.logaddexp(0.0, -x))


def softplus(x: np.ndarray) -> np.ndarray:
    """``log(1 + e^x)``, linear above 20."""
    return np.where(x > _SOFTPLUS_LINEAR_ABOVE, x, np.logaddexp(0.0, np.minimum(x, _SOFTPLUS_LINEAR_ABOVE)))


@dataclass(frozen=True)
class _Rows:
    """Sequences ordered from the longest to the shortest, so that those alive at step t are a prefix.

    Attributes:
        order: Index of the caller's sequence of every row, ``[N]``.
        starts: First flat token of every row, ``[N]``.
        lengths: Tokens of every row, falling, ``[N]``.
    """

    order: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, batch: int, tokens: int, cu_seqlens: Sequence[int] | np.ndarray | None) -> _Rows:
        if cu_seqlens is None:
            starts, lengths = np.arange(batch) * tokens, np.full(batch, tokens)
        else:
            bounds = np.asarray(cu_seqlens, dtype=np.int64)
            if batch != 1:
                raise ValueError(f"cu_seqlens needs a batch of 1, got {batch}")
            if bounds.ndim != 1 or bounds.size < 2 or bounds[0] != 0 or bounds[-1] != tokens or np.any(np.diff(bounds) < 0):
                raise ValueError(f"cu_seqlens must rise from 0 to {tokens}, got {bounds.tolist()}")
            starts, lengths = bounds[:-1], np.diff(bounds)
        order = np.argsort(-lengths, kind="stable")
        return cls(order, starts[order], lengths[order])

    @property
    def steps(self) -> int:
        return int(self.lengths[0])

    def alive(self, step: int) -> int:
        """Number of rows that have a token at this step."""
        return int(np.searchsorted(-self.lengths, -step, side="left"))


class _Problem:
    """Inputs in float64, flat over tokens, heads expanded, gate, sigmoid and norm applied."""

    def __init__(self, q, k, v, g, beta, scale, *, safe_gate, lower_bound, use_gate_in_kernel, a_log, dt_bias,
                 cu_seqlens, initial_state, state_v_first, epsilon, use_qk_l2norm_in_kernel,
                 use_beta_sigmoid_in_kernel, allow_neg_eigval):  # fmt: skip
        q, k, v, g, beta = (np.asarray(x, dtype=np.float64) for x in (q, k, v, g, beta))
        self.batch, self.tokens, self.k_heads, self.k_dim = q.shape
        self.v_heads, self.v_dim = v.shape[2:]
        self.group = self.v_heads // self.k_heads
        self.scale = self.k_dim**-0.5 if scale is None else float(scale)
        self.rows = _Rows.of(self.batch, self.tokens, cu_seqlens)
        self.v_first = state_v_first
        self.v = self._flat(v)

        self.normed = use_qk_l2norm_in_kernel
        self.q_raw, self.k_raw = self._flat(q), self._flat(k)
        self.q_rstd, self.k_rstd = (1.0 / np.sqrt((x * x).sum(-1, keepdims=True) + epsilon) for x in (self.q_raw, self.k_raw))
        self.q_hat = self.q_raw * self.q_rstd if self.normed else self.q_raw
        self.k_hat = self.k_raw * self.k_rstd if self.normed else self.k_raw
        self.q, self.k = (np.repeat(x, self.group, axis=1) for x in (self.q_hat, self.k_hat))

        self.beta_raw = self._flat(beta)
        self.beta_sigmoid = use_beta_sigmoid_in_kernel
        self.beta_gain = 2.0 if allow_neg_eigval else 1.0
        self.beta = self.beta_gain * sigmoid(self.beta_raw) if self.beta_sigmoid else self.beta_raw

        self.gate = "none" if not use_gate_in_kernel else "lower_bound" if safe_gate else "softplus"
        self.lower_bound = float(lower_bound)
        self.dt_bias_shape = None if dt_bias is None else np.shape(dt_bias)
        self.rate = None if a_log is None else np.exp(np.asarray(a_log, dtype=np.float64))[:, None]
        bias = 0.0 if dt_bias is None else np.asarray(dt_bias, dtype=np.float64).reshape(self.v_heads, self.k_dim)
        self.x = self._flat(g) if self.gate == "none" else self._flat(g) + bias
        self.a = self._decay()
        self.decay = np.exp(self.a)

        shape = (len(self.rows.order), self.v_heads, self.k_dim, self.v_dim)
        self.state = np.zeros(shape) if initial_state is None else self.rows_in(initial_state)

    def _flat(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(self.batch * self.tokens, *x.shape[2:])

    def _decay(self) -> np.ndarray:
        if self.gate == "none":
            return self.x
        if self.gate == "softplus":
            return -self.rate * softplus(self.x)
        return self.lower_bound * sigmoid(self.x if self.rate is None else self.rate * self.x)

    def rows_in(self, state: np.ndarray) -> np.ndarray:
        state = np.asarray(state, dtype=np.float64)
        return (np.swapaxes(state, -1, -2) if self.v_first else state)[self.rows.order]

    def rows_out(self, state: np.ndarray) -> np.ndarray:
        result = np.empty_like(state)
        result[self.rows.order] = state
        return np.ascontiguousarray(np.swapaxes(result, -1, -2)) if self.v_first else result

    def step(self, state: np.ndarray, step: int, decayed: np.ndarray | None = None) -> tuple[np.ndarray, int]:
        """Advance ``state [N, Hv, K, V]`` by one token in place; ``decayed`` gets it after the decay alone."""
        alive = self.rows.alive(step)
        at, live = self.rows.starts[:alive] + step, state[:alive]
        live *= self.decay[at][..., None]
        if decayed is not None:
            decayed[:alive] = live
        k = self.k[at]
        residual = self.v[at] - np.matmul(k[:, :, None, :], live)[:, :, 0]
        live += (self.beta[at][..., None] * k)[..., None] * residual[:, :, None, :]
        return at, alive

    def forward(self) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Outputs, final state of the rows, and the state at the start of every block of tokens."""
        out, state, starts = np.zeros_like(self.v), self.state.copy(), []
        for step in range(self.rows.steps):
            if step % _BLOCK == 0:
                starts.append(state[: self.rows.alive(step)].copy())
            at, alive = self.step(state, step)
            out[at] = self.scale * np.matmul(self.q[at][:, :, None, :], state[:alive])[:, :, 0]
        return out, state, starts

    def backward(self, d_out: np.ndarray, d_state: np.ndarray, starts: list[np.ndarray]) -> dict[str, np.ndarray]:
        """Adjoint of the recurrence: gradients of the effective q, k, v, beta and a, and of the initial state."""
        grads = {n: np.zeros_like(getattr(self, n)) for n in ("q", "k", "v", "beta", "a")}
        for block in reversed(range(len(starts))):
            begin, end = block * _BLOCK, min((block + 1) * _BLOCK, self.rows.steps)
            state, history = starts[block], []
            for step in range(begin, end):
                decayed = np.empty_like(state[: self.rows.alive(step)])
                self.step(state, step, decayed)
                history.append(decayed)
            for step in reversed(range(begin, end)):
                self._step_back(d_out, d_state, history[step - begin], step, grads)
        grads["state"] = d_state
        return grads

    def _step_back(self, d_out, d_state, decayed, step, grads) -> None:
        alive = self.rows.alive(step)
        at, ds = self.rows.starts[:alive] + step, d_state[:alive]
        q, k, v, beta, do = self.q[at], self.k[at], self.v[at], self.beta[at][..., None], d_out[at]
        residual = v - np.matmul(k[:, :, None, :], decayed)[:, :, 0]
        after = decayed + (beta * k)[..., None] * residual[:, :, None, :]
        grads["q"][at] = self.scale * np.matmul(after, do[..., None])[..., 0]
        ds += self.scale * q[..., None] * do[:, :, None, :]
        write = np.matmul(ds, residual[..., None])[..., 0]
        dr = beta * np.matmul(k[:, :, None, :], ds)[:, :, 0]
        grads["v"][at] = dr
        grads["beta"][at] = (k * write).sum(-1)
        grads["k"][at] = beta * write - np.matmul(decayed, dr[..., None])[..., 0]
        ds -= k[..., None] * dr[:, :, None, :]
        grads["a"][at] = (ds * decayed).sum(-1)
        ds *= self.decay[at][..., None]

    def input_gradients(self, grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Push the gradients of the effective inputs through head groups, norm, sigmoid and gate."""
        shape = (self.batch, self.tokens)
        result = {"v": grads["v"].reshape(*shape, self.v_heads, self.v_dim)}
        for name, hat, rstd in (("q", self.q_hat, self.q_rstd), ("k", self.k_hat, self.k_rstd)):
            d = grads[name].reshape(-1, self.k_heads, self.group, self.k_dim).sum(2)
            if self.normed:
                d = rstd * (d - (d * hat).sum(-1, keepdims=True) * hat)
            result[name] = d.reshape(*shape, self.k_heads, self.k_dim)
        d_beta = grads["beta"]
        if self.beta_sigmoid:
            s = sigmoid(self.beta_raw)
            d_beta = d_beta * self.beta_gain * s * (1.0 - s)
        result["beta"] = d_beta.reshape(*shape, self.v_heads)
        d_x, rate_terms = self._gate_gradient(grads["a"])
        result["g"] = d_x.reshape(*shape, self.v_heads, self.k_dim)
        if self.gate != "none" and self.dt_bias_shape is not None:
            result["dt_bias"] = d_x.sum(0).reshape(self.dt_bias_shape)
        if self.gate != "none" and self.rate is not None:
            result["a_log"] = rate_terms.sum((0, 2))
            result["a_log_terms"] = np.abs(rate_terms).sum((0, 2))
        return result

    def _gate_gradient(self, d_a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gradient of the raw gate and the terms, one a token and channel, that sum to the gradient of a_log."""
        if self.gate == "none":
            return d_a, np.zeros_like(d_a)
        if self.gate == "softplus":
            slope = np.where(self.x > _SOFTPLUS_LINEAR_ABOVE, 1.0, sigmoid(self.x))
            return -self.rate * slope * d_a, d_a * self.a
        rate = 1.0 if self.rate is None else self.rate
        s = sigmoid(rate * self.x)
        d_x = d_a * self.lower_bound * s * (1.0 - s) * rate
        return d_x, d_x * self.x


def kda_reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    scale: float | None = None,
    *,
    safe_gate: bool = False,
    lower_bound: float = -5.0,
    use_gate_in_kernel: bool = True,
    a_log: np.ndarray | None = None,
    dt_bias: np.ndarray | None = None,
    cu_seqlens: Sequence[int] | np.ndarray | None = None,
    initial_state: np.ndarray | None = None,
    state_v_first: bool = False,
    epsilon: float = 1e-6,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> Result:
    """Run the recurrence over tokens in float64.

    The options are those of :func:`kcp.ops.chunk_kda`; inputs are token-major (layout BSND) arrays of any real dtype.

    Args:
        q: Queries, ``[B, T, Hk, K]``.
        k: Keys, ``[B, T, Hk, K]``.
        v: Values, ``[B, T, Hv, V]``, Hv a multiple of Hk.
        g: Raw gate, or the natural-log decay with ``use_gate_in_kernel=False``, ``[B, T, Hv, K]``.
        beta: Write strength, ``[B, T, Hv]``.
        scale: Factor on the queries; ``None`` means ``K ** -0.5``.
        safe_gate: Lower-bound gate instead of the softplus gate.
        lower_bound: Smallest log decay of the lower-bound gate.
        use_gate_in_kernel: Whether ``g`` is raw.
        a_log: Log of the gate's rate, ``[Hv]``; the softplus gate requires it.
        dt_bias: Bias of the raw gate, ``[Hv * K]`` or ``[Hv, K]``.
        cu_seqlens: Boundaries of packed sequences, ``[N + 1]``, from 0 to T; needs B = 1. Equal neighbours are a
            sequence without tokens.
        initial_state: State before the first token of every sequence, ``[N, Hv, K, V]``; ``None`` is zero.
        state_v_first: States are ``[N, Hv, V, K]``.
        epsilon: Added to the sum of squares in the L2 norm.
        use_qk_l2norm_in_kernel: Normalise q and k.
        use_beta_sigmoid_in_kernel: Apply the sigmoid to ``beta``.
        allow_neg_eigval: Double the sigmoid of ``beta``.

    Returns:
        The output and the final state of every sequence.

    Raises:
        ValueError: ``cu_seqlens`` does not rise from 0 to T, or comes with B > 1.
    """
    problem = _Problem(
        q, k, v, g, beta, scale, safe_gate=safe_gate, lower_bound=lower_bound, use_gate_in_kernel=use_gate_in_kernel,
        a_log=a_log, dt_bias=dt_bias, cu_seqlens=cu_seqlens, initial_state=initial_state, state_v_first=state_v_first,
        epsilon=epsilon, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip
    out, state, _ = problem.forward()
    return Result(out.reshape(problem.batch, problem.tokens, problem.v_heads, problem.v_dim), problem.rows_out(state))


def kda_reference_grad(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    scale: float | None = None,
    *,
    d_out: np.ndarray | None = None,
    d_final_state: np.ndarray | None = None,
    safe_gate: bool = False,
    lower_bound: float = -5.0,
    use_gate_in_kernel: bool = True,
    a_log: np.ndarray | None = None,
    dt_bias: np.ndarray | None = None,
    cu_seqlens: Sequence[int] | np.ndarray | None = None,
    initial_state: np.ndarray | None = None,
    state_v_first: bool = False,
    epsilon: float = 1e-6,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> dict[str, np.ndarray]:
    """Gradients of ``sum(out * d_out) + sum(final_state * d_final_state)``, by the explicit adjoint of the recurrence.

    States are recomputed in blocks of 64 tokens from saved block starts. Inputs and options as in
    :func:`kda_reference`.

    Args:
        d_out: Gradient of the output, ``[B, T, Hv, V]``; ``None`` is zero.
        d_final_state: Gradient of the final state, in the shape of the states; ``None`` is zero.

    Returns:
        Float64 gradients under the names of the inputs: ``q, k, v, g, beta``, and ``a_log``, ``dt_bias``,
        ``initial_state`` where given (``a_log`` and ``dt_bias`` only with the gate in the kernel). Beside them ``out``
        and ``final_state``, and with ``a_log`` the sum of the absolute terms of its gradient, ``a_log_terms [Hv]``:
        the gradient is one sum a head that can cancel, so its error is judged against this.

    Raises:
        ValueError: As :func:`kda_reference`.
    """
    problem = _Problem(
        q, k, v, g, beta, scale, safe_gate=safe_gate, lower_bound=lower_bound, use_gate_in_kernel=use_gate_in_kernel,
        a_log=a_log, dt_bias=dt_bias, cu_seqlens=cu_seqlens, initial_state=initial_state, state_v_first=state_v_first,
        epsilon=epsilon, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip
    out, state, starts = problem.forward()
    d_out = np.zeros_like(out) if d_out is None else np.asarray(d_out, dtype=np.float64).reshape(out.shape)
    d_state = np.zeros_like(state) if d_final_state is None else problem.rows_in(d_final_state).copy()
    grads = problem.backward(d_out, d_state, starts)
    result = problem.input_gradients(grads)
    if initial_state is not None:
        result["initial_state"] = problem.rows_out(grads["state"])
    result["out"] = out.reshape(problem.batch, problem.tokens, problem.v_heads, problem.v_dim)
    result["final_state"] = problem.rows_out(state)
    return result
