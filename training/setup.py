"""What a run starts from: flags and files that are checked, a model, a sampler, trees.

Without --model a tokenizer is trained on scripted trees, and a tiny Qwen3 is made beside
it.
"""
import asyncio
import gc
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch.optim import AdamW

import tasks
import util
from config import RLMConfig, changed, load_config, trained_task
from engine import hf, parallel
from engine.device import DEVICE
from engine.parallel import World
from engine.plan import MOST_REQUESTS, Plan, free_memory, plan_of
from model import Decoder, DecoderConfig
from repl import Limits
from rlm import Growth
from sampler import Sampler
from training.questions import Questions
from training.scripts import saved_trees, script_policy
from tokenizer import Tokenizer
from training import checkpoint, settings
from training.run import State, claim, starting_state, frozen, resuming, weights_of
from training.settings import Config, Defaults
from training.trees import collect
from tree import Tree, printable
from util import readable

# The model that is made without --model, and how its trees may grow.
TINY_MODEL = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                  num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                  max_position_embeddings=384, rope_theta=1e4)
TINY_RLM = RLMConfig(max_depth=1, max_turns=3, turn_tokens=64, window=384, max_nodes=7,
                     tree_seconds=60.0, style="brief",
                     limits=Limits(seconds=5.0, output_chars=200))
TINY_VOCABULARY = 2048
TOKENIZER_TREES = 768
LORA_ALPHA = 32.0  # the adapters' product is multiplied by this over their rank


@dataclass(frozen=True)
class Setup:
    """What never changes in a run: all of it is read and checked before a weight is."""
    config: Config
    world: World
    began: float  # when the program did, by time.monotonic
    questions: Questions
    reward: Callable | None  # in place of the task's score
    objective: Callable  # who is trained: grpo.credit, or another
    loss: Callable  # of a token: grpo.clipped_loss, or that of the objective
    tracker: Callable | None  # what gets each row of metrics.jsonl; on rank 0
    plan: Plan
    defaults: Defaults  # what no flag says
    tokenizer: Tokenizer
    rlm_config: RLMConfig
    saved: list[Tree]  # trees that the warm-up imitates in place of scripts


def prepare(config: Config, world: World, objective: Callable,
            loss: Callable) -> tuple[Setup, State]:
    """Read and check what the user gave, so that a typo leaves no directory; then what the
    checkpoint says. Returns what never changes, and the state that the run begins with.
    Prints what that is, and with --plan all of it."""
    began = time.monotonic()
    if config.plan and not config.model:
        raise ValueError("--plan needs --model; the tiny one fits anywhere")
    if config.card and not config.plan:
        raise ValueError("--card needs --plan: a run takes the device that is here")
    if config.updates > config.questions:
        raise ValueError("--updates above --questions: each is of a question at least")
    have = free_memory(world)
    width = 0
    if config.model and not config.resume:
        width = DecoderConfig.read(os.path.join(config.model, "config.json")).hidden_size
        if not (config.task or config.data):
            trained_on = trained_task(load_config(config.model))
            config = replace(config, task=trained_on)
    config = settings.filled_in(config, width)
    reward = util.load_function(config.reward, "score(question, answer, root)")
    # On other ranks the file is not even loaded.
    tracker = util.load_function("" if world.rank else config.tracker, "log(row)")
    task = tasks.load(config.task, config.data)
    util.function_of(task, "score")
    if config.objective == "own" and not hasattr(task, "part_score"):
        raise ValueError(f"--objective own: {task.__file__} has no function part_score")
    questions = Questions(task, config.data, config.seed, config.heldout,
                          config.eval_every > 0)
    state = State() if config.plan else starting_state(config, world)
    saved = []
    if state.phase == "warmup" and config.warmup not in ("", "scripts"):
        saved = saved_trees(config.warmup)
    if not state.checkpoint and not config.model:
        make_tiny(config, questions, world)
        world.gather(None)  # it can be read

    weights = weights_of(config, state)
    source = state.checkpoint or weights  # of tokenizer and rlm.json
    tokenizer = Tokenizer.from_pretrained(source)
    shape = DecoderConfig.read(os.path.join(weights, "config.json"))
    positions = shape.max_position_embeddings
    rlm_file = "" if state.checkpoint else config.rlm  # a checkpoint has them
    is_shown = config.model and config.warmup == "scripts" and config.warmup_steps
    suited = getattr(task, "AFTER_SCRIPTS", {}) if is_shown else {}
    rlm_config = load_config(source, positions, config.sandbox, rlm_file, suited)
    name = os.path.abspath(config.task) if util.is_path(config.task) else questions.name
    wanted = plan_of(config, Decoder.on_meta(shape), rlm_config, have)
    plan = wanted.fitted(world.size)
    rlm_config = replace(rlm_config, task=name, window=plan.window)
    defaults = settings.defaults(shape.hidden_size)
    setup = Setup(config, world, began, questions, reward, objective, loss, tracker, plan,
                  defaults, tokenizer, rlm_config, saved)
    print_start(setup, wanted)
    if not config.plan and not plan.fits(world.size):
        raise ValueError(f"the run does not fit into {readable(have)} of memory: take "
                         "--lora-rank 16, more devices or a smaller model; see --plan")
    return setup, state


