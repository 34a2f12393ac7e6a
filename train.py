"""Train a recursive language model: `python train.py`, nothing else needed.

In order: (1) a warm-up, supervised on scripted rollouts, good and bad strategies mixed on
purpose, so that the policy knows the syntax of its REPL but not what to do with it; (2) GRPO, where
only the root's answer is scored and every child inherits its root's advantage; (3) a held-out
evaluation before and after, on terms and papers never seen, and on four times as many papers.

Without --model a tokenizer is trained, a tiny Qwen3 is initialised and saved like any checkpoint;
everything after that is the same code for it and for a downloaded one.

All randomness is drawn from (seed, phase, step), so a resumed run continues as if it had never
stopped.

With --lora-rank the warm-up still trains all weights; then they are frozen and adapters trained,
so that the model without its adapters is the one that GRPO started from. Trained weights are
float32. Frozen ones are bfloat16, except on a CPU if the checkpoint is not bfloat16 itself: the
tiny one stays float32.

`torchrun --nproc-per-node N train.py ...` is the same run on N devices (parallel.py): each rank
samples its share of a step's questions, then the nodes of all are dealt out for the update. A
checkpoint appears whole or not at all, and any number of ranks can resume from it.
"""
import asyncio
import contextlib
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# Before torch is loaded: a thread that waits for the others spins a little, then sleeps. torch's
# default is to spin long: 1.3 times faster on two idle cores, ten times slower on two busy ones.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch  # noqa: E402
from tqdm import tqdm, trange

from lab import ablation
from runtime import checkpoint
import eval as evaluation
import grpo
from runtime import parallel
from runtime import plan
from lab import report
import rlm
import tasks
from runtime.flags import flag, parse
from grpo import STATS, GRPOConfig, Row
from model import Qwen3, Qwen3Config, whole
from runtime.parallel import World
from sampler import Sampler
from tokenizer import Tokenizer
from tree import Rollout, render, write_text
from warmup import TINY, TINY_VOCABULARY, demonstrations, make_tiny, teacher_trees, tiny_rlm


@dataclass
class RunConfig:
    out: str = flag("runs/tiny", "directory of the run")
    seed: int = flag(0, "seed of weights, questions and sampling")
    model: str = flag("", "checkpoint to start from; empty: make a tiny one")
    data: str = flag("", "JSONL file of questions; empty: generate them")
    task: str = flag("evidence", "kind of generated questions: evidence, or deep, where two levels "
                                 "of children are needed")
    max_depth: int = flag(0, "nodes to this depth have a REPL; 0: what rlm.json says")
    ablation: str = flag("", "run this set of configurations (ablation.py) under --out, and stop")
    plan: bool = flag(False, "print what the run needs in memory and stop")
    resume: bool = flag(False, "continue from the last checkpoint in --out")
    overwrite: bool = flag(False, "empty an --out that holds another run")
    heldout: int = flag(128, "held-out questions, where they are generated", 1)
    save_every: int = flag(25, "steps between checkpoints", 1)
    keep_last: int = flag(2, "checkpoints kept, the last ones", 1)
    eval_every: int = flag(0, "steps between held-out evaluations; the best weights are kept in "
                              "OUT/best; 0: none")
    show_every: int = flag(25, "steps between printed trees", 1)
    sandbox: str = flag("auto", "namespaces around the REPLs: require, auto (if possible), off")
    sample_threads: int = flag(1, "CPU threads while sampling (a tiny model is fastest with one, "
                                  "and leaves the other core to its REPLs); 0: all")


@dataclass
class WarmupConfig:
    warmup_steps: int = flag(500, "supervised steps before GRPO; 0: none")
    warmup_trees: int = flag(1536, "scripted trees that are run once and reused", 1)
    warmup_rows: int = flag(32, "nodes in a supervised step", 1)
    warmup: str = flag("", "JSONL file of trees (eval.py --save) to learn from in place of scripts")
    warmup_score: float = flag(0.0, "trees of --warmup that scored no more are left out")
    warmup_degenerate: str = flag("", "half of the scripted trees do this instead of the task: "
                                      f"{', '.join(tasks.DEGENERATE)}")
    warmup_lr: float = flag(3e-3, "peak learning rate of the warm-up")


@dataclass
class UpdateConfig:
    steps: int = flag(120, "GRPO steps")
    questions: int = flag(8, "questions in a step", 1)
    group: int = flag(8, "trees sampled for a question; their mean is the baseline", 2)
    lr: float = flag(0.0, "peak learning rate of GRPO, falls linearly to a tenth; 0: 5e-4, and "
                          "four times that with --lora-rank")
    lora_rank: int = flag(0, "train adapters of this rank in GRPO; 0: all weights")
    lora_alpha: float = flag(32.0, "the adapters' product is multiplied by this over the rank")
    recompute: bool = flag(False, "compute each layer a second time in the backward pass instead "
                                  "of keeping its activations")
    bf16_states: bool = flag(False, "keep AdamW's two moments in bfloat16: 4 bytes a weight less")
    compile: bool = flag(False, "torch.compile each layer in the update")
    overlap: bool = flag(False, "sample the next batch while updating on this one: its policy is "
                                "then one update old, for which --gap-max limits the weight")
    max_norm: float = flag(1.0, "gradients are clipped to this norm; 0: they are not")
    micro_tokens: int = flag(2048, "tokens in a forward pass of the update, rows packed", 1)
    tokens: int = flag(0, "GRPO ends after so many sampled tokens; 0: after --steps alone")
    resample: int = flag(0, "groups whose trees all score the same are replaced by those of other "
                            "questions, so many times at most (DAPO)")
    norms_by_depth: bool = flag(False, "log the gradient's norm of each depth alone, for one more "
                                       "backward pass a depth")


