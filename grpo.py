"""GRPO on trees: from the rewards of the roots to a loss over sampled tokens.

For each question G trees are sampled, and only their roots are scored. Root g has, within
its group, the advantage (DeepSeekMath, 2402.03300, section 4.1.2; the epsilon is ours)

    A_g = (r_g - mean(r)) / (std(r) + epsilon)

and every node below it inherits A_g: children need no reward of their own. The objective of
a tree is that of the blog "Reinforcing Recursive Language Models" (alphaXiv, 2026),

    J(y, A) = J_node(y, A) + (1 / k_y) * sum_i J(y_i, A)
    J_node  = c * sum_t [w_t min(rho_t A, clip(rho_t, 1 - low, 1 + high) A) - beta k3_t]
    J       = the mean of J(root_g, A_g) over all scored trees of the batch

over the k_y children of y that sampled a token, and the sampled tokens t of y; the loss is
-J. So a root with forty children does not outweigh one with two.

    c        a constant (Dr. GRPO) where the blog's formula has 1/|y| (GRPO)
    rho_t    pi / pi_old; pi_old is the trainer before the update, so rho is 1 at first
    w_t      pi_old / pi_sampler, which differ a little in precision and kernels; detached
             and truncated as in TIS (truncated importance sampling)
    k3_t     estimates KL(pi || pi_ref), pi_ref being the policy that GRPO started from

A batch goes through the functions from top to bottom: `advantages` (one per tree),
`inherit` (a Credit per node), `node_weights` (the factors 1/k), `make_rows` (one per
node), `collate` (a pack of rows without padding; each row sees only itself), `policy_loss`.
All weights are known before the first forward pass, so the loss depends neither on the
packs, which runtime/packing.py makes, nor on which rank computes them.

`credit` is the objective "grpo". Those of others are functions like it, and live in
lab/objectives.py. Left out: a value function.
"""
import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import zip_longest

import torch
from torch import Tensor

from runtime.flags import check, flag
from tree import Node, Rollout

LENGTH_CONSTANT = 64.0  # c is 1 over this: about the sampled tokens of a turn
EPSILON = 1e-2  # added to the deviation, so that nearly equal rewards count little
# From the second update of a batch on, ratios are clipped to 1 - CLIP_LOW, 1 + CLIP_HIGH.
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # DAPO's clip-higher; GRPO has 0.2 on both sides
TRUST_MAX = 2.0  # the weight pi_old / pi_sampler is at most this


@dataclass(frozen=True)
class GRPOConfig:
    """The switches of the objective. Raises ValueError for one that has no effect."""
    objective: str = flag(
        "grpo", "grpo; leave_one_out, max_rl, node_mean, rao, filter, dpo, own, "
                "process (lab/objectives.py); or path/to/file.py[:function]")
    credit: str = flag(
        "inherit", "who is trained. inherit: all nodes; root: roots; children: the others",
        choices=("inherit", "root", "children"))
    children: str = flag(
        "mean", "weight of each of k children. mean: 1/k of its parent's; sum: the same",
        choices=("mean", "sum"))
    length: str = flag(
        "constant", "weight of a token in its node y. sequence: 1/|y| (GRPO); constant: "
                    f"1/{LENGTH_CONSTANT:g} (Dr. GRPO, 2503.20783); batch: all sampled "
                    "tokens of the batch alike (DAPO, 2503.14476)",
        choices=("constant", "sequence", "batch"))
    std: str = flag(
        "on", "divide by the group's deviation (Dr. GRPO: off)", choices=("on", "off"))
    updates: int = flag(1, "optimizer steps on each batch, each over all of it", 1)
    kl: float = flag(0.0, "beta of the KL term to the policy that GRPO started from")

    def __post_init__(self):
        check(self)
        if self.credit == "root" and self.children == "sum":
            raise ValueError("credit root trains no children: children sum has no effect")
        if self.length == "batch" and self.children == "sum":
            raise ValueError("length batch weights all tokens alike, whoever sampled them")


SWITCHES = ("credit", "children", "length", "std")  # those that an objective may ignore


def reads(*switches: str) -> Callable:
    """A decorator: the switches that an objective reads, some of SWITCHES. It sets
    `objective.reads`. An objective without it reads none."""
    def named(objective: Callable) -> Callable:
        objective.reads = switches
        return objective
    return named


def check_switches(objective: Callable, config: GRPOConfig) -> None:
    """Raises ValueError for a switch that was changed, though the objective ignores it."""
    for f in fields(config):
        ignored = f.name in SWITCHES and f.name not in getattr(objective, "reads", ())
        value = getattr(config, f.name)
        if ignored and value != f.default:
            raise ValueError(f"the objective {config.objective} does not read {f.name}: "
                             f"leave it {f.default}, not {value}")


