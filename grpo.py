"""GRPO on trees: from the rewards of the roots to a loss over sampled tokens.

For each question G trees are sampled, and only their roots are scored: r_1 to r_G. Root g
has, within its group, the advantage (DeepSeekMath, 2402.03300; the epsilon is ours)

    A_g = (r_g - mean(r)) / (std(r) + epsilon)

and every node below it inherits A_g: children need no reward of their own. The objective of
a tree is that of the blog "Reinforcing Recursive Language Models" (alphaXiv, 2026),

    J(y, A) = J_node(y, A) + (1 / k_y) * sum_i J(y_i, A)
    J_node  = c * sum_t w_t [min(rho_t A, clip(rho_t, 1 - low, 1 + high) A) - beta KL_t]
    J       = the mean of J(root_g, A_g) over all scored trees of the batch

over the k_y children of y that sampled a token, and the sampled tokens t of y. The loss is
-J. With 1 / k_y a root with forty children weighs no more than a root with two.

    c        a constant (Dr. GRPO), where the blog's formula has 1/|y| (GRPO)
    rho_t    pi / pi_old; pi_old is the trainer before the update, so rho is 1 at first
    w_t      pi_old / pi_sampler, at most 2: an importance weight, as trainer and sampler
             round differently
    KL_t     rho_t k3_t, which estimates KL(pi || pi_ref); GRPO started from pi_ref. With
             rho_t its gradient is that of the KL, too (DeepSeek-V3.2, 2512.02556)

The functions stand in the order of the equation. All weights are known before the first
forward pass. So the loss depends neither on how sequences are packed (engine/packing.py)
nor on which rank computes them. Left out: a value function, and scores of single turns.

Others' rules of credit are in docs/objective.md, what they reach here in docs/results.md.
"""
from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.packing import Pack
from tree import Node, Tree
from util import check, expect, flag

LENGTH_CONSTANT = 64.0  # c is 1 over this: about the sampled tokens of a turn
EPSILON = 1e-2  # a group whose rewards differ by less than this has small advantages
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # DAPO's clip-higher; GRPO has 0.2 on both sides
TRUST_MAX = 2.0  # the largest w_t


@dataclass(frozen=True)
class Credit:
    """What an objective says of a node."""
    advantages: list[float]  # one per sampled turn
    weight: float  # what each token of the node weighs in the loss, without c


def credit(trees: list[Tree], config: GRPOConfig) -> dict[Node, Credit]:
    """The objective "grpo": every node inherits the advantage of its root."""
    return inherit(trees, advantages(trees, config), config)


def credits_of(objective: Callable, trees: list[Tree],
               config: GRPOConfig) -> dict[Node, Credit]:
    """What an objective says. Raises ValueError if that is no {node: Credit}, with one
    advantage per sampled turn."""
    credits = objective(trees, config)
    expect(isinstance(credits, dict), objective, credits, "{node: Credit}")
    for node, given in credits.items():
        turns = sum(message.is_sampled for message in node.messages)
        right = isinstance(given, Credit) and len(given.advantages) == turns
        expect(right, objective, given, f"a Credit with {turns} advantages")
    return credits


def advantages(trees: list[Tree], config: GRPOConfig) -> list[float]:
    """The advantage of each root within its group, 0 for failed trees."""
    result = [0.0] * len(trees)
    for members in scored_groups(trees).values():
        rewards = [trees[i].reward for i in members]
        for i, advantage in zip(members, relative(rewards, config)):
            result[i] = advantage
    return result


def relative(values: list[float], config: GRPOConfig) -> list[float]:
    """Each value minus the mean, over the population's deviation if std is "on"."""
    scale = statistics.pstdev(values) + EPSILON if config.std == "on" else 1.0
    return [value / scale for value in centred(values)]


def inherit(trees: list[Tree], per_tree: list[float],
            config: GRPOConfig) -> dict[Node, Credit]:
    """A Credit for each trained node: the advantage of its tree, for each of its turns."""
    result = {}
    for tree, advantage in zip(trees, per_tree):
        if tree.failed:
            continue
        for node, weight in node_weights(tree.root, config).items():
            wanted = {"all": True, "roots": not node.depth, "children": node.depth}
            if wanted[config.trained]:
                turns = sum(message.is_sampled for message in node.messages)
                result[node] = Credit([advantage] * turns, weight)
    return result


def node_weights(root: Node, config: GRPOConfig,
                 weight: float = 1.0) -> dict[Node, float]:
    """The factor of each node's J_node in J(root): the product of 1/k from the root down.

    Nodes that sampled nothing are absent. Children "sum" makes all 1."""
    weights, children = {}, [child for child in root.children if child.sampled]
    if root.sampled:
        weights[root] = weight
    if config.children == "mean":
        weight /= max(1, len(children))
    for child in children:
        weights |= node_weights(child, config, weight)
    return weights


@dataclass(frozen=True)
class Sequence:
    """One node as training data: T tokens, N of them sampled."""
    ids: list[int]  # (T)
    mask: list[int]  # (T), 1 for sampled tokens
    logprobs: list[float]  # (T), the sampler's; 0 where mask is 0
    advantages: list[float]  # (N)
    weight: float  # what each sampled token weighs in the loss
    depth: int = 0  # how deep the node is; a root has 0


