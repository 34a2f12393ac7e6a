"""GRPO on trees: from the rewards of the roots to a loss over sampled tokens.

For a question, G trees are sampled and only their roots are scored. Root g has the advantage

    A_g = (r_g - mean(r)) / (std(r) + floor)                  DeepSeekMath, 2402.03300, eq. 3

and every node below it inherits A_g: children need no reward of their own. With k_y the children
of node y that sampled at least one token, the objective of a tree is the recursion

    J(y, A) = J_node(y, A) + (1 / k_y) * sum_i J(y_i, A)
    J_node  = c * sum_t [w_t min(rho_t A, clip(rho_t, 1 - eps_low, 1 + eps_high) A) - beta k3_t]
    J       = mean over all trees of the batch of J(root_g, A_g);               the loss is -J

over the sampled tokens t of y, rho_t = pi(t) / pi_old(t). c is a constant (Dr. GRPO) where GRPO has
1/|y|; k3_t estimates KL(pi || pi_ref). Unrolled, a node's term carries the product of the 1/k on
the way from the root, so a root that spawns forty children does not outweigh one that spawns two.
Trees of groups without signal have A = 0 and count in the mean all the same.

The pass, top to bottom: `advantages` (one a tree) -> `credit` (one a turn) -> `node_weights` (one a
node) -> `make_rows` (one row a node) -> `micro_batches`, `collate` -> `policy_loss`. Weights are
known before any forward pass, so the sum does not depend on how rows are cut into micro-batches, or
which rank computes them. A micro-batch is a pack: rows one after another without padding, each of
which sees only itself. pi_old are the trainer's own log-probabilities before the update: rho = 1 on
the first update of a batch. That the sampler's differ (precision, kernels, --overlap) is the weight
w_t = pi_old / pi_sampler, truncated as in TIS and detached.

Two other methods are this loss with other advantages. Rejection sampling (`filter`): 1 for trees
that scored enough. DPO (2305.18290): where rho = 1, the gradient of -log sigmoid(beta m) for a pair
of trees, m = log pi/pi_ref of the better minus that of the worse, is the policy gradient with the
advantages +-beta sigmoid(-beta m). Left out: a value function.
"""
import math
import random
import statistics
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.flags import check_least, flag
from tree import Node, Rollout

OVERLONG = ("turns", "window", "budget")  # how a root ends that was cut off
PENALTY = 0.5


@dataclass(frozen=True)
class GRPOConfig:
    """The switches of the objective. Raises ValueError for values that contradict each other."""
    objective: str = flag("grpo", "grpo: group-relative advantages; filter: rejection sampling, "
                                  "supervised on trees above --keep; dpo: a group's best and worst")
    credit: str = flag("inherit", "who is trained. inherit: all nodes, with their root's "
                                  "advantage; root: roots only; children: all but roots")
    children: str = flag("mean", "weights below a node with k children. mean: 1/k; sum: 1; "
                                 "one: 1 for one of them, drawn at random")
    length: str = flag("constant", "a token's weight in its node y. sequence: 1/|y| (GRPO); "
                                   "constant: 1 / --length-constant (Dr. GRPO, 2503.20783); "
                                   "batch: all sampled tokens of the batch alike, children or not "
                                   "(DAPO, 2503.14476)")
    length_constant: float = flag(64.0, "of --length constant: about the tokens of a turn", 1)
    std: str = flag("on", "advantages over the group's deviation. on: yes; off: no (Dr. GRPO)")
    std_floor: float = flag(1e-2, "added to the deviation, so that near-equal trees count little")
    clip_low: float = flag(0.2, "from the second update on, ratios below 1 minus this are clipped")
    clip_high: float = flag(0.2, "ratios above 1 plus this (DAPO's clip-higher: 0.28)")
    updates: int = flag(1, "optimizer steps on each batch, all of it each time", 1)
    kl: float = flag(0.0, "beta of the KL term to the policy that GRPO started from (k3 estimator)")
    gap_max: float = flag(2.0, "truncation of pi_old / pi_sampler (TIS)", 1)
    overlong: str = flag("keep", "trees cut off by a limit. keep: scored as they are; mask: in the "
                                 f"baseline, not trained (DAPO); punish: {PENALTY} less reward")
    own: float = flag(0.0, "share of a child's advantage that its own score gives, if it has one")
    process: float = flag(0.0, "advantage of a turn without an error (Agent-R1, 2511.14460)")
    keep: float = flag(0.5, "score from which --objective filter learns from a tree")
    dpo_beta: float = flag(0.1, "beta of DPO")

    def __post_init__(self):
        check_least(self)
        for name, allowed in (("objective", "grpo filter dpo"), ("credit", "inherit root children"),
                              ("children", "mean sum one"), ("length", "sequence constant batch"),
                              ("std", "on off"), ("overlong", "keep mask punish")):
            if getattr(self, name) not in allowed.split():
                raise ValueError(f"{name} is {getattr(self, name)!r}; it can be "
                                 f"{' or '.join(allowed.split())}")
        for wrong, why in (
                (self.own > 1, "own is a share, at most 1"),
                (self.clip_low >= 1, "clip_low is below 1"),
                (self.updates == 1 and (self.clip_low, self.clip_high) != (0.2, 0.2),
                 "ratios are 1 in the first update: clip_low and clip_high need updates"),
                (self.keep != 0.5 and self.objective != "filter"
                 or self.dpo_beta != 0.1 and self.objective != "dpo",
                 "keep is for objective filter, dpo_beta for dpo"),
                (self.credit == "root" and (self.children != "mean" or self.own > 0),
                 "credit root trains no children: children and own have no effect"),
                (self.length == "batch" and self.children != "mean",
                 "length batch weights all tokens alike: children has no effect"),
                (self.objective != "grpo" and (self.own or self.process or self.std == "off"),
                 f"{self.objective} has no baseline: own, process and std have no effect"),
                (self.objective == "dpo" and (self.updates > 1 or self.kl or self.overlong == "mask"
                                              or self.length != "constant"),
                 "dpo takes neither kl, length, updates nor overlong mask")):
            if wrong:
                raise ValueError(why)

    @property
    def needs_reference(self) -> bool:
        return self.kl > 0 or self.objective == "dpo"

    @property
    def needs_old(self) -> bool:
        return self.updates > 1 or self.objective == "dpo"


