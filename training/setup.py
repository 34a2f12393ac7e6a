"""What a run starts from: flags and files that are checked, a model, a sampler, trees.

`config` holds the flags, a train.Config. Without --model a tokenizer is trained on scripted
trees, and a tiny Qwen3 is made beside it.
"""
import asyncio
import gc
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch.optim import AdamW

import rlm
import tasks
import util
from engine import hf, parallel
from engine.device import DEVICE
from engine.parallel import World
from engine.plan import MOST_REQUESTS, Plan, free_memory, plan_of
from model import Decoder, DecoderConfig
from repl import Limits, REPLError
from rlm import RLMConfig
from sampler import Sampler
from tasks.questions import Questions
from tasks.scripts import saved_trees, script_policy
from tokenizer import Tokenizer
from training import checkpoint, settings
from training.run import Run, Start, State, resuming
from tree import Rollout, printable
from util import readable

# The model that is made without --model, and how its trees may grow.
TINY_MODEL = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                  num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                  max_position_embeddings=384, rope_theta=1e4)
TINY_RLM = RLMConfig(max_depth=1, max_turns=3, turn_tokens=64, window=384, max_nodes=7,
                     seconds=60.0, style="brief",
                     limits=Limits(seconds=5.0, output_chars=200))
TINY_VOCABULARY = 2048
TOKENIZER_TREES = 768
LORA_ALPHA = 32.0  # the adapters' product is multiplied by this over their rank


@dataclass(frozen=True)
class Setup:
    """What a run needs, all of it read and checked before a weight is."""
    config: Any
    run: Run
    plan: Plan
    start: Start
    questions: Questions
    score: Callable
    objective: Callable  # who is trained: grpo.credit, or another
    loss: Callable  # of a token: grpo.clipped_loss, or that of the objective
    tokenizer: Tokenizer
    rlm_config: RLMConfig
    saved: list[Rollout]  # trees that the warm-up imitates in place of scripts


def prepare(config: Any, world: World, objective: Callable, loss: Callable) -> Setup:
    """Read and check what the user gave, so that a typo leaves no directory; then what the
    checkpoint says. Prints what the run begins with, and with --plan all of it."""
    if config.plan and not config.model:
        raise ValueError("--plan needs --model; the tiny one fits anywhere")
    if config.card and not config.plan:
        raise ValueError("--card needs --plan: a run takes the device that is here")
    have = free_memory(world)
    width = 0
    if config.model and not config.resume:
        width = DecoderConfig.read(os.path.join(config.model, "config.json")).hidden_size
    config = settings.settle(config, width)
    score = util.load_function(config.reward, "score") if config.reward else tasks.reward
    kind = tasks.load(config.task, config.data)
    if not config.reward:
        util.function_of(kind, "score")
    questions = Questions(kind, config.data, config.seed, config.heldout,
                          config.eval_every > 0)
    run = Run(config, world)
    start = Start(config.model, State()) if config.plan else run.start()
    saved = []
    if run.state.phase == "warmup" and config.warmup not in ("", "scripts"):
        saved = saved_trees(config.warmup)
    if not start.weights:
        make_tiny(run, config, questions)
        world.gather(None)  # it can be read
        start = replace(start, weights=run.path("init"))

    tokenizer = Tokenizer.from_pretrained(start.source)
    shape = DecoderConfig.read(os.path.join(start.weights, "config.json"))
    changes = "" if start.checkpoint else config.rlm  # a checkpoint has them
    rlm_config = rlm.load_config(
        start.source, shape.max_position_embeddings, config.sandbox, changes)
    name = os.path.abspath(config.task) if util.is_path(config.task) else questions.name
    wanted = plan_of(config, Decoder.on_meta(shape), rlm_config, have)
    plan = wanted.fitted(world.size)
    rlm_config = replace(rlm_config, task=name, window=plan.window)
    setup = Setup(config, run, plan, start, questions, score, objective, loss,
                  tokenizer, rlm_config, saved)
    announce(setup, wanted)
    if not config.plan and not plan.fits(world.size):
        raise ValueError(f"the run does not fit into {readable(have)} of memory: take "
                         "--lora-rank 16, more devices or a smaller model; see --plan")
    return setup


def announce(setup: Setup, wanted: Plan) -> None:
    """What the run begins with, for people; with --plan also its questions, and the first
    as the model will read it."""
    config, plan, questions = setup.config, setup.plan, setup.questions
    if config.plan or plan != wanted:
        print(wanted.table())
    root = rlm.opened(questions.draw("grpo", 0), setup.tokenizer, setup.rlm_config)
    print(settings.opening(config, setup.rlm_config, plan))
    used = "does not fit" if root.end else f"takes {len(root.ids):,} of them"
    print(f"a window of {plan.window:,} tokens; the first prompt {used}")
    if config.plan:
        prompt = [f"--- {turn.role}\n{turn.text}" for turn in root.said]
        print(printable("\n".join([questions.described(), *prompt])))
    else:
        print(f"what is interrupted continues with: {resuming(config, setup.run.world)}")