CONFIGS = (RunConfig, WarmupConfig, UpdateConfig, GRPOConfig)

# What layers compute in; a GPU's weights are float32 nevertheless, if they are trained.
COMPUTE = torch.bfloat16 if torch.cuda.is_available() else torch.float32

# Flags that a resumed run may change: how far it goes, how fast, and what it keeps.
MAY_CHANGE = ("out resume overwrite plan steps tokens lr warmup_lr max_norm heldout save_every "
              "keep_last eval_every show_every sandbox sample_threads recompute compile "
              "micro_tokens norms_by_depth").split()
LR = 5e-4  # of GRPO on all weights


def main() -> None:
    world = World()
    try:
        run, warm, update, loss = parse("Train a recursive language model.", CONFIGS, started)
        if run.plan:
            check_flags(run, warm, update, world.size)
            config = (Qwen3Config.read(os.path.join(run.model, "config.json")) if run.model
                      else Qwen3Config(vocab_size=TINY_VOCABULARY, **TINY))
            window = (rlm.load_config(run.model, config.max_position_embeddings).window
                      if run.model else tiny_rlm(run.task).window)
            print(make_plan(config, window, frozen_dtype(run.model), update, world).table())
            return
        if run.ablation:
            if (run, warm, update, loss) != (RunConfig(ablation=run.ablation, out=run.out),
                                             WarmupConfig(), UpdateConfig(), GRPOConfig()):
                raise ValueError("--ablation sets all flags itself but --out")
            ablation.run(run.ablation, run.out)
            return
        Trainer(run, warm, update, loss, world).train()
        world.close()
    except (OSError, ValueError, FloatingPointError, RuntimeError) as error:
        sys.exit(world.message(error))
    except KeyboardInterrupt:
        sys.exit("train.py: interrupted; continue with --resume (an ablation with the same flags)")
    finally:
        world.release()


