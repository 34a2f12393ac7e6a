"""Train a recursive language model: `python train.py`, nothing else needed.

1. A warm-up, supervised on scripted trees. Good and bad strategies are mixed on purpose:
   the policy learns the syntax of its REPL, but not what to do with it.
2. GRPO: only the root's answer is rewarded, and every child inherits its root's advantage.
3. Evaluations on held-out questions: before GRPO, after it, and then on longer contexts.

Without --model a tokenizer is trained, and a tiny Qwen3 is initialised and saved like any
checkpoint. The same code trains it and a downloaded model.

All random numbers are drawn from (seed, phase, step), so a resumed run draws the same ones.
With --lora-rank adapters are trained, in the warm-up too. But the warm-up of a model made
from nothing trains all weights: adapters beside random weights learn nothing.

`torchrun --nproc-per-node N train.py ...` is the same run on N devices. Each rank samples
its share of a step's trees. The nodes of all trees are then divided among the ranks for the
update.

Left out: asynchronous sampling, a learning rate found by search, more than one task in a
run. Tried (commit 74f9631): older policies in each group, groups without signal drawn
again, float16 with a scaled loss; none was better.
"""
import asyncio
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable

import engine  # noqa: F401  before torch: it says how torch's threads wait

import torch
from torch.optim import AdamW
from tqdm import trange

import grpo
import util
from engine import packing
from engine.device import DEVICE
from engine.parallel import World, full_tensor
from grpo import Sequence, policy_loss
from model import Decoder
from prompts import opening
from repl import REPLError
from rlm import local_policy
from sampler import Sampler
from tasks import Question
from training import settings
from training.metrics import Watch, of_steps, shares, shorten
from training.run import Run, State, flags_of_run, resuming
from training.scores import WHAT_HELPS
from training.settings import GROUPS, Config
from training.setup import (Setup, load, make_sampler, prepare, reference_of,
                            scripted_trees)
from training.trees import EVERY_SECONDS, collect
from tree import Node, Tree
from util import read_flags

SILENT_STEPS = 10  # steps without any signal, after which GRPO ends
NOTHING_LEARNT = (
    f"no step had an advantage: all trees of a question scored alike. {WHAT_HELPS}")


def main() -> None:
    world, config = World(), Config()
    try:
        config = read_flags(
            "Train a recursive language model.", Config, GROUPS, flags_of_run)
        train(config, world)
        world.close()
    except (OSError, ValueError, FloatingPointError, REPLError) as error:
        if util.is_theirs(error):
            raise
        rank = f"rank {world.rank}: " if world.size > 1 else ""
        if world.rank and isinstance(error, FileNotFoundError) and config.out in str(error):
            rank += "all hosts need one directory --out: "
        sys.exit(f"train.py: {rank}{error}")
    except KeyboardInterrupt:
        sys.exit(f"train.py: interrupted; continue with: {resuming(config, world)}")


def train(config: Config, world: World) -> None:
    """One run: the warm-up and GRPO, with an evaluation after each. With --plan it only
    prints what the run needs: no weights are read, and nothing is written."""
    setup, state = prepare(config, world, *objective_of(config))
    if config.plan:
        return
    run = warm_up(setup, state) if state.phase == "warmup" else None
    model, optimizer = load(setup, state)
    run = run or Run(setup, state)  # it writes, now that everything was read
    sampler = make_sampler(setup, model)

    if "heldout_warmup" not in state.results:
        evaluate(run, model, sampler, "heldout_warmup", setup.questions.heldout)
    grpo_loop(run, model, optimizer, reference_of(setup, state), sampler)
    run.save_checkpoint(model, optimizer)
    run.save_model(model, "final")
    evaluate(run, model, sampler, "heldout_final", setup.questions.heldout)
    for name, longer in setup.questions.longer.items():
        evaluate(run, model, sampler, name, longer)
    run.finish()
    if state.silent == state.step > 0:
        raise ValueError(NOTHING_LEARNT)


def objective_of(config: Config) -> tuple[Callable, Callable]:
    """grpo.credit, one of baselines/objectives.py, or the function of a file; and the loss,
    which a file may bring, too. Raises ValueError for an unknown name, and for a switch
    that such a name does not read."""
    objective, loss = grpo.credit, grpo.clipped_loss
    if util.is_path(config.objective):
        objective = util.load_function(config.objective, "credit(trees, config)")
        path, _ = util.split_path(config.objective)
        if hasattr(util.load_file(path), "loss"):
            loss = util.load_function(path, "loss(logprobs, ratio, pack, config)")
    elif config.objective != "grpo":
        from baselines import objectives

        if config.objective not in objectives.NAMES:
            raise ValueError(f"objective is {config.objective!r}; it can be grpo, "
                             f"{', '.join(objectives.NAMES)} or path/to/file.py")
        objectives.check_switches(config)
        objective = getattr(objectives, config.objective)
    return objective, loss


