"""Train a recursive language model: `python train.py`, nothing else needed.

1. A warm-up, supervised on scripted rollouts. Good and bad strategies are mixed on purpose:
   the policy learns the syntax of its REPL, but not what to do with it.
2. GRPO: only the root's answer is rewarded, and every child inherits its root's advantage.
3. A held-out evaluation before GRPO and after it, on questions never seen; after it also on
   longer contexts, where the task has them.

Without --model a tokenizer is trained, and a tiny Qwen3 is initialised and saved like any
checkpoint. All that follows is the same code for it and for a downloaded one.

All random numbers are drawn from (seed, phase, step), so a resumed run continues with the
same ones. With --lora-rank the warm-up still trains all weights; then they are frozen, and
GRPO trains adapters. So the model without its adapters is the one that GRPO started from.

`torchrun --nproc-per-node N train.py ...` is the same run on N devices. Each rank samples
its share of a step's questions; for the update, the nodes of all trees are divided among
the ranks (runtime/parallel.py). runtime/run.py says what a run writes. """
import asyncio
import gc
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import runtime.threads  # before torch: it says how torch's threads wait

import torch
from tqdm import tqdm, trange

import eval as evaluation
import grpo
import rlm
import tasks
from grpo import GRPOConfig, Row, policy_loss
from model import Qwen3, Qwen3Config
from repl import Limits, REPLError
from rlm import RLMConfig
from runtime import checkpoint, handed_in, metrics, packing, parallel, plan, report
from runtime.device import DEVICE, TYPES, compute_dtype, give_back_memory
from runtime.files import readable, write_text
from runtime.flags import flag, parse
from runtime.metrics import Stats
from runtime.parallel import World, full_tensor
from runtime.run import Run, RunConfig, flags_of_run, resuming
from runtime.stop import Stopped
from sampler import Sampler, SamplerError
from tasks.questions import Questions
from tokenizer import Tokenizer
from tree import Node, Rollout, Unscored, read_rollouts, render


AS_SUITS = -1  # of flags whose default depends on the checkpoint; see Suits
SUITS = "; -1: as suits the checkpoint"


@dataclass(frozen=True)
class WarmupConfig:
    """The supervised steps before GRPO."""
    warmup: str = flag(
        "", "what to imitate: scripts, or a JSONL file of trees (eval.py --save); empty: "
            "scripts for a model that is made, nothing with --model", common=True)
    warmup_steps: int = flag(
        AS_SUITS, "supervised steps before GRPO; 0: none" + SUITS, AS_SUITS)
    warmup_trees: int = flag(
        AS_SUITS, "scripted trees that are run once and reused" + SUITS, AS_SUITS)
    warmup_lr: float = flag(
        float(AS_SUITS), "peak learning rate of the warm-up" + SUITS, AS_SUITS)


@dataclass(frozen=True)
class UpdateConfig:
    """What a step of GRPO samples, and how it updates."""
    steps: int = flag(
        AS_SUITS, "GRPO steps; fewer, if ten in a row had nothing to learn from" + SUITS,
        AS_SUITS, common=True)
    tokens: int = flag(0, "GRPO also ends after so many sampled tokens; 0: no limit")
    questions: int = flag(8, "questions per step", 1, common=True)
    group: int = flag(
        8, "trees per question; their mean reward is the baseline", 2, common=True)
    lr: float = flag(
        float(AS_SUITS), "peak rate, falls linearly to a tenth" + SUITS, AS_SUITS,
        common=True)
    lora_rank: int = flag(
        0, "train adapters of this rank in GRPO; 0: all weights", common=True)
    dtype: str = flag(
        "auto", "what layers compute in; auto: bfloat16 on a GPU, and for weights of 16 "
                "bits on a CPU that multiplies in it", choices=("auto", *TYPES))


@dataclass(frozen=True)
class Config(GRPOConfig, UpdateConfig, WarmupConfig, RunConfig):
    """All flags in one flat object."""

    def __post_init__(self):
        super().__post_init__()
        if not self.task:
            object.__setattr__(self, "task", tasks.usual(self.data))


GROUPS = {"the run": RunConfig, "the warm-up": WarmupConfig, "GRPO": UpdateConfig,
          "the objective": GRPOConfig}

