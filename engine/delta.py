"""The gated delta rule: linear attention, whose memory is one matrix per head.

A head has a matrix S (K, V), zeros at first. Each token t forgets, writes and reads:

    S     <-  exp(decay_t) S                              decay_t is at most 0
    S     <-  S + strength_t k_t (v_t - S^T k_t)^T        S^T k_t, what k_t found, nears v_t
    out_t  =  S^T q_t / sqrt(K)                           q_t and k_t have length 1

`rule_step` does this once. `rule` does it for many tokens: within a chunk all writes
together solve one triangular system, and the matrix goes from chunk to chunk.

A KV cache grows with each token and can be cut anywhere. This matrix cannot be cut: it can
only be continued from where it was kept. So tokens that share a prefix are cut into runs,
and a run continues the matrix with which another one ended. The rule is computed in
float32, or in float64 if the model is.

Sources: DeltaNet in chunks (arXiv 2406.06484), Gated DeltaNet (2412.06464), qwen3_5 in
transformers. Shapes: N tokens, R runs, n chunks of T tokens, H value heads, J key heads,
G = H / J, K and V the dimensions of keys and values, C channels and W width of the
convolution.
"""
import numpy as np
import torch
from torch import Tensor

from engine.device import upcast

CHUNK = 64  # tokens
# What is nearly forgotten is so small that a CPU multiplies it five times as slowly. Now
# the whole process takes it for 0.
torch.set_flush_denormal(True)


class Runs:
    """N tokens, of which each follows another one: `before` (N,) has the index of that, or
    -1. A run is a stretch of tokens in which each follows the one before it. Other tokens
    may follow its last one only. Runs are cut into chunks. Chunks that can be computed at
    the same time are a wave: each belongs to the wave after that of the chunk it
    continues."""

    def __init__(self, before: np.ndarray, device):
        N = len(before)
        forks = np.flatnonzero(before != np.arange(N) - 1)
        starts = np.unique([0, *forks, *before[forks] + 1])
        ends = [*starts[1:].tolist(), N]
        self.count = len(ends)
        self.size = min(CHUNK, max(end - start for start, end in zip(starts, ends)))  # T

        waves = []  # each a list of chunks: first token, end, which of the wave before
        last = []  # for each run the wave and the place of its last chunk
        for run, (start, end) in enumerate(zip(starts.tolist(), ends)):
            wave, place = -1, run
            if before[start] >= 0:
                wave, place = last[np.searchsorted(starts, before[start], "right") - 1]
            for first in range(start, end, self.size):
                wave += 1
                if wave == len(waves):
                    waves.append([])
                waves[wave].append((first, min(first + self.size, end), place))
                place = len(waves[wave]) - 1
            last.append((wave, place))

        def tensor(values) -> Tensor:
            return torch.as_tensor(values, device=device)

        chunks = [chunk for wave in waves for chunk in wave]
        places = np.zeros(N, np.int64)  # where each token is among the n T
        for i, (first, end, _) in enumerate(chunks):
            places[first:end] = np.arange(i * self.size, i * self.size + end - first)
        self.chunks, self.places = len(chunks), tensor(places)
        self.waves = [tensor([place for *_, place in wave]) for wave in waves]
        at = np.cumsum([0, *map(len, waves)])
        self.last = tensor([at[wave] + place for wave, place in last])  # chunk of each run


def taps(before: np.ndarray, count: int, width: int) -> np.ndarray:
    """(count, width): the index of each of the first tokens, and before it those that it
    follows. Here `before` has no -1: a token without a predecessor follows itself."""
    columns = [np.arange(count)]
    while len(columns) < width:
        columns.insert(0, before[columns[0]])
    return np.stack(columns, 1)


def convolve(x: Tensor, taps_NW: Tensor, weight_C1W: Tensor) -> Tensor:
    """Each channel of x (_, C), over the last W tokens: (N, C)."""
    columns, weights = taps_NW.unbind(1), weight_C1W[:, 0].unbind(1)
    out = x.index_select(0, columns[0]) * weights[0]
    for column, weight in zip(columns[1:], weights[1:]):
        out = torch.addcmul(out, x.index_select(0, column), weight)
    return out


def unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor, runs: Runs,
         first: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """q and k (N, J, K), v (N, H, V), decay and strength (N, H). `first` (R, H, K, V) are
    the matrices of runs that continue no other run; by default zeros. Returns the output,
    (N, H, V) of the type of v, and the matrices at the end of every chunk, (n, H, K, V)."""
    (J, K), (H, V), dtype = k.shape[1:], v.shape[1:], v.dtype
    q, k, v, decay, strength = map(upcast, (q, k, v, decay, strength))
    q, k = unit(q) * K ** -0.5, unit(k)

    def cut(x: Tensor, heads: int) -> Tensor:  # N heads ... -> n J G T ...
        padded = x.new_zeros(runs.chunks * runs.size, *x.shape[1:])
        padded = padded.index_copy(0, runs.places, x)  # zeros change no matrix
        shape = runs.chunks, runs.size, J, heads // J, *x.shape[2:]
        return padded.view(shape).movedim(1, 3)

    q, k = cut(q, J), cut(k, J)  # n J 1 T K: the same for all value heads of a key head
    v, decay, strength = cut(v, H), cut(decay, H), cut(strength, H)  # n J G T V, n J G T
    decay = decay.cumsum(-1)  # from the chunk's beginning
    later = torch.ones(runs.size, runs.size, dtype=torch.bool, device=v.device).triu(1)
    between = decay[..., :, None] - decay[..., None, :]  # n J G T T
    between = between.masked_fill(later, -torch.inf).exp()
    since, left = decay.exp()[..., None], (decay[..., -1:] - decay).exp()[..., None]

    # Token t writes v_t - S^T k_t, where S has what the chunk wrote before: so writes solve
    # (1 + A) x = right. Their part that depends on the first S is linear in it.
    A = k @ k.mT * between * strength[..., None]  # only its part with j < t is read
    right = torch.cat((v, k * since), -1) * strength[..., None]
    solved = torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True)
    fresh, found = solved.split((V, K), -1)  # n J G T V, n J G T K
    within = q @ k.mT * between  # n J G T T
    q, k = q * since, (k * left).mT  # n J G T K, n J G K T
    kept = since[..., -1:, :]  # n J G 1 1

    # Wave after wave only what needs S, in few operations: a GPU waits for each of them.
    sizes = [len(before) * H for before in runs.waves]
    parts = [x.flatten(0, 2).split(sizes) for x in (fresh, found, k, kept)]
    S = v.new_zeros(runs.count, H, K, V) if first is None else first
    starts, writes, ends = [], [], []
    for before, new, seen, keys, keep in zip(runs.waves, *parts):
        S = S.index_select(0, before)  # its backward pass sums over those that continue it
        starts.append(S)
        S = S.flatten(0, 1)
        writes.append(torch.baddbmm(new, seen, S, alpha=-1))
        S = torch.baddbmm(keep * S, keys, writes[-1]).view(-1, H, K, V)
        ends.append(S)
    S = torch.cat(starts).unflatten(1, (J, H // J))  # n J G K V
    out = q @ S + within @ torch.cat(writes).view(fresh.shape)
    out = out.movedim(3, 1).reshape(-1, H, V)  # n J G T V -> nT H V
    return out.index_select(0, runs.places).to(dtype), torch.cat(ends)


def rule_step(matrices: Tensor, slots: Tensor, q: Tensor, k: Tensor, v: Tensor,
              decay: Tensor, strength: Tensor) -> Tensor:
    """One token each of B requests: the output (B, H, V). Their matrices, `slots` (B,) of
    `matrices` (S, H, K, V), are changed in place."""
    (J, K), H, dtype = k.shape[1:], v.shape[1], v.dtype
    q, k, v, decay, strength = map(upcast, (q, k, v, decay, strength))
    q, k = (unit(x).repeat_interleave(H // J, 1) for x in (q, k))  # B H K
    S = matrices[slots] * decay.exp()[..., None, None]  # B H K V
    found = (k[:, :, None] @ S)[:, :, 0]  # B H V
    S = S + k[..., None] * ((v - found) * strength[..., None])[:, :, None]
    matrices.index_copy_(0, slots, S)
    out = (q[:, :, None] @ S)[:, :, 0] * K ** -0.5  # B H V
    return out.to(dtype)
