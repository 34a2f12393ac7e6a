"""Trees that fork from one another: the objective "fork", and how its trees are sampled.

After Tree-GRPO (2509.21240). Of SIBLINGS trees of a question the first is sampled from the
start. One of its nodes is drawn. The others take over all that does not depend on what that
node says: what its ancestors said before they asked for it, and whole other children that
were asked before it or beside it. They sample the node again, and all that follows from it.

A REPL cannot be copied. So the code of what is taken over runs again, while a policy that
remembers stands in for the model. It answers only where a conversation has exactly the
tokens that it had before: code that prints something else the second time is sampled from
there on. What is taken over costs no sampling, and the sampler has its pages in the prefix
cache. It has no log-probabilities, so nobody counts it as sampled or trains it twice.

A tree without a child is sampled again from the start, one with a child keeps its root. So
forked trees are not distributed like others, and with this objective the `reward` of a step
is not quite the policy's. Held-out scores are.

Where the paper differs: it forks at a step (a turn) of one conversation, not at a node of a
tree of conversations, in several rounds, and gives each whole path from start to end both
advantages, that among the siblings plus that among all trees. Left out: such rounds, and
forks at a later turn of a node.
"""
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import rlm
from grpo import Credit, GRPOConfig, credit, relative
from tree import Completion, Node, Rollout

SIBLINGS = 4  # trees that share a beginning: with 8 trees a question two, three forks each


def fork(rollouts: list[Rollout], config: GRPOConfig) -> dict[Node, Credit]:
    """What was sampled again is judged among its siblings, by the answers of their roots.

    A tree that was sampled from the start has the advantage of "grpo", relative to all
    trees of its question. The nodes of a forked tree that sampled something have
        A = (r - mean(r)) / (std(r) + floor)    over the trees that share its beginning
    the first one included. As in other trees the weight of k children that sampled is 1/k
    each, so the node that was sampled again weighs as much as a root. Reads credit,
    children, length, std."""
    result = credit(rollouts, config)
    siblings = defaultdict(list)
    for rollout in rollouts:
        if not rollout.failed:
            siblings[rollout.origin or rollout.root].append(rollout)
    for trees in siblings.values():
        among = relative([tree.reward for tree in trees], config)
        for tree, advantage in zip(trees, among):
            for node in tree.root.walk():
                if tree.origin and node in result:
                    given = result[node]
                    result[node] = Credit([advantage] * len(given.advantages), given.weight)
    return result


async def collect(questions: list, policy, tokenizer, config: rlm.RLMConfig, key: tuple,
                  groups: list[str], *, numbers: list[int], **more) -> list[Rollout]:
    """As rlm.collect, in two parts: the trees from the start, then those that fork."""
    said = {}  # (number of a tree, path, tokens so far) -> the turn that followed

    async def remembering(node: Node, max_tokens: int, key: tuple) -> Completion:
        *_, number, path, _ = key
        turn = said.get((number, path, tuple(node.ids)))
        if turn is None or len(turn.ids) > max_tokens:
            return await policy(node, max_tokens, key)
        return Completion(turn.text, turn.ids, None)

    async def sample(places: list[int]) -> dict[int, Rollout]:
        trees = await rlm.collect(
            [questions[i] for i in places], remembering, tokenizer, config, key,
            [groups[i] for i in places], numbers=[numbers[i] for i in places], **more)
        return dict(zip(places, trees))

    place = [i - groups.index(group) for i, group in enumerate(groups)]  # in its group
    start = [i - at % SIBLINGS for i, at in enumerate(place)]
    firsts = await sample(sorted(set(start)))
    again = [i for i in range(len(questions)) if i not in firsts]
    for i in again:
        root = firsts[start[i]].root
        nodes = [node for node in root.walk() if node.sampled]
        draw = random.Random(str((key, numbers[start[i]])))  # the same for all siblings
        point = draw.choice(nodes[1:] or nodes or [root])
        for node, turns in before(root, point):
            ids = []
            for turn in node.turns:
                if turn.role == "assistant" and turns > 0:
                    said[numbers[i], node.path, tuple(ids)] = turn
                    turns -= 1
                ids += turn.ids

    forked = await sample(again) if again else {}
    for i, tree in forked.items():
        forked[i] = replace(tree, origin=firsts[start[i]].root)
    return [tree for _, tree in sorted((firsts | forked).items())]


fork.collect = collect


def before(node: Node, point: Node) -> Iterator[tuple[Node, float]]:
    """What does not depend on what `point` says: nodes, and how many turns of each."""
    if node is point:
        return
    turns, last = math.inf, (math.inf,)
    for child in node.children:
        if child.path == point.path[:child.depth]:  # the way to the point leads there
            turns, last = child.asked[0] + 1, (*child.asked, 0)  # the same query, too
    yield node, turns
    for child in node.children:
        if child.asked < last:
            yield from before(child, point)