@dataclass(frozen=True)
class Row:
    """One node as training data: everything the loss needs but the policy."""
    ids: list[int]
    mask: list[int]  # 1 for sampled tokens
    logprobs: list[float]  # the sampler's, 0 where mask is 0
    advantages: list[float]  # of each sampled token
    weight: float  # of each sampled token in the batch's loss
    depth: int = 0
    pair: int = 0  # DPO: which group; the better tree has advantage 1, the worse -1


def advantages(rollouts: list[Rollout], config: GRPOConfig = GRPOConfig()) -> list[float]:
    """The advantage of each root within its group; 0 for failed rollouts, which also stay out
    of their group's mean and deviation (population form).

    Raises ValueError for a reward that is not finite."""
    groups: dict[str, list[int]] = defaultdict(list)
    for i, r in enumerate(rollouts):
        if not r.failed:
            groups[r.group].append(i)
    result = [0.0] * len(rollouts)
    for name, members in groups.items():
        rewards = [rollouts[i].reward - PENALTY * overlong(rollouts[i], config, "punish")
                   for i in members]
        if not all(map(math.isfinite, rewards)):
            raise ValueError(f"group {name}: rewards {rewards} are not finite")
        A = relative(rewards, config)
        if config.objective == "filter":
            A = [float(r >= config.keep) for r in rewards]
        elif config.objective == "dpo":  # in a group without signal best and worst are the same
            best, worst = A.index(max(A)), A.index(min(A))
            A = [(i == best) - (i == worst) for i in range(len(A))]
        for i, a in zip(members, A):
            result[i] = 0.0 if overlong(rollouts[i], config, "mask") else float(a)
    return result


def overlong(rollout: Rollout, config: GRPOConfig, how: str) -> bool:
    return config.overlong == how and rollout.root.end in OVERLONG


def relative(values: list[float], config: GRPOConfig) -> list[float]:
    """Values minus their mean, over their deviation if config.std is on."""
    if max(values) - min(values) < 1e-9:  # rounding in the mean is no signal
        return [0.0] * len(values)
    mean = sum(values) / len(values)
    deviation = (sum((x - mean) ** 2 for x in values) / len(values)) ** 0.5
    scale = deviation + config.std_floor if config.std == "on" else 1.0
    return [(x - mean) / scale for x in values]


