"""Children that stay as they were: do they not learn when only roots are trained, or do
they get worse?

    FROZEN=RUN/warmup python train.py --objective lab/frozen.py --credit root \
        --model RUN/warmup --warmup-steps 0
    python -m lab.frozen ROOTS,CHILDREN ROOTS,CHILDREN ...       directories of models

The first trains roots, whose children are sampled from the weights in $FROZEN. The second
prints the held-out score on `notes` of roots of one model with children of another.
"""
import asyncio
import os
import statistics
import sys
from collections.abc import Callable
from functools import cache

import runtime.threads  # before torch: it says how torch's threads wait

import grpo
import rlm
import tasks
from grpo import reads
from tasks.questions import heldout_tasks


def apart(roots: Callable, children: Callable) -> Callable:
    """A policy: one for roots, another for all nodes below."""
    async def policy(node, max_tokens: int, key: tuple):
        return await (children if node.path else roots)(node, max_tokens, key)

    return policy


@cache
def frozen() -> Callable:
    return rlm.RLM(os.environ["FROZEN"], batch=96).policy


@reads("credit", "children", "length", "std")
def credit(rollouts, config):
    return grpo.credit(rollouts, config)


async def collect(asked, policy, *rest, **more):
    return await rlm.collect(asked, apart(policy, frozen()), *rest, **more)


credit.collect = collect


def main() -> None:
    print("| roots, children | score | children that read | tokens of a child |")
    print("|---|---|---|---|")
    for pair in sys.argv[1:]:
        roots, children = (rlm.RLM(path, batch=96) for path in pair.split(","))
        trees = asyncio.run(rlm.collect(
            heldout_tasks(128, tasks.load("notes")),
            apart(roots.policy, children.policy), roots.tokenizer, roots.config,
            (0, "heldout")))
        nodes = [child for tree in trees for child in tree.root.children]
        # It looks at its note in its first message, and answers in its second.
        read = statistics.fmean(sum(t.sampled for t in n.turns) > 1 for n in nodes)
        score = statistics.fmean(tree.reward for tree in trees)
        tokens = statistics.fmean(node.sampled for node in nodes)
        print(f"| {pair} | {score:.3f} | {read:.3f} | {tokens:.1f} |", flush=True)


if __name__ == "__main__":
    main()
