"""Generation with a recurrent state: a token costs the same however long the text before it is, MLA's softmax apart.

What a layer keeps between tokens:

    KDA   the state S [B, Hv, K, V] and the last conv_size - 1 inputs of the short convolutions; constant
    MLA   the latent [c | k_r] of every token so far, kv_lora_rank + qk_rope_head_dim numbers each

The prompt goes through the chunked form once; then one token at a time. A single MLA query works on the latents themselves
(``q_nope W_k`` against c, then the mixture of latents times ``W_v``), so no keys or values are built from them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from kcp.layers.kda_attention import KdaAttention
from kcp.layers.mla import MultiLatentAttention, causal_attention
from kcp.models.kimi_linear.model import KimiLinearForCausalLM
from kcp.ops import numerics


@dataclass
class KdaState:
    """What a KDA layer keeps: ``conv [B, conv_size - 1, widths of q, k and v]`` and ``state [B, Hv, K, V]`` (None before any token)."""

    conv: Tensor | None = None
    state: Tensor | None = None


@dataclass
class MlaState:
    """What an MLA layer keeps: ``latent [B, T, kv_lora_rank + rope]`` of all tokens so far, float32 (None before any)."""

    latent: Tensor | None = None


def new_state(model: KimiLinearForCausalLM) -> list[KdaState | MlaState]:
    """The state before the first token, one entry a layer."""
    return [KdaState() if isinstance(layer.self_attn, KdaAttention) else MlaState() for layer in model.model.layers]


def state_bytes(state: list[KdaState | MlaState]) -> int:
    """Bytes that the states of all layers hold."""
    tensors = [tensor for entry in state for tensor in vars(entry).values() if tensor is not None]
    return sum(tensor.size * tensor.itemsize for tensor in tensors)


def extend(model: KimiLinearForCausalLM, token_ids: Tensor, state: list[KdaState | MlaState]) -> Tensor:
    """Take tokens in after those that ``state`` has seen, and change ``state`` to hold them.

    Args:
        model: on one rank, in PyNative mode.
        token_ids: ``[B, T]`` int32, one or many.
        state: from :func:`new_state`, or of an earlier call with the same B.

    Returns:
        Logits of the last token ``[B, vocabulary]``, float32.
    """
    decoder = model.model
    hidden = decoder.embed_tokens(token_ids).astype(decoder.compute_dtype)
    for layer, entry in zip(decoder.layers, state, strict=True):
        x = layer.input_layernorm(hidden)
        hidden = hidden + (_kda if isinstance(entry, KdaState) else _mla)(layer.self_attn, x, entry)
        hidden = hidden + layer.block_sparse_moe(layer.post_attention_layernorm(hidden))
    return model.logits_of(decoder.norm(hidden[:, -1]))


def _kda(attention: KdaAttention, x: Tensor, entry: KdaState) -> Tensor:
    qkv = attention.project(x)
    tail = entry.conv
    if tail is None:
        tail = ops.zeros((x.shape[0], attention.short_conv.size - 1, qkv.shape[2]), qkv.dtype)
    taps, bias = attention.taps()
    mixed = attention.short_conv.convolve(qkv, tail, taps, bias)
    entry.conv = ops.concat((tail, qkv), 1)[:, qkv.shape[1] :]
    out, entry.state = attention.attend(x, mixed, entry.state, None, True)
    return attention.close(x, out)


def _mla(attention: MultiLatentAttention, x: Tensor, entry: MlaState) -> Tensor:
    q, latent = attention.queries_and_latent(x)
    before = 0 if entry.latent is None else entry.latent.shape[1]
    entry.latent = latent if entry.latent is None else ops.concat((entry.latent, latent), 1)
    if x.shape[1] == 1:
        out = _single_query(attention, q, entry.latent)
    else:
        k, v = attention.keys_and_values(entry.latent)
        out = causal_attention(q, k, v, before, None)
    return attention.o_proj(ops.cast(out.reshape(x.shape[:2] + (-1,)), x.dtype))


def _single_query(attention: MultiLatentAttention, q: Tensor, latent: Tensor) -> Tensor:
    """``[B, 1, H, V]`` of one query a sequence ``[B, 1, H, nope + rope]`` over latents ``[B, T, rank + rope]``."""
    heads, rank, nope = attention.num_heads, attention.rank_width, attention.nope
    up = attention.kv_b_proj.weight.reshape((heads, nope + attention.value_width, rank))
    q = ops.transpose(q[:, 0], (1, 0, 2))  # [H, B, nope + rope]
    query = ops.concat((ops.matmul(q[..., :nope], up[:, :nope]), q[..., nope:]), -1)
    scores = ops.matmul(ops.transpose(query, (1, 0, 2)), ops.transpose(latent, (0, 2, 1)))  # [B, H, T]
    weights = numerics.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / numerics.total(weights, (-1,)).expand_dims(-1)
    mixed = ops.transpose(ops.matmul(weights, latent[..., :rank]), (1, 0, 2))
    out = ops.matmul(mixed, ops.transpose(up[:, nope:], (0, 2, 1)))  # [H, B, V]
    return ops.expand_dims(ops.transpose(out, (1, 0, 2)), 1)


def choose(logits: np.ndarray, temperature: float, top_k: int, rng: np.random.Generator) -> np.ndarray:
    """The next token of every row.

    Args:
        logits: ``[B, vocabulary]``.
        temperature: 0 takes the most likely token; else logits are divided by it and a token is drawn.
        top_k: draw among so many of the most likely tokens; 0: among all.
        rng: where chance comes from.

    Returns:
        int32 ``[B]``.
    """
    if temperature == 0:
        return logits.argmax(-1).astype(np.int32)
    scaled = logits.astype(np.float64) / temperature
    if 0 < top_k < scaled.shape[-1]:
        order = np.argsort(-scaled, axis=-1, kind="stable")
        np.put_along_axis(scaled, order[:, top_k:], -np.inf, axis=-1)
    # the largest of logit + Gumbel noise is a draw from the softmax
    return (scaled + rng.gumbel(size=scaled.shape)).argmax(-1).astype(np.int32)


def generate(
    model: KimiLinearForCausalLM,
    prompt: np.ndarray,
    num_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    stop_token: int | None = None,
) -> Iterator[np.ndarray]:
    """Continue prompts, one token of each at a time.

    Args:
        model: on one rank, in PyNative mode.
        prompt: ``[B, T]`` integers, T >= 1.
        num_tokens: tokens to make.
        temperature, top_k: as in :func:`choose`.
        seed: of the draws.
        stop_token: end as soon as every row has made this token.

    Yields:
        The next tokens, int32 ``[B]``.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, or an option out of range.
    """
    prompt = np.asarray(prompt)
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt has shape {prompt.shape}; allowed: [B, T] with at least one token")
    bad = prompt[(prompt < 0) | (prompt >= model.vocab_size)]
    if bad.size:
        raise ValueError(f"prompt holds token {int(bad.flat[0])}; allowed: 0 to {model.vocab_size - 1}")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; allowed: a number >= 0")
    if top_k < 0:
        raise ValueError(f"top_k is {top_k}; allowed: an integer >= 0")
    if model.group.size > 1:
        raise ValueError(f"the model is sliced over {model.group.size} ranks; generation works on one")
    rng, state = np.random.default_rng(seed), new_state(model)
    tokens, stopped = prompt.astype(np.int32), np.zeros(len(prompt), bool)
    for _ in range(num_tokens):
        chosen = choose(extend(model, Tensor(tokens, ms.int32), state).asnumpy(), temperature, top_k, rng)
        yield chosen
        stopped |= chosen == stop_token if stop_token is not None else False
        if stopped.all():
            return
        tokens = chosen[:, None]
