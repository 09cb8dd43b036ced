"""The model in NumPy float64, written from the specification and sharing no code with it.

One sequence at a time, every token by the definition: no caches, no chunks, no pages.
"""

from typing import Any

import jax
import numpy as np


def float64(tree: Any) -> Any:
    """Arrays of a tree as float64."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def sigmoid(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms(x, weight, eps):
    """Gain `1 + weight`, mean over the last axis."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (1 + weight)


def rope_angles(positions, pairs, theta, section):
    """Angles [T, pairs] of three-axis positions [T, 3], written as Hugging Face interleaves."""
    inverse = theta ** (-np.arange(pairs) / pairs)
    by_axis = [positions[:, i, None] * inverse for i in range(3)]
    angles = by_axis[0].copy()
    for axis in (1, 2):
        where = slice(axis, 3 * section[axis], 3)
        angles[:, where] = by_axis[axis][:, where]
    return angles


def rope(x, angles):
    """Half-split pairs of the leading channels of [T, H, C]."""
    pairs = angles.shape[-1]
    out = x.copy()
    for t in range(len(x)):
        for i in range(pairs):
            c, s = np.cos(angles[t, i]), np.sin(angles[t, i])
            a, b = x[t, :, i], x[t, :, i + pairs]
            out[t, :, i], out[t, :, i + pairs] = a * c - b * s, b * c + a * s
    return out


def mix(streams, norm, down, up, inject, eps) -> Any:
    """Gated residual of [T, R, D]: input, injection weights, gates."""
    count = streams.shape[1]
    n = rms(streams, norm.reshape(count, -1), eps)
    flat = n.reshape(len(n), -1)
    gates = sigmoid(silu(flat @ down.T / count) @ up.T).reshape(n.shape)
    weights = None if inject is None else 2 * sigmoid(flat @ inject.T / count)
    return (gates * n).mean(1), weights, gates


def ngram_rows(ids, hash, eos):
    """Rows [T, heads] of a document that begins with `ids`, in Python's integers."""
    order = len(hash.multipliers)
    rows = []
    for t in range(len(ids)):
        context = [int(ids[t])]
        for back in range(1, order):
            ended = eos in context[1:]
            context.append(eos if ended or t - back < 0 else int(ids[t - back]))
        row = []
        for n in range(2, order + 1):
            mixed = 0
            for multiplier, token in zip(hash.multipliers[:n], context[:n], strict=True):
                mixed ^= multiplier * token
            for _ in range(hash.heads_per_ngram):
                head = len(row)
                row.append(mixed % hash.head_sizes[head] + hash.head_offsets[head])
        rows.append(row)
    return np.array(rows)


def causal_conv(x, history, taps, dilation=1):
    """Depthwise [T, C] after `history`, oldest tap first."""
    window = np.concatenate([history, x])
    out = np.zeros_like(x)
    for t in range(len(x)):
        for j in range(taps.shape[1]):
            out[t] += taps[:, j] * window[t + j * dilation]
    return out


def ple_mix(key, value, streams, norm_key, norm_query, norm_conv, taps, history, dilation, eps):
    """What an n-gram embedding adds to streams [T, R, D], and the inputs of its convolution."""
    tokens, count, width = streams.shape
    per_stream = lambda w: w.reshape(count, -1)  # noqa: E731
    k, q = rms(key, per_stream(norm_key), eps), rms(streams, per_stream(norm_query), eps)
    score = (k * q).sum(-1) / np.sqrt(width)
    gate = np.sign(score) * np.sqrt(np.maximum(np.abs(score), 1e-6))
    u = sigmoid(gate)[..., None] * value[:, None]
    normed = rms(u, per_stream(norm_conv), eps).reshape(tokens, -1)
    conv = causal_conv(normed, history, taps, dilation)
    return u + silu(conv).reshape(u.shape), normed


def delta_rule(q, k, v, decay, beta, state):
    """[T, V, K] and [T, V, E]; the rule of one token after the other, from `state` [V, K, E]."""
    out = np.zeros_like(v)
    state = state.copy()
    with np.errstate(under="ignore"):
        for t in range(len(q)):
            for h in range(q.shape[1]):
                s = state[h] * np.exp(decay[t, h])
                error = v[t, h] - s.T @ k[t, h]
                state[h] = s + np.outer(k[t, h], beta[t, h] * error)
                out[t, h] = state[h].T @ q[t, h]
    return out, state


