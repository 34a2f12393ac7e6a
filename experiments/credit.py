"""What a node is worth to its tree, and what each rule of credit gives it.

    python -m experiments.credit MODEL [--questions N]

The true credit of a child: keep its tree, but sample the child and all below it AGAIN
times. It is the tree's reward minus the mean reward of these trees. Every other message is
replayed if its node has read what is recorded; if not, it is sampled. A root is sampled
again from each of its messages on.

First every tree is replayed whole: ids, answers and reward have to be the same. Then each
rule has a line per depth: how what it multiplies the tokens of a node with, advantage times
weight, correlates with the true credit, and how often the signs agree if there is one.
"""
import asyncio
import random
from collections.abc import Callable
from statistics import correlation, fmean

import engine  # before torch: it says how torch's threads wait

import grpo
import rlm
import tasks
import util
from baselines import objectives
from grpo import GRPOConfig
from tree import Completion, Node, Rollout

GROUP, AGAIN = 8, 6


def replaying(old: Node, policy: Callable | None = None, path: tuple | None = None,
              turn: int = 0) -> Callable:
    """The policy that says in one tree what was said in `old`. It asks `policy` for the
    node at `path` from its message number `turn` on, and for what follows from that."""
    recorded = {node.path: node for node in old.walk()}
    new = set()  # paths of nodes with a new message

    async def choose(node: Node, most: int, key: tuple) -> Completion:
        if not node.path and not node.written:  # a lost tree begins again
            new.clear()
        was, prefix = recorded.get(node.path), node.ids
        line = {node.path[:depth] for depth in range(node.depth + 1)}
        stands = was and was.ids[:len(prefix)] == prefix and not line & new
        if not stands or (node.path == path and node.written >= turn):
            new.add(node.path)
            return await policy(node, most, key)
        said = [turn for turn in was.turns if turn.sampled][node.written]
        return Completion(said.text, said.ids, said.logprobs)

    return choose


def main() -> None:
    parser = util.parser("What a node is worth, and what each rule of credit gives it.")
    parser.add_argument("model", help="checkpoint directory")
    parser.add_argument("--questions", type=int, default=8)
    args = parser.parse_args()
    model = rlm.RLM(args.model, batch=256)
    kind = tasks.load(model.config.task)
    asked = [tasks.make(kind, random.Random(f"credit {i}")) for i in range(args.questions)]
    jobs = rlm.jobs(asked, times=GROUP)
    trees = asyncio.run(rlm.collect(jobs, model.policy, model.tokenizer, model.config))

    async def one(tree: Rollout, number: int, policy: Callable) -> Rollout:
        job = rlm.Job(tree.task, (number,))
        return await rlm.scored_rollout(job, policy, model.tokenizer, model.config)

    def replays(items: list[tuple]) -> list[Rollout]:
        return asyncio.run(rlm.side_by_side(one, items, 32, "trees"))

    twins = replays([(tree, 0, replaying(tree.root)) for tree in trees])
    for tree, twin in zip(trees, twins):
        was, now = ([(node.ids, node.answer) for node in made.root.walk()]
                    for made in (tree, twin))
        assert (was, tree.reward) == (now, twin.reward), tree.task
    print(f"{len(trees)} trees were replayed exactly")

    nodes = [(tree, node, turn) for tree in trees for node in tree.root.walk()
             for turn in range(1 if node.depth else node.written) if node.sampled]
    again = iter(replays([(tree, n, replaying(tree.root, model.policy, node.path, turn))
                          for tree, node, turn in nodes for n in range(1, AGAIN + 1)]))
    true = [tree.reward - fmean(next(again).reward for _ in range(AGAIN))
            for tree, _, _ in nodes]
    for name in ("grpo", *objectives.READS):
        credit = grpo.credit if name == "grpo" else getattr(objectives, name)
        credits = credit(trees, GRPOConfig(name))
        for depth in sorted({node.depth for _, node, _ in nodes}):
            pairs = [(effect, credits[node].advantages[turn] * credits[node].weight)
                     for effect, (_, node, turn) in zip(true, nodes) if node.depth == depth]
            signs = fmean(a * b > 0 for a, b in pairs if a)
            print(f"{name:14} depth {depth}  n {len(pairs):4}  "
                  f"r {correlation(*zip(*pairs)):+.2f}  signs {signs:.2f}")


if __name__ == "__main__":
    main()