def credit(rollouts: list[Rollout], config: GRPOConfig) -> dict[Node, list[float]]:
    """The advantage of each sampled turn of each node: its root's, and what goes beyond it.

    own      A = (1 - own) * A_root + own * A_own for nodes with a score of their own (Node.score),
             A_own being relative to all of them in the group
    process  plus process * (v_t - mean v), v_t = 1 for a turn with a valid block and no error;
             at most |A| / 2, so that it never outweighs the answer; all of it where A is 0
    """
    result = {}
    scored, turns = defaultdict(list), defaultdict(list)
    for r, a in zip(rollouts, advantages(rollouts, config)):
        for node in (() if r.failed else r.root.walk()):
            spoken = sum(turn.logprobs is not None for turn in node.turns)
            result[node] = [a] * spoken
            if node.score is not None:
                scored[r.group].append(node)
            turns[r.group] += [(node, t) for t in range(spoken)]
    if config.own:
        for nodes in scored.values():
            for node, a in zip(nodes, relative([node.score for node in nodes], config)):
                result[node] = [(1 - config.own) * A + config.own * a for A in result[node]]
    if config.process:
        for members in filter(None, turns.values()):
            valid = [float(t not in node.errors) for node, t in members]
            mean = sum(valid) / len(valid)
            for (node, t), v in zip(members, valid):
                A, extra = result[node][t], config.process * (v - mean)
                most = abs(A) / 2 or math.inf
                result[node][t] += max(-most, min(most, extra))
    return result


def node_weights(root: Node, config: GRPOConfig = GRPOConfig(),
                 draw: random.Random | None = None) -> dict[Node, float]:
    """The weight of each node's J_node in J(root): the product of 1/k from the root down, k
    counting the children that sampled at least one token. Nodes that sampled none are absent.
    `draw` picks the one child of `children="one"`."""
    weights, draw = {}, draw or random.Random(0)

    def visit(node: Node, weight: float) -> None:
        if node.sampled:
            weights[node] = weight
        kids = [child for child in node.children if child.sampled]
        if config.children == "one" and kids:
            kids = [draw.choice(kids)]
        for child in kids:
            share = 1 / len(kids) if config.children == "mean" else 1.0
            visit(child, weight * share)

    visit(root, 1.0)
    return weights


def make_rows(rollouts: list[Rollout], config: GRPOConfig,
              draw: random.Random | None = None) -> list[Row]:
    """The batch as rows, one a node. Rows without any advantage add nothing to the loss and are
    dropped here (a KL term needs them, then they stay); they count in the means all the same."""
    worth = credit(rollouts, config)
    trees = [r for r in rollouts if not r.failed]
    nodes = [(node, weight, r.group) for r in trees if not overlong(r, config, "mask")
             for node, weight in node_weights(r.root, config, draw).items()
             if config.credit == "inherit" or (node is r.root) == (config.credit == "root")]
    tokens = sum(node.sampled for node, _, _ in nodes)
    pairs = {group: i for i, group in enumerate(dict.fromkeys(r.group for r in trees))}
    rows = []
    for node, weight, group in nodes:
        if not any(worth[node]) and not config.kl:
            continue
        scale = weight if config.objective == "dpo" else {
            "sequence": weight / node.sampled / len(trees),
            "constant": weight / config.length_constant / len(trees),
            "batch": 1 / tokens}[config.length]
        sampled = [turn for turn in node.turns if turn.logprobs is not None]
        each = [a for a, turn in zip(worth[node], sampled) for _ in turn.ids]
        rows.append(Row(node.ids, node.mask, node.logprobs, each, scale, node.depth, pairs[group]))
    return rows