# ------------------------------------------------------------------------------------------
# The warm-up

def warm_up(setup: Setup, state: State) -> Run:
    """Supervised steps on what scripts, or a saved policy, wrote. They leave OUT/warmup.
    Returns the run that they begin."""
    config, steps = setup.config, setup.config.warmup_steps
    nodes = warm_up_nodes(setup) if state.step < steps else []
    model, optimizer = load(setup, state)
    run = Run(setup, state)
    printed_at = time.monotonic()
    bar = trange(state.step, steps, initial=state.step, total=steps, desc="warm-up",
                 disable=None)
    for step in bar:
        rng = random.Random(f"{config.seed} warmup rows {step}")
        batch = rng.choices(nodes, k=setup.defaults.warmup_nodes)
        loss = imitate(batch, setup, model)
        rising = min(9 * (step + 1) / steps, 1.0)  # over a ninth of the steps
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))  # falls from 1 to 0
        lr = config.warmup_lr * rising * (0.05 + 0.95 * cosine)
        optimizer_step(model, optimizer, lr, loss, setup.defaults.max_norm)
        state.step += 1

        last = state.step == steps
        if step % 10 == 0 or last:
            bar.set_postfix(loss=f"{loss:.3f}")
            run.log({"phase": "warmup", "step": state.step, "loss": loss})
        if time.monotonic() - printed_at > EVERY_SECONDS or last:
            printed_at = time.monotonic()
            bar.write(f"warm-up {state.step:4}/{steps} | loss {loss:.3f} | "
                      f"{run.elapsed():.0f} s", file=sys.stdout)
        run.maybe_save(model, optimizer, every=1 if last else 100)
    run.end_warm_up(model)
    return run


def imitate(nodes: list[Node], setup: Setup, model: Decoder) -> float:
    """The gradient of the mean of -log p over the sampled tokens of the nodes. Returns that
    mean."""
    sequences = [Sequence(node.ids, node.mask, [], [], 1) for node in nodes]
    tokens = sum(node.sampled for node in nodes)
    total = 0.0
    for pack in packing.packs(sequences, setup.plan.pack_size, setup.world, DEVICE):
        logprobs, _ = model.logprobs(pack)
        loss = -logprobs.sum() / tokens
        (loss * setup.world.size).backward()  # FSDP averages over the ranks
        total += loss.item()
    return sum(setup.world.gather(total))


def warm_up_nodes(setup: Setup) -> list[Node]:
    """What the warm-up imitates: the nodes of the saved trees, encoded anew, or of trees of
    scripts. Raises ValueError if none fits into the window."""
    config, plan, trees = setup.config, setup.plan, setup.saved
    system, *_ = opening(Node(), "", "", setup.questions.task, setup.rlm_config)
    others = sum(tree.root.messages[0].text != system for tree in trees)
    if others:
        print(f"{others} of {len(trees)} saved trees have a system prompt that this "
              "run will not use")
    for node in [node for tree in trees for node in tree.root.walk()]:
        node.messages = setup.tokenizer.encode_messages(node.messages, node.example)
    if not trees:
        count = config.warmup_steps * setup.defaults.warmup_nodes
        count = min(count, settings.SCRIPTED)
        asked = [setup.questions.draw("warmup", i) for i in range(count)]
        trees = scripted_trees(
            asked, setup.tokenizer, setup.rlm_config, config.seed, setup.world)
        trees = [tree for tree in trees if not tree.failed]
    nodes = [node for tree in trees for node in tree.root.walk()]
    fit = [node for node in nodes if node.sampled and len(node.ids) <= plan.window]
    reward = statistics.fmean(tree.reward for tree in trees)
    print(f"warm-up: {len(trees)} trees, mean reward {reward:.3f}; {len(fit)} of their "
          f"{len(nodes)} nodes are imitated, the others sampled nothing or do not fit into "
          f"{plan.window:,} tokens; nodes ended with "
          f"{shares(dict(Counter(node.end for node in nodes).most_common()))}")
    if not fit:
        raise ValueError("no node of the warm-up fits")
    return fit


# ------------------------------------------------------------------------------------------
# GRPO

