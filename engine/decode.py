"""One token of each request on a GPU, in Triton: attention over the pages of a KV cache,
and the delta rule.

A few requests with one query each are too little work for a GPU, unless their keys are cut
into parts that are attended to side by side (flash decoding). Here the parts are spans of
SPAN tokens, whatever else is in the batch: a long request alone has the whole card, and
the result of each does not depend on the others. The host needs no lengths, so that a CUDA
graph can be made of it. The delta rule reads and writes each matrix once, where torch's
operations would read it ten times. With TRITON_INTERPRET=1 all runs on a CPU, slowly.

Shapes: B requests, H query and K key/value heads, G = H / K, E head_dim, P pages of S
tokens, C columns of the page tables. Those of the delta rule are in engine/delta.py.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor

SPAN = 256  # tokens of a span
BLOCK = 64  # tokens, and in merging spans, that are read at once
PROGRAMS = 2048  # that fill a card; each takes every n-th span of a request
COLUMNS = 32  # one program has so many columns of a matrix of the delta rule
LEAST = 16  # programs of a request and key head, for a long one among many short ones


def decode(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor,
           tables: Tensor) -> Tensor:
    """q (B, H, E); keys, values (P, S, K, E) of the same type; lengths (B,) int32, how many
    tokens each request has, at least 1; tables (B, C) int32, its pages: (B, H, E)."""
    B, H, E = q.shape
    _, S, K, _ = keys.shape
    C = tables.shape[1]
    spans = triton.cdiv(C * S, SPAN)
    parts = torch.empty(B, H, spans, E, dtype=torch.float32, device=q.device)
    sums = torch.empty(B, H, spans, dtype=torch.float32, device=q.device)
    out = torch.empty(B, H, E, dtype=q.dtype, device=q.device)
    wide = max(16, triton.next_power_of_2(E))  # tl.dot takes no less
    heads = max(16, triton.next_power_of_2(H // K))
    at_once = min(spans, max(LEAST, triton.cdiv(PROGRAMS, B * K)))
    attend_spans[(B, K, at_once)](
        q.contiguous(), keys, values, lengths, tables, parts, sums, E ** -0.5, C, spans,
        H, K, E, S, heads, wide, SPAN, BLOCK)
    merge_spans[(B, H)](parts, sums, lengths, out, spans, H, E, wide, SPAN, BLOCK)
    return out


@triton.jit
def attend_spans(q, keys, values, lengths, tables, parts, sums, scale, C, spans,
                 H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
                 HEADS: tl.constexpr, WIDE: tl.constexpr,
                 SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """One request, the G heads that share keys, every n-th span: its attention in `parts`,
    and the logarithm of its sum in `sums`. The softmax goes block by block, as in flash
    attention (arXiv 2205.14135)."""
    b, k = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + b)
    G: tl.constexpr = H // K
    g = tl.arange(0, HEADS)
    e = tl.arange(0, WIDE)
    head = (b * H + k * G + g).to(tl.int64)  # HEADS
    is_head = (g < G)[:, None] & (e < E)[None, :]  # HEADS WIDE
    query = tl.load(q + head[:, None] * E + e[None, :], is_head, 0.0)

    for span in range(tl.program_id(2), tl.cdiv(length, SPAN), tl.num_programs(2)):
        top = tl.full([HEADS], -float("inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        mean = tl.zeros([HEADS, WIDE], tl.float32)
        end = tl.minimum((span + 1) * SPAN, length)
        for first in range(span * SPAN, end, BLOCK):
            t = first + tl.arange(0, BLOCK)
            page = tl.load(tables + b * C + t // S, t < end, 0).to(tl.int64)
            row = ((page * S + t % S) * K + k) * E  # BLOCK
            is_key = (t < end)[:, None] & (e < E)[None, :]  # BLOCK WIDE
            key = tl.load(keys + row[:, None] + e[None, :], is_key, 0.0)
            value = tl.load(values + row[:, None] + e[None, :], is_key, 0.0)

            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            score = tl.where((t < end)[None, :], score, -float("inf"))  # HEADS BLOCK
            new = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp(score - new[:, None])
            fade = tl.exp(top - new)
            total = total * fade + tl.sum(weight, 1)
            mean = mean * fade[:, None] + tl.dot(
                weight.to(value.dtype), value, input_precision="ieee")
            top = new

        at = head * spans + span
        tl.store(parts + at[:, None] * E + e[None, :], mean / total[:, None], is_head)
        tl.store(sums + at, top + tl.log(total), g < G)


def rule_step(matrices: Tensor, slots: Tensor, q: Tensor, k: Tensor, v: Tensor,
              decay: Tensor, strength: Tensor) -> Tensor:
    """As engine.delta.rule_step, with matrices (S, H, K, V) in float32, and decay and
    strength (B, H)."""
    (B, J, K), (H, V) = k.shape, v.shape[1:]
    out = torch.empty(B, H, V, dtype=v.dtype, device=v.device)
    rule_step_kernel[(B, H, triton.cdiv(V, COLUMNS))](
        matrices, slots, q.contiguous(), k.contiguous(), v.contiguous(), decay.contiguous(),
        strength.contiguous(), out, K ** -0.5, H, J, K, V, triton.next_power_of_2(K),
        COLUMNS)
    return out


@triton.jit
def rule_step_kernel(matrices, slots, q, k, v, decay, strength, out, scale,
                     H: tl.constexpr, J: tl.constexpr, K: tl.constexpr,
                     V: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """One request, value head, and some columns of its matrix."""
    b, h = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, WIDE)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    shared = (b * J + h // (H // J)) * K  # the value heads of a key head share it
    key = tl.load(k + shared + row, row < K, 0.0).to(tl.float32)
    query = tl.load(q + shared + row, row < K, 0.0).to(tl.float32)
    key = key / tl.sqrt(tl.sum(key * key, 0) + 1e-6)
    query = query * scale / tl.sqrt(tl.sum(query * query, 0) + 1e-6)

    head, slot = b * H + h, tl.load(slots + b).to(tl.int64)
    is_part = (row < K)[:, None] & (column < V)[None, :]  # WIDE COLUMNS
    at = matrices + ((slot * H + h) * K + row[:, None]) * V + column[None, :]
    S = tl.load(at, is_part, 0.0) * tl.exp(tl.load(decay + head).to(tl.float32))
    found = tl.sum(key[:, None] * S, 0)
    value = tl.load(v + head * V + column, column < V, 0.0).to(tl.float32)
    write = (value - found) * tl.load(strength + head).to(tl.float32)
    S += key[:, None] * write[None, :]
    tl.store(at, S, is_part)
    tl.store(out + head * V + column, tl.sum(query[:, None] * S, 0), column < V)


@triton.jit
def merge_spans(parts, sums, lengths, out, spans, H: tl.constexpr, E: tl.constexpr,
                WIDE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """One request and head: the mean of its spans."""
    head = (tl.program_id(0) * H + tl.program_id(1)).to(tl.int64)
    count = tl.cdiv(tl.load(lengths + tl.program_id(0)), SPAN)
    e = tl.arange(0, WIDE)
    top = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mean = tl.zeros([WIDE], tl.float32)
    for first in range(0, count, BLOCK):
        span = first + tl.arange(0, BLOCK)
        at = head * spans + span
        is_part = (span < count)[:, None] & (e < E)[None, :]  # BLOCK WIDE
        part = tl.load(parts + at[:, None] * E + e[None, :], is_part, 0.0)
        value = tl.load(sums + at, span < count, -float("inf"))  # BLOCK
        new = tl.maximum(top, tl.max(value, 0))
        weight = tl.exp(value - new)
        fade = tl.exp(top - new)
        total = total * fade + tl.sum(weight, 0)
        mean = mean * fade + tl.sum(part * weight[:, None], 0)
        top = new
    tl.store(out + head * E + e, mean / total, e < E)