def make_sequences(trees: list[Tree], credits: dict[Node, Credit],
                   config: GRPOConfig) -> list[Sequence]:
    """The batch as sequences: one per node that has a credit and sampled a token. Sequences
    without an advantage are dropped unless there is a KL term. The loss is a mean over all
    trees (or tokens), and those of dropped sequences are counted in its denominator."""
    trees = [tree for tree in trees if not tree.failed]
    nodes = [node for tree in trees for node in tree.root.walk() if node in credits]
    tokens = sum(node.sampled for node in nodes)

    sequences = []
    for node in nodes:
        given = credits[node]
        turns = [message for message in node.messages if message.is_sampled]
        if node.sampled and (any(given.advantages) or config.kl):
            divisor = {"constant": LENGTH_CONSTANT * len(trees), "batch": tokens,
                       "sequence": node.sampled * len(trees)}[config.length]
            per_token = [a for a, turn in zip(given.advantages, turns) for _ in turn.ids]
            sequences.append(Sequence(node.ids, node.mask, node.logprobs, per_token,
                                      given.weight / divisor, node.depth))
    return sequences


def minibatches(trees: list[Tree], config: GRPOConfig) -> list[list[Tree]]:
    """The trees in `config.updates` minibatches; those of a question are in one."""
    place = {name: i % config.updates
             for i, name in enumerate(dict.fromkeys(tree.group for tree in trees))}
    return [[tree for tree in trees if place[tree.group] == i]
            for i in range(config.updates)]


def clipped_loss(logprobs_N: Tensor, ratio_N: Tensor, pack: Pack,
                 config: GRPOConfig) -> Tensor:
    """-min(rho A, clip(rho) A) of each token (PPO, 1707.06347): (N). Another objective may
    have another `loss`. It sees the tokens of whole sequences, pack.sampled of each."""
    A_N, clipped_N = pack.advantages, ratio_N.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -torch.minimum(ratio_N * A_N, clipped_N * A_N)


def policy_loss(logprobs_N: Tensor, entropies_N: Tensor, pack: Pack, config: GRPOConfig,
                loss: Callable = clipped_loss) -> tuple[Tensor, dict[str, Tensor]]:
    """-J over the N sampled tokens of a pack, and what is watched of each, {name: (N)}.

    With one update per batch the policy is still pi_old. Then rho is 1, so "ratio",
    "clipped" and "kl" are constant, and only the gradient depends on rho."""
    A_N = pack.advantages
    old_N = (logprobs_N if pack.old_logprobs is None else pack.old_logprobs).detach()
    log_ratio_N = logprobs_N - old_N
    ratio_N = log_ratio_N.exp()  # rho_t
    loss_N = loss(logprobs_N, ratio_N, pack, config)
    shape, wanted = getattr(loss_N, "shape", loss_N), ratio_N.shape
    expect(shape == wanted, loss, shape, f"{wanted}, a loss per token")

    reference_kl_N = torch.zeros_like(old_N)
    if config.kl:
        distance_N = pack.reference_logprobs - logprobs_N
        reference_kl_N = distance_N.exp() - distance_N - 1  # k3_t (Schulman, 2020)
        loss_N = loss_N + config.kl * ratio_N * reference_kl_N

    trust_N = (old_N - pack.sampler_logprobs).exp().clamp(max=TRUST_MAX)  # w_t
    total = (pack.weights * (trust_N * loss_N)).sum()  # weights: c, 1/k and the mean

    beyond_N = ratio_N - ratio_N.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    per_token = {
        "ratio": ratio_N, "clipped": (beyond_N * A_N > 0).to(old_N),
        "kl": ratio_N - 1 - log_ratio_N,  # k3 from the policy before the update
        "reference_kl": reference_kl_N, "entropy": entropies_N, "advantage": A_N.abs(),
        "gap": (old_N - pack.sampler_logprobs).abs()}
    return total, {name: values_N.detach() for name, values_N in per_token.items()}


@torch.no_grad()
def with_references(pack: Pack, config: GRPOConfig, model, reference) -> Pack:
    """The pack with the log-probabilities of pi_old and pi_ref, where the loss needs
    them."""
    old_N = reference_N = None
    if config.updates > 1:
        old_N, _ = model.logprobs(pack)
    if reference:
        reference_N, _ = reference.logprobs(pack)
    elif config.kl:  # without its adapters the model is the reference
        with model.adapters_off():
            reference_N, _ = model.logprobs(pack)
    return replace(pack, old_logprobs=old_N, reference_logprobs=reference_N)


def scored_groups(trees: list[Tree]) -> dict[str, list[int]]:
    """The indices of each group's trees, without those that failed."""
    groups = defaultdict(list)
    for i, tree in enumerate(trees):
        if not tree.failed:
            groups[tree.group].append(i)
    return groups


def centred(values: list[float]) -> list[float]:
    """Each value minus the mean; exactly 0 where all are equal, in spite of rounding."""
    if max(values) - min(values) < 1e-9:
        return [0.0] * len(values)
    mean = statistics.fmean(values)
    return [value - mean for value in values]


@dataclass(frozen=True)
class GRPOConfig:
    """The switches of the objective. Raises ValueError for one that has no effect."""
    objective: str = flag(
        "grpo", "grpo; rao, filter, own (baselines/objectives.py); or "
                "path/to/file.py[:function]")
    trained: str = flag(
        "all", "which nodes are trained: all, the roots, or the children",
        choices=("all", "roots", "children"))
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
    updates: int = flag(
        1, "optimizer steps on each batch, each over its share of the questions", 1)
    kl: float = flag(0.0, "beta of the KL term to the policy that GRPO started from")

    def __post_init__(self):
        check(self)
        if self.length == "batch" and self.children == "mean":
            raise ValueError("length batch weights all tokens alike: give --children sum")