def scored_groups(rollouts: list[Rollout]) -> dict[str, list[int]]:
    """The indices of each group's rollouts, without those that failed."""
    groups = defaultdict(list)
    for i, rollout in enumerate(rollouts):
        if not rollout.failed:
            groups[rollout.group].append(i)
    return groups


def advantages(rollouts: list[Rollout], config: GRPOConfig = GRPOConfig(),
               compare: Callable | None = None) -> list[float]:
    """The advantage of each root within its group; failed rollouts have 0 and do not count.
    `compare(rewards)` is for objectives that relate the rewards of a group otherwise.
    Raises ValueError for a reward that is not finite."""
    result = [0.0] * len(rollouts)
    for name, members in scored_groups(rollouts).items():
        rewards = [rollouts[i].reward for i in members]
        if not all(math.isfinite(reward) for reward in rewards):
            raise ValueError(f"group {name}: rewards {rewards} are not finite")
        compared = compare(rewards) if compare else relative(rewards, config)
        for i, advantage in zip(members, compared):
            result[i] = advantage
    return result


def relative(values: list[float], config: GRPOConfig) -> list[float]:
    """Centred values. With std "on" they are divided by the deviation of the population
    plus EPSILON."""
    scale = statistics.pstdev(values) + EPSILON if config.std == "on" else 1.0
    return [value / scale for value in centred(values)]


def centred(values: list[float]) -> list[float]:
    """Values minus their mean. If all are equal, what rounding leaves is no signal: 0."""
    if max(values) - min(values) < 1e-9:
        return [0.0] * len(values)
    mean = statistics.fmean(values)
    return [value - mean for value in values]


@dataclass(frozen=True)
class Credit:
    """What an objective says of a node: which of its turns to strengthen, and how much."""
    advantages: list[float]  # one per sampled turn
    weight: float  # of each of the node's tokens; make_rows multiplies it by c


@reads("credit", "children", "length", "std")
def credit(rollouts: list[Rollout], config: GRPOConfig) -> dict[Node, Credit]:
    """The objective "grpo": every node inherits the advantage of its root."""
    return inherit(rollouts, advantages(rollouts, config), config)


def inherit(rollouts: list[Rollout], per_tree: list[float], config: GRPOConfig) -> dict:
    """A Credit for each node that is trained: the advantage of its tree, in each turn."""
    result = {}
    for rollout, advantage in zip(rollouts, per_tree):
        if rollout.failed:
            continue
        for node, weight in node_weights(rollout.root, config).items():
            is_root = node is rollout.root
            if config.credit == "inherit" or is_root == (config.credit == "root"):
                turns = sum(turn.sampled for turn in node.turns)
                result[node] = Credit([advantage] * turns, weight)
    return result


def node_weights(root: Node, config: GRPOConfig = GRPOConfig()) -> dict[Node, float]:
    """The factor of each node's J_node in J(root): the product of 1/k from the root down.

    Nodes that sampled nothing are absent. Children "sum" and length "batch" make all 1."""
    weights = {}

    def visit(node: Node, weight: float) -> None:
        if node.sampled:
            weights[node] = weight
        children = [child for child in node.children if child.sampled]
        if config.children == "mean" and config.length != "batch":
            weight /= max(1, len(children))
        for child in children:
            visit(child, weight)

    visit(root, 1.0)
    return weights


@dataclass(frozen=True)
class Row:
    """One node as training data: all that the loss needs, except the model's output."""
    ids: list[int]
    mask: list[int]  # 1 for sampled tokens
    logprobs: list[float]  # the sampler's, 0 where mask is 0
    advantages: list[float]  # of each sampled token
    weight: float  # of each sampled token in the loss
    depth: int = 0


def make_rows(rollouts: list[Rollout], credits: dict[Node, Credit],
              config: GRPOConfig) -> list[Row]:
    """The batch as rows, one per node that has a credit and sampled a token.

    Rows without any advantage add nothing to the loss and are dropped, unless there is a
    KL term; their trees and tokens still count in the means. Raises ValueError for a credit
    that does not have one advantage per sampled turn."""
    trees = [rollout for rollout in rollouts if not rollout.failed]
    nodes = [node for tree in trees for node in tree.root.walk() if node in credits]
    tokens = sum(node.sampled for node in nodes)

    rows = []
    for node in nodes:
        given = credits[node]
        turns = [turn for turn in node.turns if turn.sampled]
        if len(given.advantages) != len(turns):
            raise ValueError(f"node {node.path}: not one advantage per sampled turn")
        if node.sampled and (any(given.advantages) or config.kl):
            divisor = {"constant": LENGTH_CONSTANT * len(trees), "batch": tokens,
                       "sequence": node.sampled * len(trees)}[config.length]
            per_token = [a for a, turn in zip(given.advantages, turns) for _ in turn.ids]
            rows.append(Row(node.ids, node.mask, node.logprobs, per_token,
                            given.weight / divisor, node.depth))
    return rows