def delta_inputs(qkv, a, b, conv1d, A_log, dt_bias, history, heads, round_to=lambda x: x):
    """Queries, keys, values, log decay and step size of each token and value head."""
    key_heads, value_heads, key_dim, value_dim = heads
    mixed = round_to(silu(causal_conv(qkv, history, conv1d)))
    q, k, v = np.split(mixed, [key_heads * key_dim, 2 * key_heads * key_dim], axis=1)
    unit = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    q, k = (unit(x.reshape(len(x), key_heads, key_dim)) for x in (q, k))
    head = np.arange(value_heads) // (value_heads // key_heads)
    q, k = q[:, head] / np.sqrt(key_dim), k[:, head]
    decay = -np.exp(A_log) * np.logaddexp(0, a + dt_bias)
    return q, k, v.reshape(len(v), value_heads, value_dim), decay, sigmoid(b)


def delta_output(out, z, norm, activation, eps):
    """Norm with a plain gain, times the activated gate."""
    normed = out / np.sqrt((out * out).mean(-1, keepdims=True) + eps) * norm
    gate = z.reshape(out.shape)
    return (normed * (sigmoid(gate) if activation == "sigmoid" else silu(gate))).reshape(z.shape)


def choose_blocks(scores, blocks):
    """The best `blocks` of finite scores, ties to the lower number."""
    return np.sort(np.argsort(-(scores + 0.0), kind="stable")[:blocks])


def selected_tokens(scores, index, blocks, ratio):
    """Tokens that the query at `index` attends to, given the scores of its complete blocks."""
    complete = (index + 1) // ratio
    best = choose_blocks(scores[:complete], blocks)
    members = (best[:, None] * ratio + np.arange(ratio)).reshape(-1)
    return [int(i) for i in members] + list(range(complete * ratio, index + 1))