def print_start(setup: Setup, wanted: Plan) -> None:
    """What the run begins with, for people; with --plan also its questions, and the first
    as the model will read it."""
    config, plan, questions = setup.config, setup.plan, setup.questions
    if config.plan or plan != wanted:
        print(wanted.described())
    root = Growth(questions.draw("grpo", 0), None, setup.tokenizer, setup.rlm_config).root
    print(settings.described(config, setup.rlm_config, plan))
    used = "does not fit" if root.end else f"takes {len(root.ids):,} of them"
    print(f"a window of {plan.window:,} tokens; the first prompt {used}")
    if config.plan:
        prompt = [f"--- {message.role}\n{message.text}" for message in root.conversation]
        print(printable("\n".join([questions.described(), *prompt])))
    else:
        print(f"what is interrupted continues with: {resuming(config, setup.world)}")


def tiny_rlm(task: ModuleType) -> RLMConfig:
    """TINY_RLM, with the changes that a task makes: its TINY."""
    return changed(TINY_RLM, getattr(task, "TINY", {}), "TINY")


def make_tiny(config: Config, questions: Questions, world: World) -> None:
    """OUT/init, made from nothing and written by rank 0: a tokenizer trained on the
    conversations of scripted trees, and a small Qwen3 with random weights."""
    draws = [random.Random(f"tokenizer {i}") for i in range(TOKENIZER_TREES)]
    asked = (questions.playable[:TOKENIZER_TREES]
             or [tasks.make(questions.task, rng) for rng in draws])
    rlm_config, path = tiny_rlm(questions.task), os.path.join(config.out, "init")
    trees = scripted_trees(asked, None, rlm_config, "tokenizer", world)
    if world.rank:
        return
    claim(config)
    texts = [f"{message.role}\n{message.text}" for tree in trees
             for node in tree.root.walk() for message in node.messages]
    tokenizer = Tokenizer.train(texts, TINY_VOCABULARY)
    torch.manual_seed(config.seed)
    model = Decoder(DecoderConfig(vocab_size=tokenizer.vocab_size, **TINY_MODEL))
    model.save_pretrained(path)
    tokenizer.save(path)
    rlm_config.save(os.path.join(path, "rlm.json"))


def load(setup: Setup, state: State) -> tuple[Decoder, AdamW]:
    """This rank's share of the weights, and the optimizer as far as it is saved. Random
    weights are trained whole in the warm-up, also with --lora-rank."""
    config, plan, weights = setup.config, setup.plan, weights_of(setup.config, state)
    adapters = config.lora_rank > 0 and (config.model != "" or state.phase == "grpo")

    def with_adapters(model: Decoder) -> None:
        if adapters:
            model.add_lora(config.lora_rank, LORA_ALPHA, config.seed)
        parallel.shard(model, plan.dtype)

    gc.collect()  # weights that were in use before are in reference cycles
    stored = plan.dtype if adapters else torch.promote_types(plan.dtype, torch.float32)
    model = Decoder.from_pretrained(weights, stored, DEVICE, with_adapters)
    model.recompute_above = plan.recompute_above
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    # Fused: the other kinds hold temporary copies of all weights.
    optimizer = AdamW(
        trained, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    adapter = os.path.join(state.checkpoint, "adapter")
    moments = os.path.join(state.checkpoint, "optimizer")
    if state.checkpoint and os.path.isdir(adapter):
        hf.load_adapter(model, adapter)
    if state.checkpoint and os.path.isdir(moments):
        checkpoint.load_optimizer(model, optimizer, moments)
    return model, optimizer


def make_sampler(setup: Setup, model: Decoder) -> Sampler:
    """A copy with merged adapters is faster than the adapters beside the weights."""
    plan = setup.plan
    return Sampler(model, memory=plan.need(setup.world.size)["KV cache"],
                   batch=MOST_REQUESTS[plan.device], window=plan.window, dtype=plan.dtype,
                   copy=setup.config.lora_rank > 0 and not plan.unmerged)


def reference_of(setup: Setup, state: State) -> Decoder | None:
    """The policy that GRPO started from, for a KL term. With adapters it is the model with
    its adapters off, so nothing is loaded."""
    if not setup.config.kl or setup.config.lora_rank:
        return None

    def prepared(model: Decoder) -> None:
        model.requires_grad_(False)
        parallel.shard(model, setup.plan.dtype)

    return Decoder.from_pretrained(
        frozen(setup.config, state), setup.plan.dtype, DEVICE, prepared)


def scripted_trees(asked: list[tasks.Question], tokenizer: Tokenizer | None,
                   rlm_config: RLMConfig, seed: int | str,
                   world: World) -> list[Tree]:
    """One tree per question. A script takes the place of the policy, all else is as in
    GRPO, with real REPLs. If a tree may have one node only, its scripts call nobody."""
    policy = script_policy(asked, tokenizer, seed, alone=rlm_config.max_nodes == 1)
    return asyncio.run(collect(
        asked, policy, tokenizer, rlm_config, world=world, at_once=32, label="scripts"))
