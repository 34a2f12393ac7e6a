"""GRPO on trees: from the rewards of the roots to a loss over sampled tokens.

For a question, G trees are sampled and only their roots are scored. Root g has the advantage

    A_g = (r_g - mean(r)) / (std(r) + floor)                  DeepSeekMath, 2402.03300, eq. 3

and every node below it inherits A_g: children need no reward of their own. With k_y the children
of node y that sampled at least one token, the objective of a tree is the recursion

    J(y, A) = J_node(y, A) + (1 / k_y) * sum_i J(y_i, A)
    J_node  = (1 / |y|) * sum_t min(rho_t A, clip(rho_t, 1 - eps_low, 1 + eps_high) A)

over the sampled tokens t of y, rho_t = pi(t) / pi_old(t). Unrolled, a node's term carries the
product of the 1/k on the way from the root (`node_weights`), so a root that spawns forty children
does not outweigh one that spawns two. J is the mean over all trees of the batch; the loss is -J.

Because the weights are known before any forward pass, a batch is a flat list of rows, one a node,
and a token's contribution is weight * min(...): the sum over rows does not depend on how they are
cut into micro-batches, or which rank computes them. A micro-batch is a pack: rows one after another
without padding, each of which sees only itself.

pi_old are the trainer's own log-probabilities before the update, so rho = 1 on the first update of
a batch; that the sampler's differ a little (precision, kernels) is a separate weight
pi_old / pi_sampler, truncated (as in TIS) and detached.

The defaults of GRPOConfig differ in one place: 1/|y| is a constant, so that a token weighs the
same in a short turn and in a long one.

Left out: a KL term, a value function, several updates a batch. Everything here is torch and
tree.py; the model is the caller's.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from tree import Node, Rollout


@dataclass(frozen=True)
class GRPOConfig:
    credit: str = "inherit"  # inherit: children have their root's advantage; root: not trained
    children: str = "mean"  # mean: 1/k as above; sum: 1 instead of 1/k
    length: str = "constant"  # sequence: 1/|y|; constant: 1/length_constant (Dr. GRPO,
    #                           2503.20783); batch: all sampled tokens alike (DAPO, 2503.14476)
    length_constant: float = 64.0
    std: bool = True  # divide the advantage by the group's standard deviation
    std_floor: float = 1e-2
    clip_low: float = 0.2
    clip_high: float = 0.2
    gap_max: float = 2.0  # truncation of the sampler/trainer weight

    def __post_init__(self):
        for name, allowed in (("credit", ("inherit", "root")), ("children", ("mean", "sum")),
                              ("length", ("sequence", "constant", "batch"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it can be "
                                 f"{' or '.join(allowed)}")


@dataclass(frozen=True)
class Row:
    """One node as training data: everything the loss needs but the policy."""
    ids: list[int]
    mask: list[int]  # 1 for sampled tokens
    logprobs: list[float]  # the sampler's, 0 where mask is 0
    advantage: float  # its root's
    weight: float  # of each sampled token in the batch's loss


def advantages(rollouts: list[Rollout], std: bool = True, floor: float = 1e-2) -> list[float]:
    """The advantage of each root within its group; 0 for failed rollouts, which also stay out
    of their group's mean and deviation (population form)."""
    groups: dict[str, list[float]] = {}
    for r in rollouts:
        if not r.failed:
            groups.setdefault(r.group, []).append(r.reward)
    result = []
    for r in rollouts:
        if r.failed:
            result.append(0.0)
            continue
        rewards = groups[r.group]
        mean = sum(rewards) / len(rewards)
        deviation = (sum((x - mean) ** 2 for x in rewards) / len(rewards)) ** 0.5
        flat = max(rewards) - min(rewards) < 1e-9  # rounding in the mean is no signal
        result.append(0.0 if flat else (r.reward - mean) / (deviation + floor if std else 1.0))
    return result


def node_weights(root: Node, children: str = "mean") -> dict[Node, float]:
    """The weight of each node's J_node in J(root): the product of 1/k from the root down, k
    counting the children that sampled at least one token. Nodes that sampled none are absent."""
    weights = {}

    def visit(node: Node, weight: float) -> None:
        if node.sampled:
            weights[node] = weight
        kids = [child for child in node.children if child.sampled]
        for child in kids:
            visit(child, weight / len(kids) if children == "mean" else weight)

    visit(root, 1.0)
    return weights


