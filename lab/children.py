"""Objectives of train.py that watch children: do they learn, or get worse?

    START=RUN/warmup python train.py --objective lab/children.py --credit inherit \
        --model RUN/warmup --warmup-steps 0 --steps 101

After every ten updates a line of JSON: the score of trees, and what children do that roots
of the model in $START ask. With --objective lab/children.py:frozen all children of the run
are sampled from the weights in $START.
"""
import json
import os
from collections.abc import Callable
from functools import cache, partial
from statistics import fmean

import grpo
import rlm
import tasks
from grpo import reads
from tasks.questions import heldout_tasks

EVERY = int(os.environ.get("EVERY", 10))  # steps
QUESTIONS = int(os.environ.get("QUESTIONS", 64))  # held out, the same each time


@cache
def start() -> Callable:
    return rlm.RLM(os.environ["START"], batch=96).policy


def apart(roots: Callable, children: Callable) -> Callable:
    """A policy: one for roots, another for all nodes below."""
    async def policy(node, max_tokens: int, key: tuple):
        return await (children if node.path else roots)(node, max_tokens, key)

    return policy


async def collect(stay: bool, asked, policy, tokenizer, config, key, *rest, **more):
    children = start() if stay else policy
    whole = apart(policy, children)
    if key[-1] % EVERY == 0:
        grow = partial(rlm.collect, heldout_tasks(QUESTIONS, tasks.load(asked[0].kind)))
        trees = await grow(whole, tokenizer, config, ("watched",))
        fixed = await grow(apart(start(), children), tokenizer, config, ("watched",))
        nodes = [child for tree in fixed for child in tree.root.children]
        p = [p for n in nodes for t in n.turns if t.sampled for p in t.logprobs]
        print(json.dumps({
            "step": key[-1], "score": fmean(tree.reward for tree in trees),
            "children": len(nodes), "right": fmean(n.score or 0.0 for n in nodes),
            "looked": fmean(n.written > 1 for n in nodes), "entropy": -fmean(p),
            "tokens": fmean(n.sampled for n in nodes)}), flush=True)
    return await rlm.collect(asked, whole, tokenizer, config, key, *rest, **more)


@reads("credit", "children", "length", "std")
def credit(rollouts, config):
    return grpo.credit(rollouts, config)


@reads("credit", "children", "length", "std")
def frozen(rollouts, config):
    return grpo.credit(rollouts, config)


credit.collect = partial(collect, False)
frozen.collect = partial(collect, True)