class Trainer:
    """One run: its model, its questions, its state. `train` does everything in order."""

    def __init__(self, run: RunConfig, warm: WarmupConfig, update: UpdateConfig,
                 loss: GRPOConfig, world: World | None = None):
        self.run, self.warm, self.update_config, self.loss_config = run, warm, update, loss
        self.world = world = world or World()
        self.shown = None  # the last step's trees, packed for the report
        self.state = {"phase": "warmup", "step": 0, "seconds": 0.0, "results": {},
                      "sampled": 0, "skipped": 0, "best": None}
        world.agree(facts(self.flags()))
        with world.together():
            check_flags(run, warm, update, world.size)
            self.read()
        with world.together():
            start = self.starting_point() if world.rank == 0 else None
        start, self.state, self.resumed = world.gather((start, self.state, self.resumed)
                                                       if world.rank == 0 else None)[0]
        in_grpo = self.state["phase"] == "grpo"
        # The adapters of a checkpoint belong to the weights that the warm-up left.
        base = os.path.join(run.out, "warmup") if in_grpo and update.lora_rank else start
        warms_up = not in_grpo and warm.warmup_steps > 0
        with world.together():
            config = Qwen3Config.read(os.path.join(base, "config.json"))
            self.tokenizer = Tokenizer.from_pretrained(start)
            self.config = rlm.load_config(start, config.max_position_embeddings, run.sandbox)
            self.config = replace(self.config, max_depth=run.max_depth or self.config.max_depth)
            self.teacher = (teacher_trees(warm.warmup, warm.warmup_score, self.tokenizer)
                            if warm.warmup and warms_up else None)
            self.frozen = frozen_dtype(base if in_grpo else run.model or base)
            self.plan = make_plan(config, self.config.window, self.frozen, update, world)
            print(self.plan.table())
            if problem := (self.plan.problem(warms_up, world.size)
                           or checkpoint.no_room(run.out, run.keep_last + 1,
                                                 self.plan.checkpoint_bytes)):
                raise ValueError(problem)
        model, _ = self.plan.parameters
        # A token of attention to T others costs as much as T times this share of all weights.
        self.square = (config.num_hidden_layers * config.num_attention_heads * config.head_dim
                       / model)
        with world.together():
            frozen = update.lora_rank and not warms_up
            self.load_model(base, self.frozen if frozen else torch.float32,
                            in_grpo and update.lora_rank > 0)
            if in_grpo and update.lora_rank:
                self.model.load_adapter(os.path.join(start, "adapter"))
        if self.state["step"]:
            checkpoint.load_optimizer(self.model, self.optimizer, os.path.join(start, "optimizer"))
        self.started = time.monotonic() - self.state["seconds"]
        with world.together():
            if world.rank == 0:
                self.trim(start) if self.resumed else self.clear()

    def read(self) -> None:
        """The questions, before anything is written. Raises OSError or ValueError."""
        run = self.run
        self.questions = None  # those of --data for training; None: generated ones
        if run.data:
            self.questions, self.heldout = tasks.split(tasks.load_tasks(run.data))
        else:
            self.heldout = evaluation.heldout_tasks(run.heldout, kind=run.task)
        if run.model:
            Qwen3Config.read(os.path.join(run.model, "config.json"))

    def load_model(self, path: str, dtype: torch.dtype, adapted: bool) -> None:
        """Weights of a directory, with fresh adapters if wanted, this rank's share of them, and a
        fresh optimizer."""
        c = self.update_config

        def prepare(model: Qwen3) -> None:
            if adapted:
                model.add_lora(c.lora_rank, c.lora_alpha, self.run.seed)
            parallel.shard(model)

        self.model = Qwen3.from_pretrained(path, dtype, device(), prepare)
        self.model.recompute = c.recompute
        if c.compile:
            self.model.compile_layers()
        trained = [w for w in self.model.parameters() if w.requires_grad]
        kind = parallel.LeanAdamW if c.bf16_states else torch.optim.AdamW
        self.optimizer = kind(trained, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0,
                              fused=True)  # others hold temporaries of all weights

    def make_sampler(self) -> None:
        """Rollouts are sampled from a copy of the model, refreshed before a step."""
        self.sampler = Sampler(self.model, memory=self.plan.need(self.world.size)["KV cache"],
                               batch=plan.MOST_WINDOWS, window=self.config.window,
                               dtype=None if self.update_config.lora_rank else COMPUTE)
        self.policy = rlm.local_policy(self.sampler, self.tokenizer)
        self.thread, self.ahead = ThreadPoolExecutor(1), None  # of --overlap

    def make_reference(self) -> None:
        """The policy that GRPO started from; adapters that are switched off are one for nothing."""
        if self.loss_config.needs_reference and not self.model.rank:
            self.reference = Qwen3.from_pretrained(os.path.join(self.run.out, "warmup"),
                                                   COMPUTE, device()).requires_grad_(False)

    def starting_point(self) -> str:
        """The directory that the run starts from: its last checkpoint, --model, or a tiny one.
        An existing --out is from here on closed to other runs."""
        out = self.run.out
        if os.path.isdir(out) or not self.run.model:
            self.world.take(out)
        last = checkpoint.last_checkpoint(out) if self.run.resume else None
        self.resumed = last is not None
        if self.resumed:
            with open(os.path.join(last, "state.json"), encoding="utf-8") as file:
                self.state |= json.load(file)
            print(f"resuming {out} at {self.state['phase']} step {self.state['step']}")
            with open(os.path.join(out, "run.json"), encoding="utf-8") as file:
                started = json.load(file)
            for name, value in self.flags().items():
                if value != started.get(name, value) and name not in MAY_CHANGE:
                    raise ValueError(f"{out}/run.json: {name} is {started[name]!r}; a resumed run "
                                     "cannot change it")
            return last
        held = checkpoint.checkpoints(out) or os.path.exists(os.path.join(out, "result.json"))
        if held and not self.run.overwrite:
            raise ValueError(f"{out} holds another run: --resume continues it, --overwrite empties "
                             "it, or give another --out")
        inside = os.path.join(os.path.abspath(out), "")
        if self.run.model and os.path.join(os.path.abspath(self.run.model), "").startswith(inside):
            raise ValueError(f"--model {self.run.model} lies in --out, which a new run empties")
        if self.run.resume:
            print(f"{out}: no checkpoint yet, starting afresh")
        return self.run.model or make_tiny(os.path.join(out, "init"), self.run.seed,
                                           self.questions, self.run.task)

    def clear(self) -> None:
        """Start the output directory afresh, now that everything was read without an error."""
        self.world.take(self.run.out)
        for name in ("metrics.jsonl", "result.json"):
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(self.run.out, name))
        for name in (checkpoint.FOLDER, "warmup", "best", "final"):
            shutil.rmtree(os.path.join(self.run.out, name), ignore_errors=True)
        self.save_flags()

    def save_flags(self) -> None:
        write_text(os.path.join(self.run.out, "run.json"), json.dumps(self.flags(), indent=2))

    def trim(self, start: str) -> None:
        """Forget what came after the checkpoint: metrics, and checkpoints that are damaged."""
        self.save_flags()
        checkpoint.forget_after(self.run.out, start)
        with open(os.path.join(self.run.out, "metrics.jsonl"), "a", encoding="utf-8") as file:
            file.truncate(min(file.tell(), self.state["metrics"]))

    def flags(self) -> dict:
        return (asdict(self.run) | asdict(self.warm) | asdict(self.update_config)
                | asdict(self.loss_config))

    def train(self) -> None:
        window = self.config.window
        context = sum(evaluation.context_tokens(q, self.tokenizer) for q in self.heldout)
        context = round(context / len(self.heldout))
        print(f"training on {self.model.device}; a question's context has {context:,} tokens, the "
              f"model's window {window:,}")
        try:
            if self.state["phase"] == "warmup":
                self.warmup()
                self.end_warmup()
            self.make_sampler()
            self.make_reference()
            if "heldout_warmup" not in self.state["results"]:
                self.score("heldout_warmup", self.heldout)
            self.reinforce()
        except KeyboardInterrupt:
            if self.world.size == 1:  # several are not all at the same place
                self.save_checkpoint()
            raise
        self.save_checkpoint()
        self.score("heldout_final", self.heldout)
        if not self.run.data and self.run.task == "evidence":
            self.score("heldout_4x", evaluation.heldout_tasks(self.run.heldout, times=4))
        self.finish(window, context)

    # --- phase 1 ------------------------------------------------------------------------------

    def warmup(self) -> None:
        """Supervised steps on the assistant tokens of scripted trees."""
        c = self.warm
        if not c.warmup_steps:
            return
        trees = self.teacher or demonstrations(
            [self.question("warmup", i) for i in range(c.warmup_trees)], self.tokenizer,
            self.config, self.run.seed, c.warmup_degenerate)
        nodes = [node for r in trees for node in r.root.walk()
                 if node.sampled and len(node.ids) <= self.config.window]
        if not nodes:
            raise ValueError(f"no conversation of {c.warmup or 'the scripts'} fits into the window "
                             f"of {self.config.window} tokens")
        score = sum(r.reward for r in trees) / len(trees)
        print(f"warm-up: {len(trees)} {'saved' if c.warmup else 'scripted'} trees, {len(nodes)} "
              f"nodes, mean reward {score:.3f}")
        rows = [(node.ids, node.mask) for node in nodes]
        loss = math.nan
        bar = trange(self.state["step"], c.warmup_steps, initial=self.state["step"],
                     total=c.warmup_steps, desc="warm-up", disable=None)
        for step in bar:
            rng = random.Random(f"{self.run.seed} warmup rows {step}")
            batch = [Row(ids, mask, [0.0] * len(ids), [0.0] * sum(mask), 1.0)
                     for ids, mask in rng.choices(rows, k=c.warmup_rows)]
            tokens = sum(sum(row.mask) for row in batch)
            loss = 0.0
            for t in self.packs(batch):
                logprobs, _ = self.model.logprobs(t["ids"], t["mask"], t["lengths"])
                part_loss = -logprobs.sum() / tokens
                (part_loss * self.world.size).backward()  # shards get means over the ranks
                loss += part_loss.item()
            loss = sum(self.world.gather(loss))
            lr = c.warmup_lr * min((step + 1) / 50, 1.0)
            lr *= 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / c.warmup_steps))
            self.optimizer_step(lr, loss)
            self.state["step"] = step + 1
            if step % 10 == 0 or step + 1 == c.warmup_steps:
                bar.set_postfix(loss=f"{loss:.3f}")
                self.log({"phase": "warmup", "step": step + 1, "loss": loss})
            if (step + 1) % 100 == 0 or step + 1 == c.warmup_steps:
                bar.write(f"warm-up {step + 1:4}/{c.warmup_steps} | loss {loss:.3f} | "
                          f"{self.elapsed():.0f} s", file=sys.stdout)
                self.save_checkpoint()

    def end_warmup(self) -> None:
        """Keep the weights under a name of their own, put adapters on them if such are wanted,
        and start a fresh optimizer."""
        c = self.update_config
        path = os.path.join(self.run.out, "warmup")
        dtype = self.frozen if c.lora_rank else torch.float32
        self.save_model(path, dtype=dtype)
        self.load_model(path, dtype, bool(c.lora_rank))
        self.state.update(phase="grpo", step=0)
        self.save_checkpoint()

    # --- phase 2 ------------------------------------------------------------------------------

    def reinforce(self) -> None:
        c = self.update_config
        while self.progress() < 1:
            step = self.state["step"]
            begin, before = time.monotonic(), self.sampler.stats["seconds"]
            waited = self.world.waited
            rollouts, tokens = self.sample(step)
            sampled = time.monotonic()
            if self.progress(1, tokens) >= 1:  # for the report, with the weights that sampled them
                names = [f"question {r.group} #{i % c.group}" for i, r in enumerate(rollouts)]
                self.shown = report.pack(rollouts, names, self.tokenizer,
                                         grpo.advantages(rollouts, self.loss_config),
                                         evaluation.gaps(self.model, rollouts))
            merged = ({"merge_gap": self.model.merge_gap(self.sampler.model)}
                      if self.model.rank else {})
            metrics = self.update(rollouts, step) | merged
            in_model = self.sampler.stats["seconds"] - before
            metrics |= describe(rollouts) | {
                "phase": "grpo", "step": step + 1, "sample_s": in_model,
                "repl_s": max(0.0, sampled - begin - in_model),
                "update_s": time.monotonic() - sampled,
                "wait_s": [round(s, 3) for s in self.world.gather(self.world.waited - waited)]}
            self.state["step"] = step + 1
            self.state["sampled"] += tokens
            self.log(metrics)
            print(line(metrics, c.steps))
            if (step + 1) % self.run.show_every == 0:
                best = max(rollouts, key=lambda r: (r.reward, len(r.root.children)))
                print(f"{best.task.query}  reward {best.reward:.2f}\n{render(best.root)}")
            if self.run.eval_every and (step + 1) % self.run.eval_every == 0:
                self.keep_best()
            if (step + 1) % self.run.save_every == 0:
                self.save_checkpoint()

    def keep_best(self) -> None:
        """Evaluate on the held-out questions; weights that do best so far stay in OUT/best."""
        step, score = self.state["step"], self.score("heldout_now", self.heldout)
        if self.state["best"] is None or score > self.state["best"]["score"]:
            self.state["best"] = {"step": step, "score": score}
            self.save_model(os.path.join(self.run.out, "best"), [self.save_adapter])

    def progress(self, steps: int = 0, tokens: int = 0) -> float:
        """0 at the first step of GRPO, 1 when --steps or --tokens are reached; after so many more
        of them."""
        c, done = self.update_config, self.state
        return max((done["step"] + steps) / c.steps if c.steps else 1.0,
                   (done["sampled"] + tokens) / c.tokens if c.tokens else 0.0)

    def sample(self, step: int) -> tuple[list[Rollout], int]:
        """The trees of a step, sampled with the weights as they are now (with --overlap, as they
        were before the last update), and how many tokens were sampled for them."""
        c = self.update_config
        kept, tokens = [], 0
        for again in range(c.resample + 1):
            wanted = c.questions - len(kept) // c.group
            trees = self.saplings(step, again, wanted)
            if again == 0 and self.ahead:
                mine = self.ahead.result()
            else:
                if again == 0:
                    self.refresh()
                mine = self.grow(step, again, trees)
            told = self.world.gather(mine)  # everybody knows the questions; the trees are told
            grown = {n: tree for share in told for n, tree in share.items()}
            rollouts = [Rollout(task, group, *grown[n]) for n, (task, group) in enumerate(trees)]
            tokens += sum(node.sampled for r in rollouts for node in r.root.walk())
            worth = grpo.advantages(rollouts, self.loss_config)
            signal = {r.group for r, a in zip(rollouts, worth) if a}
            last = again == c.resample
            kept += [r for r in rollouts if last or r.group in signal]
            if len(kept) == c.questions * c.group:
                break
        self.ahead = None
        if c.overlap and self.progress(1, tokens) < 1:
            self.refresh()
            self.ahead = self.thread.submit(self.grow, step + 1, 0,
                                            self.saplings(step + 1, 0, c.questions))
        return kept, tokens

    def refresh(self) -> None:
        self.sampler.load(self.model)

    def saplings(self, step: int, again: int, wanted: int) -> list[tuple[tasks.Task, str]]:
        """(question, group) of each tree of a step."""
        c = self.update_config
        phase = f"grpo again {again}" if again else "grpo"
        questions = [self.question(phase, step * c.questions + i) for i in range(wanted)]
        return [(q, f"{again}.{i}") for i, q in enumerate(questions) for _ in range(c.group)]

    def grow(self, step: int, again: int, trees: list[tuple[tasks.Task, str]]) -> dict:
        """{number: (root, reward, failed)} of this rank's share of the trees."""
        c, world = self.update_config, self.world
        mine = [n for n in range(len(trees)) if n // c.group % world.size == world.rank]
        with (self.sampling_threads(),
              tqdm(total=len(mine), desc="trees", leave=False, disable=None) as bar):
            rollouts = asyncio.run(rlm.collect(
                [trees[n][0] for n in mine], self.policy, self.tokenizer, self.config,
                (self.run.seed, step, *[again][:again]), [trees[n][1] for n in mine],
                on_done=lambda _: bar.update(), numbers=mine))
        return {n: (r.root, r.reward, r.failed) for n, r in zip(mine, rollouts)}

    def update(self, rollouts: list[Rollout], step: int) -> dict:
        """The optimizer steps on a batch of trees; usually one."""
        c, config = self.loss_config, self.update_config
        rows = grpo.make_rows(rollouts, c, random.Random(f"{self.run.seed} draw {step}"))
        batches = self.batches(rows)
        depths = 1 + max((row.depth for row in rows), default=0)
        norms = self.depth_norms(batches, depths) if config.norms_by_depth else {}
        lr = config.lr or LR * (4 if config.lora_rank else 1)
        lr *= min(1.0, (step + 1) / 5) * (1 - 0.9 * min(1.0, self.progress()))
        norm = loss = largest_gap = 0.0
        watched = torch.zeros(len(STATS), depths)
        for _ in range(c.updates if rows else 0):  # no signal at all: no step
            loss, largest_gap = 0.0, 0.0
            watched.zero_()
            for t in batches:
                part, stats, gap = self.backward(t)
                loss += part
                watched[:, :stats.shape[1]] += stats.cpu()
                largest_gap = max(largest_gap, gap)
            losses, gaps, sums = zip(*self.world.gather((loss, largest_gap, watched.clone())))
            loss, largest_gap, watched = sum(losses), max(gaps), sum(sums)
            norm = self.optimizer_step(lr, loss)
        self.state["skipped"] += not rows
        total = dict(zip(STATS, watched.sum(1).tolist()))
        tokens = max(1.0, total.pop("tokens"))
        by_depth = [{"share": column[0] / tokens,
                     **{name: x / max(1.0, column[0]) for name, x in zip(STATS[1:], column[1:])}}
                    | ({"grad_norm": norms[d]} if d in norms else {})
                    for d, column in enumerate(watched.T.tolist())]
        return {name: x / tokens if rows else None for name, x in total.items()} | {
            "loss": loss, "grad_norm": norm, "rows": len(rows), "largest_gap": largest_gap,
            "skipped": self.state["skipped"], "by_depth": by_depth,
            "own_correlation": grpo.own_correlation(rollouts, grpo.advantages(rollouts, c))}

    def packs(self, rows: list[Row]) -> list[dict]:
        """This rank's share of the rows, as micro-batches on the device."""
        return [grpo.collate(part, device()) for part in grpo.micro_batches(
            rows, self.update_config.micro_tokens, self.square, self.world.rank, self.world.size)]

    def batches(self, rows: list[Row]) -> list[dict]:
        """Rows as micro-batches on the device, with what the objective needs besides."""
        c = self.loss_config
        batches = self.packs(rows)
        with torch.no_grad():
            for t in batches:
                if c.needs_old:
                    t["old"], _ = self.model.logprobs(t["ids"], t["mask"], t["lengths"])
                if c.needs_reference and self.model.rank:
                    with self.model.adapters_off():
                        t["reference"], _ = self.model.logprobs(t["ids"], t["mask"], t["lengths"])
                elif c.needs_reference:
                    t["reference"], _ = self.reference.logprobs(t["ids"], t["mask"], t["lengths"])
        if c.objective == "dpo" and batches:
            grpo.dpo_advantages(batches, c, self.world.gather)
        return batches

    def backward(self, t: dict) -> tuple:
        """Add the gradient of a micro-batch; returns its loss, stats and largest gap."""
        logprobs, entropies = self.model.logprobs(t["ids"], t["mask"], t["lengths"])
        loss, stats, gap = grpo.policy_loss(logprobs, entropies, t, self.loss_config)
        (loss * self.world.size).backward()  # shards get means over the ranks
        return loss.item(), stats, gap

    def depth_norms(self, batches: list[dict], depths: int) -> dict[int, float]:
        """The norm of the gradient that the nodes of each depth give alone."""
        norms = {}
        for depth in range(depths):
            for t in batches:
                self.backward(t | {"weights": t["weights"] * (t["depths"] == depth)})
            gradients = [w.grad for w in self.model.parameters() if w.grad is not None]
            norms[depth] = whole(torch.nn.utils.get_total_norm(gradients)).item()
            self.optimizer.zero_grad(set_to_none=True)
        return norms

    # --- shared by both -----------------------------------------------------------------------

    def question(self, phase: str, i: int) -> tasks.Task:
        """The i-th question of a phase: generated, or an epoch-wise shuffle of the data's."""
        if self.questions is None:
            return tasks.make_task(self.run.task, random.Random(f"{self.run.seed} {phase} {i}"),
                                   papers=evaluation.PAPERS)
        epoch, at = divmod(i, len(self.questions))
        order = list(range(len(self.questions)))
        random.Random(f"{self.run.seed} {phase} {epoch}").shuffle(order)
        return self.questions[order[at]]

    def optimizer_step(self, lr: float, loss: float) -> float:
        """Clip, step, clear; returns the gradient's norm. Never lets a NaN into the weights."""
        norm = whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(),
                                                    self.update_config.max_norm or math.inf)).item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(
                f"the loss is {loss}, the gradient's norm {norm}: not finite. The last checkpoint "
                "is intact; a lower learning rate may help")
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C waits for whole steps
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return norm

    def score(self, name: str, questions: list[tasks.Task]) -> float:
        if self.ahead:
            self.ahead.exception()  # the sampler does one thing at a time
        self.sampler.load(self.model)
        with self.sampling_threads():
            row, rollouts = evaluation.evaluate(
                questions, self.policy, self.tokenizer, self.config, (self.run.seed, name), name,
                slice(self.world.rank, None, self.world.size), self.world.gather)
        self.state["results"][name] = row
        self.log({"phase": "eval", "name": name, **row})
        print(f"{name}: F1 {row['score']:.3f}  [{row['low']:.3f}, {row['high']:.3f}]  "
              f"n {row['n']}, context {row['length']:,} tokens, {row['nodes']:.1f} nodes, "
              f"{ends(rollouts)}")
        return row["score"]

    def finish(self, window: int, context: int) -> None:
        self.save_model(os.path.join(self.run.out, "final"), [self.save_adapter])
        if self.world.rank:
            return
        rows = self.state["results"]
        result = {"seed": self.run.seed, "credit": self.loss_config.credit,
                  **{name: rows[name]["score"] if name in rows else None
                     for name in ("heldout_warmup", "heldout_final", "heldout_4x")},
                  "heldout_n": rows["heldout_final"]["n"], "window_tokens": window,
                  "context_tokens": context, "sampled_tokens": self.state["sampled"],
                  "seconds": round(self.elapsed(), 1), "flags": self.flags()}
        write_text(os.path.join(self.run.out, "result.json"), json.dumps(result, indent=2))
        write_text(os.path.join(self.run.out, "report.html"), report.page(
            "Training run", self.flags(), [row | {"task": name} for name, row in rows.items()],
            metrics=evaluation.read_metrics(os.path.join(self.run.out, "metrics.jsonl")),
            trees=self.shown))
        print(f"done in {self.elapsed():.0f} s: {os.path.join(self.run.out, 'final')}")

    @contextlib.contextmanager
    def sampling_threads(self):
        default = torch.get_num_threads()
        torch.set_num_threads(self.run.sample_threads or default)
        try:
            yield
        finally:
            torch.set_num_threads(default)

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def log(self, metrics: dict) -> None:
        """One JSON line for programs; the line for people is printed by the caller."""
        if self.world.rank:
            return
        with open(os.path.join(self.run.out, "metrics.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps(metrics | {"elapsed": round(self.elapsed(), 1)}) + "\n")

    def save_model(self, path: str, parts=(), dtype: torch.dtype | None = None,
                   weights: bool = True) -> None:
        """Weights, adapters merged, tokenizer and rlm.json, and what `parts` write into the
        directory they are given; there whole or not at all."""
        first = self.world.rank == 0

        def text(aside: str) -> None:
            if first:
                self.tokenizer.save(aside)
                self.config.save(os.path.join(aside, "rlm.json"))

        def tensors(aside: str) -> None:
            if weights and first:
                self.model.save_pretrained(aside, dtype)
            elif weights:  # the others take part in gathering each tensor
                deque(self.model.merged(), 0)

        checkpoint.write_directory(path, [text, tensors, *parts], self.world)

    def save_adapter(self, path: str) -> None:
        if self.model.rank:
            self.model.save_adapter(os.path.join(path, "adapter"),
                                    os.path.join(self.run.out, "warmup"), self.world.rank == 0)

    def save_checkpoint(self) -> None:
        """Everything to continue from; of a model with adapters only these, the rest is fixed. The
        last few are kept."""
        def optimizer(path: str) -> None:
            if self.state["step"]:  # before, it has nothing to save
                checkpoint.save_optimizer(self.model, self.optimizer,
                                          os.path.join(path, "optimizer"))

        def state(path: str) -> None:
            if self.world.rank == 0:
                metrics = os.path.join(self.run.out, "metrics.jsonl")
                state = self.state | {"seconds": self.elapsed(), "files": checkpoint.sizes(path),
                                      "metrics": os.path.getsize(metrics)
                                      if os.path.exists(metrics) else 0}
                write_text(os.path.join(path, "state.json"), json.dumps(state, indent=2))

        path = checkpoint.place(self.run.out, self.state["phase"], self.state["step"])
        if os.path.isdir(path):  # the same: all that is random comes from phase and step
            return
        self.save_model(path, [self.save_adapter, optimizer, state], weights=not self.model.rank)
        if self.world.rank == 0:
            checkpoint.keep_last(self.run.out, self.run.keep_last)


# ---------------------------------------------------------------------------------------------
# Helpers

def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def frozen_dtype(path: str) -> torch.dtype:
    """Of weights that are not trained: see this file's first lines."""
    stored = "float32"
    if path:
        with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
            raw = json.load(file)
        stored = raw.get("dtype", raw.get("torch_dtype"))
    return torch.bfloat16 if device() == "cuda" or stored == "bfloat16" else torch.float32


def make_plan(config: Qwen3Config, window: int, frozen: torch.dtype, update: UpdateConfig,
              world: World) -> plan.Plan:
    share = 1 if device() == "cuda" else world.local_size
    return plan.Plan(config, window, max(window, update.micro_tokens), update.lora_rank,
                     frozen.itemsize, update.recompute, plan.device_bytes(device()) // share,
                     COMPUTE.itemsize, 2 if update.bf16_states else 4)


def facts(flags: dict) -> dict:
    """What has to be the same on all ranks."""
    here = os.path.dirname(os.path.abspath(__file__))
    code = b"".join(Path(here, name).read_bytes() for name in sorted(os.listdir(here))
                    if name.endswith(".py"))
    kind = (torch.cuda.get_device_properties(torch.cuda.current_device())
            if device() == "cuda" else None)
    return {"flags": json.dumps(flags, sort_keys=True), "code": evaluation.digest(code),
            "torch": torch.__version__,
            "device": kind and f"{kind.name}, {kind.total_memory >> 30} GiB"}


def describe(rollouts: list[Rollout]) -> dict:
    """What a batch of trees looked like."""
    scored = [r for r in rollouts if not r.failed]
    nodes = [node for r in scored for node in r.root.walk()]
    groups = {}
    for r in scored:
        groups.setdefault(r.group, []).append(r.reward)
    n = len(scored)
    kinds = Counter(tasks.degenerate(r.task, r.root) for r in scored)
    return {
        "reward": sum(r.reward for r in scored) / n,
        "flat": sum(max(g) - min(g) < 1e-9 for g in groups.values()) / len(groups),
        "failed": len(rollouts) - n,
        "failures": dict(Counter(r.failed for r in rollouts if r.failed)),
        "nodes": len(nodes) / n,
        "turns": sum(t.role == "assistant" for node in nodes for t in node.turns) / n,
        "tokens": sum(node.sampled for node in nodes) / n,
        "tokens_worse": mean_tokens(scored, lambda a: a < 0),
        "tokens_better": mean_tokens(scored, lambda a: a > 0),
        "errors": sum(len(node.errors) for node in nodes) / n,
        "block_s": sum(node.repl_seconds for node in nodes) / n,
        "ends": dict(Counter(r.root.end for r in scored).most_common()),
        "degenerate": {name: kinds[name] / n for name in tasks.DEGENERATE if kinds[name]},
    }


def mean_tokens(scored: list[Rollout], which) -> float | None:
    """Sampled tokens of a tree, mean over those whose advantage is `which`; None if none is."""
    sizes = [sum(node.sampled for node in r.root.walk())
             for r, a in zip(scored, grpo.advantages(scored)) if which(a)]
    return sum(sizes) / len(sizes) if sizes else None


def ends(rollouts: list[Rollout]) -> str:
    counts = Counter(r.root.end for r in rollouts)
    return " ".join(f"{end} {n / len(rollouts):.0%}" for end, n in counts.most_common())


def line(m: dict, steps: int) -> str:
    """One step for people."""
    total = sum(m["ends"].values())
    how = " ".join(f"{end} {n / total:.0%}" for end, n in m["ends"].items())
    lost = f" | failed {m['failed']}: {next(iter(m['failures']))[:60]}" if m["failed"] else ""
    learnt = "no signal, no step"
    if m["rows"]:
        learnt = (f"entropy {m['entropy']:.2f} gap {m['gap']:.0e}"
                  f"{' merge ' + format(m['merge_gap'], '.0e') if 'merge_gap' in m else ''} "
                  f"grad {m['grad_norm']:.2f}")
    return (f"step {m['step']:4}/{steps} | reward {m['reward']:.3f} | flat {m['flat']:.0%} | "
            f"a tree: {m['nodes']:.1f} nodes {m['turns']:.1f} turns {m['tokens']:.0f} tokens | "
            f"{how}{lost} | {learnt} | "
            f"sample {m['sample_s']:.1f} repl {m['repl_s']:.1f} update {m['update_s']:.1f} s")


def started(args) -> dict:
    """What a run that is resumed was started with; flags given now still win."""
    path = os.path.join(args.out, "run.json")
    if not args.resume or not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def check_flags(run: RunConfig, warm: WarmupConfig, update: UpdateConfig, ranks: int) -> None:
    """What GRPOConfig does for its own. Raises ValueError for what contradicts itself."""
    for wrong, why in (
            (run.sandbox not in ("require", "auto", "off"),
             f"sandbox is {run.sandbox!r}; it can be require, auto or off"),
            (run.task not in tasks.TRAINED,
             f"task is {run.task!r}; it can be {' or '.join(tasks.TRAINED)}"),
            (run.data and run.task != "evidence", "task is of generated questions, not of data"),
            (warm.warmup_degenerate not in ("", *tasks.DEGENERATE),
             f"warmup_degenerate is {warm.warmup_degenerate!r}; it can be "
             f"{', '.join(tasks.DEGENERATE)}"),
            (warm.warmup and warm.warmup_degenerate, "warmup_degenerate is of scripts, not warmup"),
            (warm.warmup_score and not warm.warmup, "warmup_score is of the trees of warmup"),
            (not warm.warmup_steps and (warm.warmup or warm.warmup_degenerate),
             "warmup_steps is 0: warmup and warmup_degenerate have no effect"),
            (ranks > update.questions, f"{ranks} ranks, but only {update.questions} questions in a "
                                       "step: each rank samples its own")):
        if wrong:
            raise ValueError(why)


if __name__ == "__main__":
    main()