def micro_batches(rows: list[Row], max_tokens: int, square: float = 0.0, rank: int = 0,
                  ranks: int = 1) -> list[list[Row]]:
    """This rank's share of the rows, as packs of at most max_tokens (a longer row is a pack of its
    own). Every rank gets as many packs; some are empty where there is too little to share.

    A row of T tokens costs T (1 + square T), the second term being attention. The longest first,
    each goes to the cheapest pack with room; packs of similar cost run in step on the ranks."""
    def tokens(some: list[Row]) -> int:
        return sum(len(row.ids) for row in some)

    def cost(some: list[Row]) -> float:
        return sum(len(row.ids) * (1 + square * len(row.ids)) for row in some)

    # Two rows of more than half a pack cannot share one.
    least = max(-(-tokens(rows) // max_tokens), sum(2 * len(row.ids) > max_tokens for row in rows))
    packs = [[] for _ in range(min(-(-least // ranks) * ranks, len(rows)))]
    for row in sorted(rows, key=lambda row: len(row.ids), reverse=True):
        fits = [p for p in packs if not p or tokens(p) + len(row.ids) <= max_tokens]
        if not fits:
            packs.append([])
        min(fits or packs[-1:], key=cost).append(row)
    packs.sort(key=cost, reverse=True)
    packs += [[] for _ in range(-len(packs) % ranks)]
    return packs[rank::ranks]


def collate(rows: list[Row], device) -> dict[str, Tensor | list[int]]:
    """Tensors of a pack: ids and mask (1, T), rows one after another; their lengths; the rest (N,),
    one entry per sampled token, as model.logprobs orders them. No rows: one token, not sampled."""
    def flat(value, dtype=torch.float32):
        return torch.tensor([v for row in rows for v in value(row)], dtype=dtype, device=device)

    return {
        "ids": torch.tensor([[i for row in rows for i in row.ids] or [0]], device=device),
        "mask": torch.tensor([[m for row in rows for m in row.mask] or [0]], device=device),
        "lengths": [len(row.ids) for row in rows] or [1],
        "sampler": flat(lambda r: [p for p, m in zip(r.logprobs, r.mask) if m]),
        "advantages": flat(lambda r: r.advantages),
        "weights": flat(lambda r: [r.weight] * sum(r.mask)),
        "depths": flat(lambda r: [r.depth] * sum(r.mask), torch.long),
        "pairs": flat(lambda r: [r.pair] * sum(r.mask), torch.long),
    }


def dpo_advantages(batches: list[dict[str, Tensor]], config: GRPOConfig,
                   gather=lambda value: [value]) -> None:
    """Multiply the signs in "advantages" by beta * sigmoid(-beta * m) / pairs, in place: the loss
    is then the mean over pairs. m sums sign * weight * (log pi - log pi_ref) over both trees, parts
    of which may be on other ranks, from which `gather` brings theirs."""
    mine, margin = defaultdict(float), defaultdict(float)
    for t in batches:
        each = t["advantages"] * t["weights"] * (t["old"] - t["reference"])
        for pair in t["pairs"].unique().tolist():
            mine[pair] += each[t["pairs"] == pair].sum().item()
    for share in gather(dict(mine)):
        for pair, m in share.items():
            margin[pair] += m
    factor = torch.zeros(max(margin) + 1, device=batches[0]["old"].device)
    for pair, m in margin.items():
        wrong = torch.tensor(-config.dpo_beta * m, dtype=torch.float64).sigmoid()
        factor[pair] = config.dpo_beta * wrong / len(margin)
    for t in batches:
        t["advantages"] = t["advantages"] * factor[t["pairs"]]


STATS = ("tokens", "ratio", "clipped", "kl", "reference_kl", "entropy", "advantage", "gap")


def policy_loss(logprobs_N: Tensor, entropies_N: Tensor, t: dict[str, Tensor], config: GRPOConfig):
    """-J over the sampled tokens of a micro-batch, and what to watch.

    `t` is what collate returned, with "old" (the trainer's log-probabilities before the update;
    absent: these very ones) and, for a KL term, "reference", each (N,). Returns (loss, stats
    (len(STATS), depths): sums over the tokens of each depth, the largest gap to the sampler)."""
    old_N = t.get("old", logprobs_N).detach()
    log_ratio_N = logprobs_N - old_N
    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    A_N = t["advantages"]
    surrogate_N = torch.minimum(ratio_N * A_N, clipped_N * A_N)  # J_node's term of one token
    gap_N = old_N - t["sampler"]
    trust_N = gap_N.exp().clamp(max=config.gap_max)
    objective_N = trust_N * surrogate_N
    reference_kl_N = torch.zeros_like(old_N)
    if config.kl:
        off_N = t["reference"] - logprobs_N  # k3 = e^x - x - 1 >= 0 (Schulman, 2020)
        reference_kl_N = off_N.exp() - off_N - 1
        objective_N = objective_N - config.kl * reference_kl_N
    loss = -(t["weights"] * objective_N).sum()
    with torch.no_grad():
        watched = torch.stack([  # in the order of STATS
            torch.ones_like(old_N), ratio_N, (ratio_N * A_N > clipped_N * A_N).to(old_N),
            ratio_N - 1 - log_ratio_N, reference_kl_N, entropies_N, A_N.abs(), gap_N.abs()])
        deepest = int(t["depths"].max()) if len(old_N) else 0  # an empty pack has no tokens
        stats = torch.zeros(len(STATS), deepest + 1, device=old_N.device)
        stats.index_add_(1, t["depths"], watched.float())
    return loss, stats, gap_N.abs().max().item() if len(old_N) else 0.0


def own_correlation(rollouts: list[Rollout], advantage: list[float]) -> float | None:
    """Pearson's, of the score of each node that has one and the advantage that it inherits: how
    well the root's reward says which child did well. None if one of the two is constant."""
    pairs = [(node.score, a) for r, a in zip(rollouts, advantage) if not r.failed
             for node in r.root.walk() if node.score is not None]
    try:
        return statistics.correlation(*zip(*pairs))
    except (statistics.StatisticsError, TypeError):  # constant; or nobody has a score
        return None
