"""What a node is worth to its tree, and what each rule of credit gives it.

    python -m experiments.credit OUT.jsonl MODEL [--questions N] [--work N]

The true credit of a node: keep the tree, but sample the node and all below it again. The
credit is the tree's reward minus the mean reward of AGAIN such trees. All other messages
are replayed where their prefix is the recorded one. Where it is not, they are sampled. A
root is sampled again from one of its messages on.

First every tree is replayed whole, REPLs included: ids, answer and reward have to be the
same. Then a line of OUT is one node. With --work the task is notes, with N notes to sort.
"""
import asyncio
import itertools
import json
import random
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial

import engine  # before torch: it says how torch's threads wait

import grpo
import repl
import rlm
import tasks
import util
from baselines import objectives
from experiments import cached, matched
from grpo import GRPOConfig
from repl import trees_at_once
from tasks import notes
from tree import Completion, Node, Rollout

GROUP, BLOCK = 16, 8  # trees per question, and how many of them a rule compares
NODES, AGAIN = 2, 6  # nodes per depth of a tree that are sampled again, and how often


class Replay(rlm._Tree):
    """A tree that grows as `old` did, but for the node at `path` from its message number
    `turn` on. Without a path nothing is sampled."""

    def __init__(self, old: Node, path: tuple | None, turn: int, *given):
        super().__init__(*given)
        self.sample_anew, self.policy = self.policy, self.choose
        self.old = {node.path: node for node in old.walk()}
        self.path, self.turn = path, turn
        self.new: dict[tuple, Node] = {}  # the nodes that have a new message

    def stands(self, node: Node) -> bool:
        """Whether the record of this node follows from what it has read so far."""
        was, prefix = self.old.get(node.path), node.ids
        line = {node.path[:depth] for depth in range(node.depth + 1)}
        return bool(was) and was.ids[:len(prefix)] == prefix and not line & self.new.keys()

    async def choose(self, node: Node, most: int, key: tuple) -> Completion:
        again = node.path == self.path and node.written >= self.turn
        if again or not self.stands(node):
            self.new[node.path] = node
            return await self.sample_anew(node, most, key)
        said = [turn for turn in self.old[node.path].turns if turn.sampled][node.written]
        return Completion(said.text, said.ids, said.logprobs)

    async def converse(self, node: Node, query: str, context) -> None:
        """A node that stands, with nothing new below it, is copied: it needs no REPL."""
        if self.path in (None, node.path) or self.path[:node.depth] == node.path \
                or not self.stands(node):
            await super().converse(node, query, context)
        else:
            vars(node).update(vars(self.old[node.path]))


async def replayed(tree: Rollout, policy, tokenizer, config, key: tuple = (),
                   path: tuple | None = None, turn: int = 0) -> tuple[Rollout, int]:
    """The tree with the node at `path` sampled again, and how many tokens that took."""
    replay = None

    async def grow(*given) -> Node:
        nonlocal replay
        replay = Replay(tree.root, path, turn, *given)
        root, query = replay.root()
        await replay.converse(root, query, tree.task.context)
        return root

    job = rlm.Job(tree.task, key, tree.group)
    made = await rlm.scored_rollout(job, policy, tokenizer, config, grow=grow)
    return made, sum(node.sampled for node in replay.new.values())


def rules() -> dict[str, tuple]:
    """Every objective: {name: (function, its switches, trees that it compares)}."""
    named = {name: (getattr(objectives, name), GRPOConfig(name), BLOCK)
             for name in objectives.READS}
    for by_answer, (std, children), block in itertools.product(
            (False, True), (("on", "mean"), ("off", "sum")), (BLOCK, GROUP)):
        rule = partial(matched.credit, by_answer=by_answer)
        named[f"matched {'answer' if by_answer else 'message'} {std} {children} {block}"] = (
            rule, GRPOConfig(std=std, children=children), block)
    for name in ("rao", "own"):
        config = GRPOConfig(name, children="sum")
        named[f"{name} summed"] = getattr(objectives, name), config, BLOCK
    for std, children in itertools.product(("on", "off"), ("mean", "sum")):
        config = GRPOConfig(std=std, children=children)
        named[f"inherit {children} std {std}"] = grpo.credit, config, BLOCK
    for block in (2, 4, GROUP):
        named[f"inherit of {block}"] = grpo.credit, config, block
    return named


