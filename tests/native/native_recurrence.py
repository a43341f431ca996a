"""float64 token recurrence of KDA and its adjoint, written out by hand: the truth of the native tests."""

import numpy as np


def _gate(x, o, a_log):
    gain = np.exp(a_log)[:, None] if a_log is not None else 1.0
    if o.gate == "none":
        return x, np.ones_like(x), np.zeros_like(x)
    if o.gate == "lower_bound":
        s = 1 / (1 + np.exp(-np.clip(gain * x, -700, 700)))
        slope = o.lower_bound * s * (1 - s) * gain
        return o.lower_bound * s, slope, slope * x
    softplus = np.logaddexp(0, x)
    return -gain * softplus, -gain / (1 + np.exp(-np.clip(x, -700, 700))), -gain * softplus


def kda(inputs, o):
    """Outputs and all gradients for ``d_out`` and ``d_final_state`` (token-major, float64), and the a_log scale.

    ``inputs``: arrays as for the operator, B by T by heads by width; ``o``: the options of the driver.
    """
    x = {n: np.asarray(a, np.float64) for n, a in inputs.items() if n != "cu_seqlens"}
    batch, tokens, key_heads, key = x["q"].shape
    heads, value = x["v"].shape[2:]
    group = heads // key_heads
    a_log, bias = x.get("a_log"), x.get("dt_bias")
    raw = x["g"] + (bias.reshape(heads, key) if bias is not None and o.gate != "none" else 0)
    a, slope, slope_log = _gate(raw, o, a_log)
    norm = {}
    for n in "qk":
        rstd = 1 / np.sqrt((x[n] ** 2).sum(-1, keepdims=True) + o.epsilon) if o.l2norm else np.ones((*x[n].shape[:3], 1))
        norm[n] = (x[n] * rstd, rstd)
    q, k = (np.repeat(norm[n][0], group, axis=2) for n in "qk")
    factor = 2.0 if o.neg_eigval else 1.0
    sig = 1 / (1 + np.exp(-x["beta"]))
    beta = factor * sig if o.beta_sigmoid else x["beta"]
    cu = inputs.get("cu_seqlens")
    runs = [(b, 0, tokens) for b in range(batch)] if cu is None else [(0, int(s), int(e)) for s, e in zip(cu[:-1], cu[1:], strict=True)]
    flip = (lambda s: np.swapaxes(s, -1, -2)) if o.state_v_first else (lambda s: s)
    out = np.zeros((batch, tokens, heads, value))
    final, d_initial = [], []
    d = {n: np.zeros_like(z) for n, z in dict(q=q, k=k, v=x["v"], a=a, beta=beta).items()}
    for n, (b, begin, end) in enumerate(runs):
        S = flip(x["initial_state"][n]).copy() if "initial_state" in x else np.zeros((heads, key, value))
        before = []
        for t in range(begin, end):
            before.append(S)
            S = S * np.exp(a[b, t])[..., None]
            r = x["v"][b, t] - np.einsum("hk,hkv->hv", k[b, t], S)
            S = S + np.einsum("hk,hv->hkv", beta[b, t][:, None] * k[b, t], r)
            out[b, t] = o.scale * np.einsum("hk,hkv->hv", q[b, t], S)
        final.append(S)
        dS = flip(x["d_final_state"][n]).copy() if "d_final_state" in x else np.zeros_like(S)
        for t in range(end - 1, begin - 1, -1):
            kt, bt, e = k[b, t], beta[b, t][:, None], np.exp(a[b, t])
            P = before[t - begin] * e[..., None]
            r = x["v"][b, t] - np.einsum("hk,hkv->hv", kt, P)
            after = P + np.einsum("hk,hv->hkv", bt * kt, r)
            do = x["d_out"][b, t]
            d["q"][b, t] = o.scale * np.einsum("hkv,hv->hk", after, do)
            dS = dS + o.scale * np.einsum("hk,hv->hkv", q[b, t], do)
            dr = bt * np.einsum("hk,hkv->hv", kt, dS)
            d["beta"][b, t] = np.einsum("hk,hkv,hv->h", kt, dS, r)
            d["k"][b, t] = bt * np.einsum("hkv,hv->hk", dS, r) - np.einsum("hkv,hv->hk", P, dr)
            d["v"][b, t] = dr
            dP = dS - np.einsum("hk,hv->hkv", kt, dr)
            d["a"][b, t] = (dP * P).sum(-1)
            dS = dP * e[..., None]
        d_initial.append(dS)
    res = {"out": out, "final_state": flip(np.stack(final)), "dv": d["v"]}
    for n in "qk":
        y, rstd = norm[n]
        dy = d[n].reshape(batch, tokens, key_heads, group, key).sum(3)
        res["d" + n] = rstd * (dy - (dy * y).sum(-1, keepdims=True) * y) if o.l2norm else dy
    res["dbeta"] = d["beta"] * (factor * sig * (1 - sig) if o.beta_sigmoid else 1.0)
    res["dg"] = d["a"] * slope
    if "initial_state" in x:
        res["d_initial_state"] = flip(np.stack(d_initial))
    terms = d["a"] * slope_log
    if a_log is not None:
        res["da_log"], res["da_log_scale"] = terms.sum((0, 1, 3)), np.abs(terms).sum((0, 1, 3))
    if bias is not None:
        res["ddt_bias"] = res["dg"].sum((0, 1))
    return res


def make_inputs(
    rng,
    tokens,
    heads=2,
    key=128,
    value=128,
    key_heads=None,
    batch=1,
    lengths=None,
    gate="lower_bound",
    a_log=True,
    dt_bias=True,
    initial=True,
    d_final=True,
    shift=0.0,
    spread=1.0,
    correlated=0.0,
    v_first=False,
    beta_range=None,
):
    """Random float32 inputs; ``lengths`` makes a pack."""
    key_heads = key_heads or heads
    f = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    cu = None
    if lengths is not None:
        cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens, batch = int(cu[-1]), 1
    x = dict(
        q=f(batch, tokens, key_heads, key),
        k=f(batch, tokens, key_heads, key),
        v=f(batch, tokens, heads, value),
        g=f(batch, tokens, heads, key) * np.float32(spread) + np.float32(shift),
        beta=f(batch, tokens, heads),
        d_out=f(batch, tokens, heads, value),
    )
    if correlated:
        x["k"] = (np.sqrt(1 - correlated**2) * x["k"] + correlated * f(1, 1, key_heads, key)).astype(np.float32)
    if gate == "none":
        x["g"] = -np.abs(x["g"])
    if beta_range:
        x["beta"] = rng.uniform(*beta_range, x["beta"].shape).astype(np.float32)
    if a_log and gate != "none":
        x["a_log"] = f(heads) * np.float32(0.5)
    if dt_bias and gate != "none":
        x["dt_bias"] = f(heads, key)
    n = batch if lengths is None else len(lengths)
    kv = (value, key) if v_first else (key, value)
    if initial:
        x["initial_state"] = f(n, heads, *kv)
    if d_final:
        x["d_final_state"] = f(n, heads, *kv)
    if cu is not None:
        x["cu_seqlens"] = cu
    return x