def attend(query, gate, key, value):
    """One query [H, C] over [M, K, C]."""
    group = len(query) // key.shape[1]
    out = np.zeros_like(query)
    for h in range(len(query)):
        if len(key):
            s = key[:, h // group] @ query[h] / np.sqrt(query.shape[-1])
            p = np.exp(s - s.max())
            out[h] = p @ value[:, h // group] / p.sum()
    return (out * sigmoid(gate)).reshape(-1)


def route(logits, k, renormalize):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    ids = np.argsort(-p, axis=-1, kind="stable")[:, :k]
    weights = np.take_along_axis(p, ids, axis=-1)
    return ids, weights / weights.sum(-1, keepdims=True) if renormalize else weights


def swiglu(x, gate, up, down):
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


class Oracle:
    """The whole model on one sequence; weights are the float64 values of `params`."""

    def __init__(self, params: Any, *, dense: bool = False):
        self.config = params.config
        self.p = float64(params)
        self.dense = dense
        self.selected: dict[str, list[list[int]]] = {}
        self.residual: list[np.ndarray] = []

    def logits(self, ids, positions=None) -> np.ndarray:
        """Logits of every position; leaves `residual` of each layer and what was `selected`."""
        p, c = self.p, self.config
        ids = np.asarray(ids)
        self.positions = self._positions(len(ids)) if positions is None else np.asarray(positions)
        x = np.repeat(p.embed_tokens[ids][:, None], c.hc_count, axis=1)
        self.residual = []
        for i, layer in enumerate(p.layers):
            if layer.ple is not None:
                x = x + self._ple(layer.ple, c.ple_index(i), x, ids)
            x = self._layer(layer, x, f"layer{i:02d}")
            self.residual.append(x)
        return self._read(p.hyper_connection_mixer, x) @ self._head.T

    def mtp_logits(self, ids) -> np.ndarray:
        """Logits of the draft head, token `i + 1` with the residual of `i`; after `logits`."""
        p, c = self.p, self.config
        m, ids = p.mtp, np.asarray(ids)
        self.positions = self._positions(len(ids) - 1)
        r = self.residual[-1][:-1]
        e = rms(p.embed_tokens[ids[1:]], m.pre_fc_norm_embedding, c.rms_norm_eps) @ m.fc_embedding.T
        n = rms(r.reshape(len(r), -1), m.pre_fc_norm_hidden, c.rms_norm_eps).reshape(r.shape)
        x = self._layer(m.layers[0], e[:, None] + n @ m.fc_hidden.T, "mtp")
        return self._read(m.hyper_connection_mixer, x) @ self._head.T

    @property
    def _head(self):
        return self.p.embed_tokens if self.p.lm_head is None else self.p.lm_head

    def _positions(self, length):
        return np.repeat(np.arange(length)[:, None], 3, axis=1)

    def _read(self, m, x):
        down, up = m.input_mix_weight_down, m.input_mix_weight_up
        return mix(x, m.hc_norm, down, up, None, self.config.rms_norm_eps)[0]

    def _layer(self, layer, x, name):
        for gate, sublayer in (
            (layer.attn_hyper_connection, lambda y: self._attention(layer, y, name)),
            (layer.mlp_hyper_connection, lambda y: self._moe(layer.mlp, y)),
        ):
            down, up = gate.input_mix_weight_down, gate.input_mix_weight_up
            inject = gate.block_inject_weight
            y, weights, _ = mix(x, gate.hc_norm, down, up, inject, self.config.rms_norm_eps)
            x = x + weights[..., None] * sublayer(y)[:, None]
        return x

    def _attention(self, layer, x, name):
        if layer.self_attn is None:
            return self._delta_net(layer.linear_attn, x)
        return self._sparse(layer.self_attn, x, name)

    def _ple(self, m, index, x, ids):
        c = self.config
        rows = ngram_rows(ids, c.ngram_hash(index), c.hash_eos_token_id)
        e = m.ngram_embedding[rows].reshape(len(ids), -1)
        key, value = (e @ m.key_proj.T).reshape(x.shape), e @ m.value_proj.T
        history = np.zeros(((m.conv1d.shape[1] - 1) * c.ngram_size, m.conv1d.shape[0]))
        norms = (m.norm_key, m.norm_query, m.norm_conv)
        args = (m.conv1d, history, c.ngram_size, c.rms_norm_eps)
        return ple_mix(key, value, x, *norms, *args)[0]

    def _delta_net(self, m, x):
        c = self.config
        key_heads, value_heads = c.linear_num_key_heads, c.linear_num_value_heads
        heads = (key_heads, value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        qkv, z, a, b = (x @ w.T for w in (m.in_proj_qkv, m.in_proj_z, m.in_proj_a, m.in_proj_b))
        history = np.zeros((m.conv1d.shape[1] - 1, qkv.shape[1]))
        inputs = delta_inputs(qkv, a, b, m.conv1d, m.A_log, m.dt_bias, history, heads)
        start = np.zeros((value_heads, heads[2], heads[3]))
        out, _ = delta_rule(*inputs, start)
        return delta_output(out, z, m.norm, c.gate_activation, c.rms_norm_eps) @ m.out_proj.T

    def _sparse(self, m, x, name):
        c, t = self.config, len(x)
        eps, ratio = c.rms_norm_eps, c.indexer_compress_ratio
        rope_parameters = c.rope_parameters
        pairs = int(c.head_dim * rope_parameters.partial_rotary_factor) // 2
        angles = rope_angles(
            self.positions, pairs, rope_parameters.rope_theta, rope_parameters.mrope_section
        )
        bias = lambda v: 0 if v is None else v  # noqa: E731
        qg = (x @ m.q_proj.T + bias(m.q_proj_bias)).reshape(t, -1, 2, c.head_dim)
        q = rope(rms(qg[:, :, 0], m.q_norm, eps), angles)
        k = (x @ m.k_proj.T + bias(m.k_proj_bias)).reshape(t, -1, c.head_dim)
        k = rope(rms(k, m.k_norm, eps), angles)
        v = (x @ m.v_proj.T + bias(m.v_proj_bias)).reshape(t, -1, c.head_dim)

        width = c.indexer_n_heads * c.indexer_head_dim
        index = x @ m.indexer.index_qk_proj.T
        iq = index[:, :width].reshape(t, c.indexer_n_heads, -1)
        iq = rope(rms(iq, m.indexer.q_layernorm, eps), angles)
        whole = t // ratio
        pooled = index[: whole * ratio, width:].reshape(whole, ratio, c.indexer_head_dim).mean(1)
        pooled = rms(pooled, m.indexer.k_layernorm, eps)[:, None]
        pooled = rope(pooled, angles[: whole * ratio : ratio])[:, 0]
        scores = np.maximum(np.einsum("thc,nc->thn", iq, pooled), 0).sum(1)

        out, chosen = np.zeros((t, q.shape[1] * c.head_dim)), []
        for i in range(t):
            seen = list(range(i + 1))
            if not self.dense:
                seen = selected_tokens(scores[i], i, c.index_blocks, ratio)
            chosen.append(seen)
            out[i] = attend(q[i], qg[i, :, 1], k[seen], v[seen])
        self.selected[name] = chosen
        return out @ m.o_proj.T + bias(m.o_proj_bias)

    def _moe(self, m, x):
        ids, weights = route(
            x @ m.gate.T, self.config.num_experts_per_tok, self.config.norm_topk_prob
        )
        out = np.zeros_like(x)
        for t in range(len(x)):
            for e, w in zip(ids[t], weights[t], strict=True):
                gate, up = m.experts.gate_up_proj[e]
                out[t] += w * swiglu(x[t], gate, up, m.experts.down_proj[e])
        s = m.shared_expert
        share = sigmoid(x @ m.shared_expert_gate.T)
        return out + share * swiglu(x, s.gate_proj, s.up_proj, s.down_proj)