def given(trees: list[Rollout]) -> dict[Node, dict[str, tuple]]:
    """What each rule gives each node: {rule: (an advantage per message, weight)}."""
    result = defaultdict(dict)
    for name, (objective, config, block) in rules().items():
        blocks = [replace(tree, group=f"{tree.group} {i % GROUP // block}")
                  for i, tree in enumerate(trees)]
        for node, credit in objective(blocks, config).items():
            result[node][name] = credit.advantages, credit.weight
    return result


def chosen(trees: list[Rollout], roots: bool, most: int) -> list[tuple]:
    """(tree, node, message) of those that are sampled again."""
    result, rng = [], random.Random(0)
    for i, tree in enumerate(trees):
        if roots and i % 4 == 0 and tree.root.written:
            result.append((tree, tree.root, rng.randrange(tree.root.written)))
        nodes = [node for node in tree.root.walk() if node.sampled]
        for depth in range(1, 1 + max(node.depth for node in nodes)):
            there = [node for node in nodes if node.depth == depth]
            result += [(tree, node, 0) for node in rng.sample(there, min(most, len(there)))]
    return result


def main() -> None:
    parser = util.parser("What a node is worth, and what each rule of credit gives it.")
    parser.add_argument("out", help="file of lines that are added to")
    parser.add_argument("model", nargs="+")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--work", type=int, default=0, help="notes to sort")
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--exact", action="store_true")
    args = parser.parse_args()
    for path in args.model:
        args.model = path
        measure(args)


def measure(args) -> None:
    begun = time.process_time()
    model = rlm.RLM(args.model, batch=256)
    kind, config, tokens = tasks.load(model.config.task), model.config, None
    if args.work:
        notes.HERE, tokens = (args.work, args.work), round(4 * args.work * notes.NOTE_TOKENS)
        config = replace(config, max_nodes=args.work + 1)
    asked = [tasks.make(kind, random.Random(f"credit {i}"), tokens)
             for i in range(args.questions)]
    common = model.policy, model.tokenizer, config
    rlm.REPL = cached.Cached
    rlm.trees_at_once = lambda nodes: 512
    trees = asyncio.run(rlm.collect(rlm.jobs(asked, (0,), GROUP), *common))
    trees = [tree for tree in trees if not tree.failed]

    async def one(tree: Rollout, path: tuple | None, turn: int, number: int) -> tuple:
        return await replayed(tree, *common, ("again", number), path, turn)

    def replays(items: list[tuple]) -> list[tuple]:
        return asyncio.run(rlm.side_by_side(one, items, 512, ""))

    exact = 0
    if args.exact:
        rlm.REPL = repl.REPL
        at_once = trees_at_once(config.max_nodes)
        twins = asyncio.run(rlm.side_by_side(
            one, [(tree, None, 0, 0) for tree in trees], min(at_once, 32), ""))
    for tree, (twin, new) in zip(trees, twins if args.exact else ()):
        was, now = ([(node.path, node.ids, node.answer) for node in made.root.walk()]
                    for made in (tree, twin))
        exact += was == now and tree.reward == twin.reward and not new
    if args.exact:
        print(f"{args.model}: {exact} of {len(trees)} trees were replayed exactly", flush=True)
        return

    picked, credits = chosen(trees, not args.work, args.nodes), given(trees)
    made = replays([(tree, node.path, turn, n) for tree, node, turn in picked
                    for n in range(AGAIN)])
    with open(args.out, "a", encoding="ascii") as file:
        for i, (tree, node, turn) in enumerate(picked):
            again = [(new.reward, cost) for new, cost in made[i * AGAIN:(i + 1) * AGAIN]
                     if not new.failed]
            nodes = {other.path: other for other in tree.root.walk()}
            siblings = len(nodes[node.path[:-1]].children) if node.path else 0
            gives = {name: [advantages[turn], weight]
                     for name, (advantages, weight) in credits[node].items()}
            row = {"model": args.model, "work": args.work, "group": tree.group,
                   "path": node.path, "turn": turn, "siblings": siblings,
                   "nodes": len(nodes), "tokens": sum(n.sampled for n in nodes.values()),
                   "reward": tree.reward, "again": again, "rules": gives}
            print(json.dumps(row), file=file)
    print(args.model, args.work, f"{len(picked)} nodes of {len(trees)} trees, "
          f"{time.process_time() - begun:.0f} s of processor time", flush=True)


if __name__ == "__main__":
    main()