def grpo_loop(run: Run, model: Decoder, optimizer: AdamW, reference: Decoder | None,
              sampler: Sampler) -> None:
    """Steps of GRPO until --steps or --tokens are reached, or nothing is left to learn."""
    setup, state = run.setup, run.state
    config, questions = setup.config, setup.questions

    while progress(config, state) < 1 and state.silent < SILENT_STEPS:
        began, model_began = time.monotonic(), sampler.stats["seconds"]
        first = state.step * config.questions
        asked = [questions.draw("grpo", first + i) for i in range(config.questions)]
        key = config.seed, state.step
        trees = sample_trees(setup, model, sampler, asked, key, "trees", config.group)
        in_model = sampler.stats["seconds"] - model_began
        in_trees = time.monotonic() - began
        credits = grpo.credits_of(setup.objective, trees, config)
        batches = [grpo.make_sequences(part, credits, config)
                   for part in grpo.minibatches(trees, config)]
        measured = update(run, model, optimizer, reference, batches)
        measured |= {"sample_s": in_model, "repl_s": max(0.0, in_trees - in_model),
                     "update_s": time.monotonic() - began - in_trees}
        sequences = sum(batches, [])

        state.step += 1
        state.sampled += sum(node.sampled for tree in trees for node in tree.root.walk())
        signal = any(any(sequence.advantages) for sequence in sequences)
        state.silent = 0 if signal else state.silent + 1
        run.log_step(trees, credits, sequences, measured)
        if config.eval_every and state.step % config.eval_every == 0:
            reward = evaluate(run, model, sampler, "validation", questions.validation)
            if reward > state.best:
                state.best = reward
                run.save_model(model, "best")
        run.maybe_save(model, optimizer)
    if state.silent == SILENT_STEPS:
        print(f"stopped: in the last {SILENT_STEPS} steps no node had an advantage")


def update(run: Run, model: Decoder, optimizer: AdamW, reference: Decoder | None,
           batches: list[list[Sequence]]) -> dict:
    """One optimizer step per batch of sequences that has any. A step that makes the policy
    forget is shortened. Returns what was measured."""
    setup = run.setup
    config, world, lr = setup.config, setup.world, learning_rate(setup.config, run.state)
    batches = [sequences for sequences in batches if sequences]
    packs_of = [[grpo.with_references(pack, config, model, reference)  # before any step
                 for pack in packing.packs(sequences, setup.plan.pack_size, world, DEVICE)]
                for sequences in batches]
    steps = []
    for sequences, packs in zip(batches, packs_of):
        watch = Watch(model, sequences, setup)
        for pack in packs:
            logprobs, entropy = model.logprobs(pack)
            loss, per_token = policy_loss(logprobs, entropy, pack, config, setup.loss)
            (loss * world.size).backward()  # FSDP averages over the ranks
            watch.note(pack, logprobs, loss, per_token)
        norm = optimizer_step(model, optimizer, lr, watch.loss(), setup.defaults.max_norm)
        steps.append((watch.sums, norm, *shorten(optimizer, watch.forgot)))
    return {"lr": lr} | of_steps(steps)


def sample_trees(setup: Setup, model: Decoder, sampler: Sampler, asked: list[Question],
                 key: tuple, label: str, group: int = 1) -> list[Tree]:
    """`group` trees per question, with the weights as they are now."""
    sampler.load(model)
    policy = local_policy(sampler, setup.tokenizer)
    return asyncio.run(collect(
        asked, policy, setup.tokenizer, setup.rlm_config, key, group, setup.world,
        label=label, reward=setup.reward))


def evaluate(run: Run, model: Decoder, sampler: Sampler, name: str,
             asked: list[Question]) -> float:
    """The mean reward of one tree per question, kept under this name."""
    key = run.setup.config.seed, name
    return run.log_scores(name, sample_trees(run.setup, model, sampler, asked, key, name))


def progress(config: Config, state: State) -> float:
    """0 before the first step of GRPO, 1 when --steps or --tokens are reached."""
    by_steps = state.step / config.steps if config.steps else 1.0
    by_tokens = state.sampled / config.tokens if config.tokens else 0.0
    return max(by_steps, by_tokens)


def learning_rate(config: Config, state: State) -> float:
    """Rises over the first five steps, then falls linearly to a tenth."""
    rising = min(1.0, (state.step + 1) / 5)
    return config.lr * rising * (1 - 0.9 * progress(config, state))


def optimizer_step(model: Decoder, optimizer: AdamW, lr: float, loss: float,
                   max_norm: float) -> float:
    """Clip the gradient, step, clear it. Returns its norm before clipping. Raises
    FloatingPointError before a NaN gets into the weights."""
    weights = [w for w in model.parameters() if w.grad is not None]
    norm = full_tensor(torch.nn.utils.clip_grad_norm_(weights, max_norm)).item()
    if not math.isfinite(loss) or not math.isfinite(norm):
        raise FloatingPointError(
            f"the loss is {loss}, the gradient's norm {norm}: not finite. The last "
            "checkpoint is intact; a lower learning rate may help")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


if __name__ == "__main__":
    main()