def collate(rows: list[Row], device) -> dict[str, Tensor | list[int]]:
    """The tensors of a pack. An empty one has a single token, with mask 0.

    ids and mask are (1, T): rows one after another, whose lengths are in "lengths". The
    others are (N,), one entry per sampled token, in the order of model.logprobs."""
    def flat(values, dtype=torch.float32):
        listed = [value for row in rows for value in values(row)]
        return torch.tensor(listed, dtype=dtype, device=device)

    return {
        "ids": torch.tensor([[i for row in rows for i in row.ids] or [0]], device=device),
        "mask": torch.tensor([[m for row in rows for m in row.mask] or [0]], device=device),
        "lengths": [len(row.ids) for row in rows] or [1],
        "sampler": flat(lambda row: [p for p, m in zip(row.logprobs, row.mask) if m]),
        "advantages": flat(lambda row: row.advantages),
        "weights": flat(lambda row: [row.weight] * sum(row.mask)),
        "depths": flat(lambda row: [row.depth] * sum(row.mask), torch.long),
    }


def policy_loss(logprobs_N: Tensor, entropies_N: Tensor, pack: dict,
                config: GRPOConfig) -> "tuple[Tensor, Stats]":
    """-J over the sampled tokens of a pack, and its statistics.

    `pack` is what collate returned, with up to two more tensors (N,): "old", the
    log-probabilities before the first update (absent if there is only one), and
    "reference", those of pi_ref for the KL term."""
    old_N = pack.get("old", logprobs_N).detach()
    A_N = pack["advantages"]

    log_ratio_N = logprobs_N - old_N
    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    surrogate_N = torch.minimum(ratio_N * A_N, clipped_N * A_N)

    gap_N = old_N - pack["sampler"]
    trust_N = gap_N.exp().clamp(max=TRUST_MAX)
    objective_N = trust_N * surrogate_N

    reference_kl_N = torch.zeros_like(old_N)
    if config.kl:
        distance_N = pack["reference"] - logprobs_N
        reference_kl_N = distance_N.exp() - distance_N - 1  # k3 >= 0 (Schulman, 2020)
        objective_N = objective_N - config.kl * reference_kl_N
    loss = -(pack["weights"] * objective_N).sum()

    with torch.no_grad():
        is_clipped_N = (ratio_N * A_N > clipped_N * A_N).to(old_N)
        policy_kl_N = ratio_N - 1 - log_ratio_N  # k3 from the policy before the update
        watched_NW = torch.stack([  # in the order of WATCHED
            torch.ones_like(old_N), ratio_N, is_clipped_N, policy_kl_N, reference_kl_N,
            entropies_N, A_N.abs(), gap_N.abs()], dim=1)
        if not len(old_N):  # an empty pack
            return loss, Stats()
        sums_DW = watched_NW.new_zeros(pack["depths"].max() + 1, len(WATCHED))
        sums_DW.index_add_(0, pack["depths"], watched_NW)
    return loss, Stats(sums_DW.tolist(), gap_N.abs().max().item())


WATCHED = "tokens ratio clipped kl reference_kl entropy advantage gap".split()


@dataclass(frozen=True)
class Stats:
    """The statistics of an update as plain numbers; `+` combines packs and ranks."""
    sums: list[list[float]] = ()  # over the tokens of each depth, in the order of WATCHED
    largest_gap: float = 0.0  # between log-probabilities of trainer and sampler

    def __add__(self, other: "Stats") -> "Stats":
        depths = zip_longest(self.sums, other.sums, fillvalue=[0.0] * len(WATCHED))
        sums = [[a + b for a, b in zip(*both)] for both in depths]
        return Stats(sums, max(self.largest_gap, other.largest_gap))

    def metrics(self) -> dict:
        """Means over the tokens, as metrics.jsonl has them; None without any token."""
        def means(sums: list[float]) -> dict[str, float]:
            return {name: x / max(1, sums[0]) for name, x in zip(WATCHED[1:], sums[1:])}

        total = [sum(column) for column in zip(*self.sums)]
        return (means(total) if total else dict.fromkeys(WATCHED[1:])) | {
            "largest_gap": self.largest_gap,
            "by_depth": [{"share": sums[0] / total[0]} | means(sums) for sums in self.sums]}