def tiny_rlm(kind: ModuleType) -> RLMConfig:
    """TINY_RLM, with the changes that a kind of task makes: its TINY."""
    return rlm.changed(TINY_RLM, getattr(kind, "TINY", {}), "TINY")


def make_tiny(run: Run, config: Any, questions: Questions) -> None:
    """OUT/init, made from nothing and written by rank 0: a tokenizer trained on the
    conversations of scripted trees, and a small Qwen3 with random weights."""
    draws = [random.Random(f"tokenizer {i}") for i in range(TOKENIZER_TREES)]
    asked = (questions.playable[:TOKENIZER_TREES]
             or [tasks.make(questions.kind, rng) for rng in draws])
    rlm_config, path = tiny_rlm(questions.kind), run.path("init")
    trees = scripted_trees(asked, None, rlm_config, "tokenizer", run.world)
    if run.world.rank:
        return
    run.claim()
    texts = [f"{turn.role}\n{turn.text}" for tree in trees for node in tree.root.walk()
             for turn in node.turns]
    tokenizer = Tokenizer.train(texts, TINY_VOCABULARY)
    torch.manual_seed(config.seed)
    model = Decoder(DecoderConfig(vocab_size=tokenizer.vocab_size, **TINY_MODEL))
    model.save_pretrained(path)
    tokenizer.save(path)
    rlm_config.save(os.path.join(path, "rlm.json"))


def load(start: Start, setup: Setup, adapters: bool) -> tuple[Decoder, AdamW]:
    """This rank's share of the weights, and the optimizer as far as it is saved."""
    config, plan = setup.config, setup.plan

    def with_adapters(model: Decoder) -> None:
        if adapters:
            model.add_lora(config.lora_rank, LORA_ALPHA, config.seed)
        parallel.shard(model, plan.dtype)

    gc.collect()  # weights that were in use before are in reference cycles
    stored = plan.dtype if adapters else torch.float32
    model = Decoder.from_pretrained(start.weights, stored, DEVICE, with_adapters)
    model.recompute_above = plan.recompute_above
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    # Fused: the other kinds hold temporary copies of all weights.
    optimizer = AdamW(
        trained, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    if start.adapter:
        hf.load_adapter(model, start.adapter, start.weights)
    if start.optimizer:
        checkpoint.load_optimizer(model, optimizer, start.optimizer)
    return model, optimizer


def make_sampler(setup: Setup, model: Decoder) -> Sampler:
    """A copy with merged adapters is faster than the adapters beside the weights."""
    plan = setup.plan
    return Sampler(model, memory=plan.need(setup.run.world.size)["KV cache"],
                   batch=MOST_REQUESTS[plan.device], window=plan.window, dtype=plan.dtype,
                   copy=setup.config.lora_rank > 0 and not plan.apart)


def reference_of(setup: Setup) -> Decoder | None:
    """The policy that GRPO started from, for a KL term. With adapters it is the model with
    its adapters off, so nothing is loaded."""
    if not setup.config.kl or setup.config.lora_rank:
        return None
    def frozen(model: Decoder) -> None:
        model.requires_grad_(False)
        parallel.shard(model, setup.plan.dtype)

    return Decoder.from_pretrained(
        setup.run.path("warmup"), setup.plan.dtype, DEVICE, frozen)


def scripted_trees(asked: list[tasks.Task], tokenizer: Tokenizer | None,
                   rlm_config: RLMConfig, seed: int | str,
                   world: World) -> list[Rollout]:
    """One tree per question. A script takes the place of the policy, all else is as in
    GRPO, with real REPLs. If a tree may have one node only, its scripts call nobody."""
    policy = script_policy(asked, tokenizer, seed, alone=rlm_config.max_nodes == 1)
    return grown(rlm.jobs(asked), world, lambda jobs: rlm.collect(
        jobs, policy, tokenizer, rlm_config, at_once=32, label="scripts"))


def grown(jobs: list[rlm.Job], world: World, collect: Callable) -> list[Rollout]:
    """The tree of each job. Each rank grows its share, then all ranks have the same trees.
    Raises REPLError if every one of them is lost.

    A share is neighbours in the list: two ranks that have trees of the same question both
    compute its prompt."""
    first, end = (len(jobs) * rank // world.size for rank in (world.rank, world.rank + 1))
    rollouts = asyncio.run(collect(jobs[first:end]))
    # Every rank knows the questions, so only the trees are exchanged.
    share = [(tree.root, tree.reward, tree.failed) for tree in rollouts]
    trees = [tree for part in world.gather(share) for tree in part]
    rollouts = [Rollout(job.task, job.group, *tree)
                for job, tree in zip(jobs, trees, strict=True)]
    if all(rollout.failed for rollout in rollouts):
        raise REPLError(f"every tree was lost: {rollouts[0].failed}")
    return rollouts