def make_rows(rollouts: list[Rollout], config: GRPOConfig) -> list[Row]:
    """The batch as rows, one a node. Rows whose advantage is 0 add nothing to the loss and are
    dropped here; they count in the means all the same."""
    advantage = advantages(rollouts, config.std, config.std_floor)
    trees = [(r, a) for r, a in zip(rollouts, advantage) if not r.failed]
    all_nodes = [
        (node, weight, a) for r, a in trees
        for node, weight in node_weights(r.root, config.children).items()
        if config.credit == "inherit" or node is r.root]
    tokens = sum(node.sampled for node, _, _ in all_nodes)
    rows = []
    for node, weight, a in all_nodes:
        if a == 0:
            continue
        scale = {"sequence": weight / node.sampled / len(trees),
                 "constant": weight / config.length_constant / len(trees),
                 "batch": 1 / tokens}[config.length]
        rows.append(Row(node.ids, node.mask, node.logprobs, a, scale))
    return rows


def micro_batches(rows: list[Row], max_tokens: int, square: float = 0.0, rank: int = 0,
                  ranks: int = 1) -> list[list[Row]]:
    """This rank's share of the rows, as packs of at most max_tokens (a longer row is a pack of its
    own). Every rank gets as many packs; some are empty where there is too little to share.

    A row of T tokens costs T (1 + square T), the second term being attention. The longest first,
    each goes to the cheapest pack that has room; packs of similar cost go to the ranks side by
    side, because they run in step.
    """
    def cost(row: Row) -> float:
        return len(row.ids) * (1 + square * len(row.ids))

    tokens = sum(len(row.ids) for row in rows)
    least = max(-(-tokens // max_tokens), sum(2 * len(row.ids) > max_tokens for row in rows))
    packs = [[] for _ in range(min(-(-least // ranks) * ranks, len(rows)))]
    room, costs = [max_tokens] * len(packs), [0.0] * len(packs)
    for row in sorted(rows, key=cost, reverse=True):
        fits = [i for i, free in enumerate(room) if free >= len(row.ids) or not packs[i]]
        if not fits:
            fits = [len(packs)]
            packs.append([]), room.append(max_tokens), costs.append(0.0)
        i = min(fits, key=costs.__getitem__)
        packs[i].append(row)
        room[i] -= len(row.ids)
        costs[i] += cost(row)
    packs.sort(key=lambda pack: -sum(map(cost, pack)))
    packs += [[] for _ in range(-len(packs) % ranks)]
    return packs[rank::ranks]


def collate(rows: list[Row], device) -> dict[str, Tensor | list[int]]:
    """Tensors of a pack: ids and mask (1, T), rows one after another; their lengths; the rest (N,),
    one entry per sampled token, as model.logprobs orders them. No rows: one token, not sampled."""
    def flat(value):
        return torch.tensor([v for row in rows for v in value(row)], device=device)

    return {
        "ids": torch.tensor([[i for row in rows for i in row.ids] or [0]], device=device),
        "mask": torch.tensor([[m for row in rows for m in row.mask] or [0]], device=device),
        "lengths": [len(row.ids) for row in rows] or [1],
        "sampler_logprobs": flat(lambda r: [p for p, m in zip(r.logprobs, r.mask) if m]),
        "advantages": flat(lambda r: [r.advantage] * sum(r.mask)),
        "weights": flat(lambda r: [r.weight] * sum(r.mask)),
    }


def policy_loss(logprobs_N: Tensor, old_logprobs_N: Tensor, sampler_logprobs_N: Tensor,
                advantages_N: Tensor, weights_N: Tensor, config: GRPOConfig):
    """-J over the sampled tokens of a micro-batch, and what to watch, as sums over its tokens.

    All arguments are (N,). The loss of a batch is the sum of the losses of its micro-batches.
    """
    ratio_N = (logprobs_N - old_logprobs_N.detach()).exp()
    clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    surrogate_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    gap_N = old_logprobs_N.detach() - sampler_logprobs_N
    trust_N = gap_N.exp().clamp(max=config.gap_max)
    loss = -(weights_N * trust_N * surrogate_N).sum()
    stats = {"tokens": len(logprobs_N), "gap": gap_N.abs().sum().item(),
             "gap_max": gap_N.abs().max().item() if len(gap_N) else 0.0,
             "clipped": (ratio_N * advantages_N > clipped_N * advantages_N).sum().item()}
    return loss, stats
