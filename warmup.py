"""What a run starts from: a tiny model made from nothing, and trees to learn the syntax from.

The trees are scripted (tasks.py has the scripts, good and bad ones mixed on purpose) and run
through the real REPL and the real rollout; or a teacher's, saved by eval.py. The supervised steps
themselves are in train.py.
"""
import asyncio
import os
import random
from dataclasses import replace

import torch
from tqdm import tqdm

import rlm
import tasks
from model import Qwen3, Qwen3Config
from repl import Limits
from rlm import RLMConfig
from tokenizer import Tokenizer
from tree import Completion, Rollout, read_rollouts

# The tiny model and how its trees may grow; a checkpoint brings both in config.json and rlm.json.
TINY_VOCABULARY = 640
TINY = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=384, rope_theta=10_000.0)
TINY_RLM = RLMConfig(max_depth=1, max_turns=3, turn_tokens=64, window=384, max_nodes=7,
                     tree_tokens=1500, seconds=60.0, style="brief",
                     limits=Limits(seconds=5.0, output_chars=200))
# deep: a node has one message with room for one call, to two children at most, and a window
# that a paragraph fits into, but not two.
TINY_DEEP = replace(TINY_RLM, max_depth=2, max_turns=1, turn_tokens=24, window=64, max_nodes=15,
                    limits=replace(TINY_RLM.limits, queries=2))


def tiny_rlm(kind: str) -> RLMConfig:
    return TINY_DEEP if kind == "deep" else TINY_RLM


def make_tiny(path: str, seed: int, questions: list[tasks.Task] | None,
              kind: str = "evidence") -> str:
    """A checkpoint made from nothing: a tokenizer trained on scripted trees and their papers, and
    a small Qwen3 with random weights."""
    some = (questions or [tasks.make_task(kind, random.Random(f"tokenizer {i}"))
                          for i in range(192)])[:192]
    config = tiny_rlm(kind)
    trees = demonstrations(some, None, config, seed="tokenizer")
    texts = [f"{turn.role}\n{turn.text}" for r in trees for node in r.root.walk()
             for turn in node.turns]
    tokenizer = Tokenizer.train(texts, TINY_VOCABULARY)
    torch.manual_seed(seed)
    model = Qwen3(Qwen3Config(vocab_size=tokenizer.vocab_size, **TINY))
    model.save_pretrained(path)
    tokenizer.save(path)
    config.save(os.path.join(path, "rlm.json"))
    return path


def demonstrations(questions: list[tasks.Task], tokenizer: Tokenizer | None, config: RLMConfig,
                   seed, degenerate: str = "") -> list[Rollout]:
    """Scripted trees, run through the real REPL and the real rollout: what is learnt is what
    will be executed. A tree's scripts are drawn from (seed, its number); with `degenerate` every
    second tree does that instead."""
    async def policy(node, max_tokens, key):
        number = key[-3]
        task = questions[number]
        text = (tasks.degenerate_script(degenerate, task, node) if degenerate and number % 2
                else tasks.demonstrate(task, node, (seed, number)))
        ids = [*tokenizer.encode(text), tokenizer.end_of_turn] if tokenizer else []
        return Completion(text, tuple(ids), (0.0,) * len(ids))

    with tqdm(total=len(questions), desc="scripts", leave=False, disable=None) as bar:
        return asyncio.run(rlm.collect(questions, policy, tokenizer, config, (), at_once=32,
                                       on_done=lambda _: bar.update()))


def teacher_trees(path: str, score: float, tokenizer: Tokenizer) -> list[Rollout]:
    """The saved trees fit to learn from: an answer, no REPL error anywhere, a reward above
    `score`; with ids of this tokenizer. Raises ValueError if there are none."""
    saved = read_rollouts(path, tasks.Task)
    trees = [r for r in saved if not r.failed and r.reward > score and r.root.end == "final"
             and not any(node.errors for node in r.root.walk())]
    if not trees:
        raise ValueError(f"{path}: none of its {len(saved)} trees ended with an answer, without an "
                         f"error, with a reward above {score:g}")
    print(f"{path}: {len(trees)} of {len(saved)} trees are fit to learn from")
    for r in trees:
        rlm.encode_tree(r.root, tokenizer)
    return trees