# The model that is made without --model, and how its trees may grow. A task can change
# fields of TINY_RLM: tasks.NAME.TINY.
TINY_MODEL = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                  num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                  max_position_embeddings=384, rope_theta=1e4)
TINY_VOCABULARY = 1024
TOKENIZER_TREES = 192
TINY_RLM = RLMConfig(max_depth=1, max_turns=3, turn_tokens=64, window=384, max_nodes=7,
                     tree_tokens=1500, seconds=60.0, style="brief", scratch=True,
                     limits=Limits(seconds=5.0, output_chars=200))


@dataclass(frozen=True)
class Suits:
    """What suits a checkpoint, where no flag says otherwise."""
    warmup_steps: int
    warmup_trees: int
    warmup_rows: int  # nodes per supervised step
    warmup_lr: float
    steps: int
    lr: float
    more: float  # adapters learn at so many times the rate of all weights
    max_norm: float  # gradients are clipped to this


# A model made from nothing. Clipping at 1.0, a rare large gradient undid its steps.
SCRATCH = Suits(450, 1024, 32, 3e-3, 50, 7e-4, 4.0, 0.2)
# A pretrained one: the rates of published runs.
PRETRAINED = Suits(60, 128, 8, 1e-5, 100, 1e-6, 20.0, 1.0)
LORA_ALPHA = 32.0  # the adapters' product is multiplied by this over their rank
SHOW_EVERY = 25  # steps between printed trees
REPORT_SECONDS = 60.0  # between report pages, each of which takes about one second
PATIENCE = 10  # steps without any signal, after which GRPO ends
NOTHING_LEARNT = (
    "no step had a gradient: all trees of a question scored alike. Take easier questions "
    "or --warmup if they score 0, harder ones if they score 1; or raise --group")


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)  # a file shows each line at once, too
    world, config = World(), Config()
    try:
        config = parse("Train a recursive language model.", Config, GROUPS, flags_of_run)
        if config.plan:
            print(planned(config, world))
            return
        Trainer(config, world).train()
        world.close()
    except (OSError, ValueError, FloatingPointError, REPLError, SamplerError,
            Unscored) as error:
        if handed_in.is_theirs(error):
            raise
        rank = f"rank {world.rank}: " if world.size > 1 else ""
        sys.exit(f"train.py: {rank}{error}")
    except KeyboardInterrupt as stopped:
        if world.rank == 0:
            print(f"train.py: interrupted; continue with: {resuming(config, world)}",
                  file=sys.stderr)
        sys.exit(128 + getattr(stopped, "number", 2))  # 2 is Ctrl-C


class Trainer:
    """One run: its questions, its model, its sampler. `train` does everything in order."""

    def __init__(self, config: Config, world: World):
        have = plan.memory(world)
        self.config = config = settle(config)
        self.world = world
        self.run = run = Run(self, config, world)
        self.trees: list[Rollout] = []  # of the last step
        self.credit: dict[Node, grpo.Credit] = {}  # of their nodes
        self.reported = time.monotonic()

        # What the user gave is read first: a typo must leave no directory.
        self.reward = tasks.reward
        if config.reward:
            self.reward = handed_in.load(config.reward, "score")
        self.objective = grpo.credit
        if handed_in.is_path(config.objective):
            self.objective = handed_in.load(config.objective, "credit")
        elif config.objective != "grpo":
            self.objective = objective_of_ours(config.objective)
            self.objective([], config)  # dpo refuses switches of the loss
        grpo.check_switches(self.objective, config)
        kind = tasks.load(config.task)
        scripts = hasattr(kind, "demonstrate") or hasattr(kind, "oracle")
        if config.warmup_steps and config.warmup in ("", "scripts") and not scripts:
            raise ValueError(f"the task {config.task} has no scripts to warm up on: give "
                             "--warmup FILE or --warmup-steps 0")
        self.questions = Questions(kind, config.data, config.seed, config.heldout)
        start = run.find_start() if world.rank == 0 else None
        if start and not start.weights:
            tiny = make_tiny(run.path("init"), config, self.questions)
            start = replace(start, weights=tiny)
        start = world.gather(start)[0]
        in_grpo = start.state["phase"] == "grpo"
        warms_up = not in_grpo and config.warmup_steps > 0
        # Adapters beside random weights learn nothing: such a warm-up trains all of them.
        adapters = config.lora_rank > 0 and (in_grpo or config.model != "")

        shape = Qwen3Config.read(os.path.join(start.weights, "config.json"))
        source = start.checkpoint or start.weights  # where tokenizer and rlm.json are
        self.tokenizer = Tokenizer.from_pretrained(source)
        self.rlm = rlm.load_config(source, shape.max_position_embeddings, config.sandbox)
        if config.method != "saved":
            self.rlm = evaluation.rlm_config(config.method, self.rlm)
        self.teacher = None
        if config.warmup not in ("", "scripts") and warms_up:
            self.teacher = teacher_trees(config.warmup, self.tokenizer)
        self.suits = SCRATCH if self.rlm.scratch else PRETRAINED
        self.dtype = TYPES[config.dtype]

        wanted = plan.of_run(config, shape, self.rlm.window, have)
        self.plan = wanted.fitted(world.size)
        self.rlm = replace(self.rlm, window=self.plan.window)
        if self.plan != wanted:
            print(self.plan.table(wanted))
        print(self.opening())
        if not self.plan.fits(world.size):
            raise ValueError(f"the run does not fit into {readable(have)} of memory; see "
                             "what --plan prints")

        self.load(start.weights, adapters)
        if start.adapter:
            self.model.load_adapter(start.adapter)
        if start.optimizer:
            checkpoint.load_optimizer(self.model, self.optimizer, start.optimizer)
        run.open(start)

    def opening(self) -> str:
        """What the run begins with and why, for people."""
        config, limits = self.config, self.rlm
        kind = "made from nothing" if limits.scratch else "pretrained"
        trained = "all weights"
        if config.lora_rank:
            trained = f"adapters of rank {config.lora_rank}"
        return (f"a model {kind}, in {config.dtype} on {DEVICE}; {limits.style} prompts, a "
                f"window of {limits.window:,} tokens\n"
                f"a warm-up of {config.warmup_steps} steps at {config.warmup_lr:g}; then "
                f"GRPO, {config.steps} steps on {trained} at {config.lr:g}\n"
                f"Ctrl-C keeps what is done, and this continues: "
                f"{resuming(config, self.world)}")

    def load(self, path: str, adapters: bool) -> None:
        """The weights of a directory, this rank's share of them, and a fresh optimizer."""
        config = self.config

        def prepare(model: Qwen3) -> None:
            if adapters:
                model.add_lora(config.lora_rank, LORA_ALPHA, config.seed)
            parallel.shard(model, self.dtype)

        self.model = self.optimizer = None
        gc.collect()  # the weights before are in reference cycles
        dtype = self.dtype if adapters else torch.float32
        self.model = Qwen3.from_pretrained(path, dtype, DEVICE, prepare)
        self.model.recompute = self.plan.recompute
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        # Fused: the other kinds hold temporary copies of all weights.
        self.optimizer = torch.optim.AdamW(
            trained, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def train(self) -> None:
        """Warm-up, GRPO, and what is measured before and after."""
        run = self.run
        with run.stop:
            try:
                self.learn()
            except Stopped:
                run.save_checkpoint()
                self.world.gather(None)  # where one rank ends, torchrun ends all
                raise
        self.report()
        if self.world.rank == 0:
            run.save_result()
            print(f"done in {run.elapsed():.0f} s: {run.path('final')}")
        self.world.gather(None)  # rank 0 has written all
        if run.state["skipped"] == run.state["step"] > 0:
            raise ValueError(NOTHING_LEARNT)

    def learn(self) -> None:
        """All that a signal can stop. Raises Stopped where everything can be saved."""
        run = self.run
        if run.state["phase"] == "warmup":
            self.warm_up()
            self.end_warm_up()
        self.make_sampler()
        if "heldout_warmup" not in run.state["results"]:
            self.evaluate("heldout_warmup", self.questions.heldout)
        self.reinforce()
        run.save_checkpoint()
        run.save_model("final")

        self.evaluate("heldout_final", self.questions.heldout)
        for name, questions in self.questions.longer.items():
            self.evaluate(name, questions)

    # --- the warm-up ----------------------------------------------------------------------

    def warm_up(self) -> None:
        """Supervised steps on the assistant's turns of scripted or saved trees."""
        config, run = self.config, self.run
        if not config.warmup_steps:
            return
        trees = self.teacher
        if trees is None:
            asked = [tasks.playable(self.questions.draw("warmup", i),
                                    random.Random(f"{config.seed} warmup {i}"))
                     for i in range(config.warmup_trees)]
            trees = demonstrations(asked, self.tokenizer, self.rlm, config.seed)
        trees = [tree for tree in trees if not tree.failed]
        nodes = [node for tree in trees for node in tree.root.walk()
                 if node.sampled and len(node.ids) <= self.rlm.window]
        reward = sum(tree.reward for tree in trees) / len(trees)
        print(f"warm-up: {len(trees)} trees, {len(nodes)} nodes, mean reward {reward:.3f}")
        first, steps = run.state["step"], config.warmup_steps
        bar = trange(first, steps, initial=first, total=steps, desc="warm-up", disable=None)
        for step in bar:
            rng = random.Random(f"{config.seed} warmup rows {step}")
            batch = rng.choices(nodes, k=self.suits.warmup_rows)
            tokens = sum(node.sampled for node in batch)
            loss = 0.0
            for pack in self.packs([Row(node.ids, node.mask, [], [], 1) for node in batch]):
                logprobs, _ = self.model.logprobs(
                    pack["ids"], pack["mask"], pack["lengths"])
                part = -logprobs.sum() / tokens
                self.backward(part)
                loss += part.item()
            loss = sum(self.world.gather(loss))

            rising = min(9 * (step + 1) / steps, 1.0)  # over a ninth of the steps
            cosine = 0.5 * (1 + math.cos(math.pi * step / steps))  # falls from 1 to 0
            lr = config.warmup_lr * rising * (0.05 + 0.95 * cosine)
            self.optimizer_step(lr, loss)
            run.state["step"] = step + 1
            last = step + 1 == steps
            if step % 10 == 0 or last:
                bar.set_postfix(loss=f"{loss:.3f}")
                run.log({"phase": "warmup", "step": step + 1, "loss": loss})
            if (step + 1) % 100 == 0 or last:
                bar.write(f"warm-up {step + 1:4}/{steps} | loss {loss:.3f} | "
                          f"{run.elapsed():.0f} s", file=sys.stdout)
            run.maybe_save(every=1 if last else 100)

    def end_warm_up(self) -> None:
        """Keep the weights as OUT/warmup. Go on from there with a fresh optimizer, and with
        adapters if they are wanted."""
        lora = self.config.lora_rank > 0
        path = self.run.save_model("warmup", self.dtype if lora else torch.float32)
        self.load(path, adapters=lora)
        self.run.state.update(phase="grpo", step=0)
        self.run.save_checkpoint()

    # --- GRPO -----------------------------------------------------------------------------

    def make_sampler(self) -> None:
        """Rollouts are sampled with the weights as they are at the start of a step. A copy
        with merged adapters is faster than the adapters beside the weights."""
        lora = self.config.lora_rank > 0
        cache = self.plan.need(self.world.size)["KV cache"]
        self.sampler = Sampler(self.model, memory=cache, batch=plan.MOST_WINDOWS,
                               window=self.rlm.window, dtype=self.dtype,
                               copy=lora and not self.plan.apart)
        self.policy = rlm.local_policy(self.sampler, self.tokenizer)
        # With adapters the reference of a KL term is the model with its adapters off.
        self.reference = None
        if self.config.kl and not lora:
            self.reference = Qwen3.from_pretrained(
                self.run.path("warmup"), self.dtype, DEVICE)
            self.reference.requires_grad_(False)

    def reinforce(self) -> None:
        """Steps of GRPO until --steps or --tokens are reached, or nothing is left to learn
        from."""
        config, run, world, model = self.config, self.run, self.world, self.model
        silent = 0  # steps in a row without any signal
        while self.progress() < 1 and silent < PATIENCE:
            step, begin = run.state["step"], time.monotonic()
            in_model = self.sampler.stats["seconds"]

            # Sample with the weights as they are now, and score the roots.
            self.sampler.load(model)
            numbers = range(step * config.questions, (step + 1) * config.questions)
            asked = [self.questions.draw("grpo", i) for i in numbers]
            collect = getattr(self.objective, "collect", rlm.collect)
            self.trees = rollouts = self.collect(
                asked, (config.seed, step), "trees", config.group, collect)
            sampled = time.monotonic()

            # Every node gets the advantage of its root, and becomes one row.
            self.credit = credit = self.objective(rollouts, config)
            rows = grpo.make_rows(rollouts, credit, config)
            packs = self.packs(rows)
            self.add_log_probabilities(packs)

            # Each update is one optimizer step over all rows. If no row has an advantage,
            # there is none.
            loss, norm, stats = 0.0, 0.0, Stats()
            for _ in range(config.updates if rows else 0):
                loss, stats = 0.0, Stats()
                for pack in packs:
                    logprobs, entropy = model.logprobs(
                        pack["ids"], pack["mask"], pack["lengths"])
                    part, watched = policy_loss(logprobs, entropy, pack, config)
                    self.backward(part)
                    loss += part.item()
                    stats += Stats.of(watched, pack["depths"])
                losses, all_stats = zip(*world.gather((loss, stats)))
                loss, stats = sum(losses), sum(all_stats, Stats())
                norm = self.optimizer_step(self.learning_rate(), loss)
            run.state["step"] += 1
            run.state["sampled"] += sum(
                node.sampled for tree in rollouts for node in tree.root.walk())
            signal = any(any(row.advantages) for row in rows)
            silent = 0 if signal else silent + 1
            run.state["skipped"] += not signal

            seconds = self.sampler.stats["seconds"] - in_model
            self.show(rollouts, stats.metrics() | {
                "loss": loss, "grad_norm": norm, "rows": len(rows),
                "row_tokens": sum(len(row.ids) for row in rows),
                "sample_s": seconds,
                "repl_s": max(0.0, sampled - begin - seconds),
                "update_s": time.monotonic() - sampled})
            if config.eval_every and run.state["step"] % config.eval_every == 0:
                self.evaluate("heldout_now", self.questions.heldout)
            if time.monotonic() - self.reported > REPORT_SECONDS:
                self.report()
            run.maybe_save(config.save_every)
            give_back_memory()
        if silent == PATIENCE:
            print(f"stopped after step {run.state['step']}: in the last {PATIENCE} steps "
                  "no node had an advantage")

    def collect(self, questions: list, key: tuple, label: str, group: int = 1,
                collect: Callable = rlm.collect) -> list[Rollout]:
        """`group` trees per question. Each rank samples those of its share of the
        questions, then all ranks get all trees."""
        world, run = self.world, self.run
        trees = [(task, str(i)) for i, task in enumerate(questions) for _ in range(group)]
        mine = [n for n in range(len(trees)) if n // group % world.size == world.rank]
        with tqdm(total=len(mine), desc=label, leave=False, disable=None) as bar:
            rollouts = run.stop.run(collect(
                [trees[n][0] for n in mine], self.policy, self.tokenizer, self.rlm, key,
                [trees[n][1] for n in mine], numbers=mine, on_done=lambda _: bar.update(),
                score=self.reward))
        # Every rank knows the questions, so only the trees are exchanged.
        share = {n: (r.root, r.reward, r.failed)
                 for n, r in zip(mine, rollouts or [])}
        grown = {n: tree for part in run.gather(share) for n, tree in part.items()}
        return [Rollout(task, group, *grown[n]) for n, (task, group) in enumerate(trees)]

    def packs(self, rows: list[Row]) -> list[dict]:
        """This rank's share of the rows, as micro-batches on the device."""
        shares = packing.micro_batches(
            rows, self.plan.row, self.plan.attention_cost, self.plan.seen_cost,
            self.world.rank, self.world.size)
        return [packing.collate(share, DEVICE) for share in shares]

    @torch.no_grad()
    def add_log_probabilities(self, packs: list[dict]) -> None:
        """"old", those of the policy before the first of several updates, and "reference",
        those of the policy that GRPO started from, for a KL term."""
        for pack in packs:
            inputs = pack["ids"], pack["mask"], pack["lengths"]
            if self.config.updates > 1:
                pack["old"], _ = self.model.logprobs(*inputs)
            if self.reference:
                pack["reference"], _ = self.reference.logprobs(*inputs)
            elif self.config.kl:
                with self.model.adapters_off():
                    pack["reference"], _ = self.model.logprobs(*inputs)

    def progress(self) -> float:
        """0 before the first step of GRPO, 1 when --steps or --tokens are reached."""
        config, state = self.config, self.run.state
        by_steps = state["step"] / config.steps if config.steps else 1.0
        by_tokens = state["sampled"] / config.tokens if config.tokens else 0.0
        return max(by_steps, by_tokens)

    def learning_rate(self) -> float:
        """Rises over the first five steps, then falls linearly to a tenth."""
        rising = min(1.0, (self.run.state["step"] + 1) / 5)
        return self.config.lr * rising * (1 - 0.9 * min(1.0, self.progress()))

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a micro-batch. FSDP averages them over the ranks."""
        (loss * self.world.size).backward()

    def optimizer_step(self, lr: float, loss: float) -> float:
        """Clip the gradient, step, clear it. Returns its norm before clipping. Raises
        FloatingPointError before a NaN gets into the weights."""
        weights = [w for w in self.model.parameters() if w.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(weights, self.suits.max_norm)
        norm = full_tensor(norm).item()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise FloatingPointError(
                f"the loss is {loss}, the gradient's norm {norm}: not finite. The last "
                "checkpoint is intact; a lower learning rate or another --dtype may help")
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    # --- questions, scores, and what people see -------------------------------------------

    def evaluate(self, name: str, questions: list[tasks.Task]) -> None:
        """One tree per held-out question; the scores are kept as results[name]."""
        self.sampler.load(self.model)
        rollouts = self.collect(questions, (self.config.seed, name), name)
        row = evaluation.summary(list(map(evaluation.record_of, rollouts)),
                                 questions[0].kind, None, evaluation.trained_as(self.rlm))
        self.run.state["results"][name] = row
        self.run.log({"phase": "eval", "name": name, "step": self.run.state["step"], **row})
        print(f"{name}: score {row['score']:.3f}  [{row['low']:.3f}, {row['high']:.3f}]  "
              f"n {row['n']}, length {row['length']:,}, {row['nodes']:.1f} nodes, "
              f"{metrics.shares(row['ends'])}")

    def show(self, rollouts: list[Rollout], update: dict) -> None:
        """Log a step, print its line, and the best of its trees every SHOW_EVERY steps."""
        state = self.run.state
        row = update | metrics.describe(rollouts, self.credit) | {
            "phase": "grpo", "step": state["step"], "skipped": state["skipped"]}
        self.run.log(row)
        print(metrics.line(row, self.config.steps))
        if state["step"] % SHOW_EVERY == 0:
            best = max(rollouts, key=lambda r: (r.reward, len(r.root.children)))
            print(f"{best.task.query}  reward {best.reward:.2f}\n{render(best.root)}")

    def report(self) -> None:
        """OUT/report.html: the scores, the curves, and the trees of the last step with the
        advantages of their nodes."""
        if self.world.rank:
            return
        config, step = self.config, self.run.state["step"]
        rows = [row | {"task": name} for name, row in self.run.state["results"].items()]
        trees = [(f"step {step} #{i}", tree) for i, tree in enumerate(self.trees)]
        page = report.page(
            "Training run", asdict(config), rows, state=f"Step {step} of {config.steps}",
            trees=trees, tokenizer=self.tokenizer, metrics=self.run.metrics(),
            advantages={node: statistics.fmean(given.advantages)
                        for node, given in self.credit.items() if given.advantages})
        write_text(self.run.path("report.html"), page)
        self.reported = time.monotonic()


# ------------------------------------------------------------------------------------------
# What a run starts from

def settle(config: Config) -> Config:
    """The flags, with what suits the checkpoint filled in. Those of a resumed run are all
    given, so it does not need the checkpoint that it started from."""
    if config.dtype == "auto":
        dtype = compute_dtype(config.model)
        config = replace(config, dtype=str(dtype).removeprefix("torch."))
    suits = SCRATCH
    if config.model and not rlm.load_config(config.model).scratch:
        suits = PRETRAINED
    times = suits.more if config.lora_rank else 1.0
    # A warm-up of adapters, too, has a higher rate.
    values = {"warmup_steps": suits.warmup_steps, "warmup_trees": suits.warmup_trees,
              "warmup_lr": suits.warmup_lr, "steps": suits.steps, "lr": suits.lr * times}
    if config.lora_rank and config.model:
        values["warmup_lr"] *= times
    if config.model and not config.warmup:  # it would undo what the checkpoint learnt
        values["warmup_steps"] = 0
    missing = {}
    for name, value in values.items():
        if getattr(config, name) == AS_SUITS:
            missing[name] = value
    return replace(config, **missing)


def objective_of_ours(name: str) -> Callable:
    """A function of lab/objectives.py. Raises ValueError for an unknown name."""
    from lab import objectives

    if name not in objectives.NAMES:
        raise ValueError(f"objective is {name!r}; it can be grpo, "
                         f"{', '.join(objectives.NAMES)} or path/to/file.py")
    return getattr(objectives, name)


def tiny_rlm(config: Config) -> RLMConfig:
    """How the trees of the tiny model may grow, for this task."""
    changes = dict(getattr(tasks.load(config.task), "TINY", {}))
    limits = replace(TINY_RLM.limits, **changes.pop("limits", {}))
    return replace(TINY_RLM, **changes, limits=limits)


def make_tiny(path: str, config: Config, questions: Questions) -> str:
    """A checkpoint made from nothing: a tokenizer trained on the conversations of scripted
    trees, and a small Qwen3 with random weights."""
    draws = [random.Random(f"tokenizer {i}") for i in range(TOKENIZER_TREES)]
    if questions.rows:
        asked = [tasks.playable(*each) for each in zip(questions.rows, draws)]
    else:
        asked = [tasks.make(questions.kind, rng) for rng in draws]
    trees = demonstrations(asked, None, tiny_rlm(config), "tokenizer")
    texts = [f"{turn.role}\n{turn.text}" for tree in trees for node in tree.root.walk()
             for turn in node.turns]
    tokenizer = Tokenizer.train(texts, TINY_VOCABULARY)
    torch.manual_seed(config.seed)
    model = Qwen3(Qwen3Config(vocab_size=tokenizer.vocab_size, **TINY_MODEL))
    model.save_pretrained(path)
    tokenizer.save(path)
    tiny_rlm(config).save(os.path.join(path, "rlm.json"))
    return path


def demonstrations(questions: list[tasks.Task], tokenizer: Tokenizer | None,
                   config: RLMConfig, seed) -> list[Rollout]:
    """Scripted trees, run by the same code as sampled ones, in the real REPL. The scripts
    of a node are drawn from (seed, the number of its tree, its path). A tree that may have
    one node only gets scripts that call nobody."""
    async def policy(node, max_tokens, key):
        *_, number, path, turn = key

        def script(task, node):
            rng = random.Random(f"{(seed, number)} {path}")
            return tasks.demonstrate(task, node, rng, alone=config.max_nodes == 1)

        write = tasks.scripted(script, questions[number], tokenizer)
        return await write(node, max_tokens, key)

    with tqdm(total=len(questions), desc="scripts", leave=False, disable=None) as bar:
        return asyncio.run(rlm.collect(questions, policy, tokenizer, config, at_once=32,
                                       on_done=lambda _: bar.update()))


def teacher_trees(path: str, tokenizer: Tokenizer) -> list[Rollout]:
    """The saved trees that are fit to learn from: an answer, no REPL error, a reward above
    0. Their texts are encoded anew. Raises ValueError if there are none."""
    saved = read_rollouts(path, tasks.Task)
    trees = []
    for tree in saved:
        errors = any(node.errors for node in tree.root.walk())
        if tree.root.end == "final" and tree.reward > 0 and not tree.failed and not errors:
            trees.append(tree)
    if not trees:
        raise ValueError(f"{path}: none of its {len(saved)} trees ended with an answer, "
                         "without an error, with a reward above 0")
    print(f"{path}: {len(trees)} of {len(saved)} trees are fit to learn from")
    for tree in trees:
        for node in tree.root.walk():
            node.turns = tokenizer.encode_turns(node.turns)
    return trees


def planned(config: Config, world: World) -> str:
    """What the run needs in memory, from config.json and rlm.json alone."""
    if not config.model:
        raise ValueError("--plan needs --model; the tiny one fits anywhere")
    config = settle(config)
    shape = Qwen3Config.read(os.path.join(config.model, "config.json"))
    limits = rlm.load_config(config.model, shape.max_position_embeddings)
    wanted = plan.of_run(config, shape, limits.window, plan.memory(world))
    fitted = wanted.fitted(world.size)
    return fitted.table(wanted)


if __name__ == "__main__":
    main()
