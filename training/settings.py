"""The flags of a training run, and their defaults, which depend on the checkpoint.

The switches of the objective are in grpo.py. `filled_in` adds what no flag says.
"""
from dataclasses import dataclass, replace

from grpo import GRPOConfig
from util import ABOVE_ZERO, flag

BY_CHECKPOINT = -1  # a flag with this default takes its value from the checkpoint
NARROW = 256  # hidden size; a model below that was made from nothing, here
WIDE = 2560  # the hidden size of Qwen3-4B
SCRIPTED = 6144  # trees of scripts that a warm-up runs at most; then it reuses them


@dataclass(frozen=True)
class Defaults:
    """What a checkpoint gets where no flag says otherwise."""
    warmup_steps: int
    warmup_lr: float
    warmup_nodes: int  # nodes per supervised step
    lr: float
    max_norm: float  # gradients are clipped to this
    adapters: float  # adapters learn at so many times the rate of all weights


# Clipping at 1.0, a rare large gradient undid the steps of a model made from nothing.
SCRATCH = Defaults(warmup_steps=1000, warmup_lr=3e-3, warmup_nodes=32, lr=1.4e-3,
                   max_norm=0.2, adapters=2.0)
# The rates of published runs of 4B and more; `filled_in` raises that of smaller models.
PRETRAINED = Defaults(warmup_steps=120, warmup_lr=1e-5, warmup_nodes=8, lr=1e-6,
                      max_norm=1.0, adapters=20.0)


def by_checkpoint(name: str) -> str:
    """What the help says of such a default."""
    made, pretrained = getattr(SCRATCH, name), getattr(PRETRAINED, name)
    return f"{made:g} for a model made here, else {pretrained:g}"


@dataclass(frozen=True)
class RunConfig:
    """What a run is about, where it is kept, and how often."""
    out: str = flag("runs/tiny", "directory of the run", common=True)
    seed: int = flag(0, "seed of weights, questions and sampling", common=True)
    model: str = flag("", "checkpoint to start from; empty: make a tiny one", common=True)
    rlm: str = flag(
        "", "file with fields of rlm.json, in place of the checkpoint's", common=True)
    data: str = flag("", "JSONL file of questions; empty: generate them", common=True)
    task: str = flag(
        "", "what is asked: a file of tasks/ by its name, or path/to/file.py; empty: what "
            "the fields of --data say, else what the checkpoint was trained on, else "
            "requests", common=True)
    reward: str = flag(
        "", "what is trained on in place of the score: path/to/file.py[:function]")
    plan: bool = flag(False, "print what the run needs in memory and stop")
    card: int = flag(0, "GB of the GPU that --plan is for; 0: of the device here", 2)
    resume: bool = flag(False, "continue from the last checkpoint in --out", common=True)
    heldout: int = flag(128, "held-out questions; of a file at most a fifth, or 128", 1)
    tracker: str = flag(
        "", "what gets each row of metrics.jsonl: path/to/file.py[:function]")
    eval_every: int = flag(
        0, "steps between evaluations on questions for validation; OUT/best has the best "
           "weights; 0: never")
    sandbox: str = flag("auto", "namespaces around the REPLs; auto: where possible",
                        choices=("require", "auto", "off"))


@dataclass(frozen=True)
class WarmupConfig:
    """The supervised steps before GRPO."""
    warmup: str = flag(
        "", "what to imitate: scripts, or a JSONL file of trees (eval.py --save); empty: "
            "scripts, where there are supervised steps", common=True)
    warmup_steps: int = flag(
        BY_CHECKPOINT, "supervised steps before GRPO; 0: none",
        shown=by_checkpoint("warmup_steps"))
    warmup_lr: float = flag(
        float(BY_CHECKPOINT), "peak rate of the warm-up", ABOVE_ZERO,
        shown=by_checkpoint("warmup_lr"))


@dataclass(frozen=True)
class UpdateConfig:
    """What a step of GRPO samples, and how it updates."""
    steps: int = flag(
        60, "GRPO steps; fewer, if ten in a row had nothing to learn from", common=True)
    tokens: int = flag(0, "GRPO also ends after so many sampled tokens; 0: no limit")
    questions: int = flag(8, "questions per step", 1, common=True)
    group: int = flag(
        8, "trees per question; their mean reward is the baseline", 2, common=True)
    lr: float = flag(
        float(BY_CHECKPOINT), "peak rate, falls linearly to a tenth; higher for adapters "
        "and narrow models (docs/training.md)", ABOVE_ZERO,
        common=True, shown=by_checkpoint("lr"))
    lora_rank: int = flag(
        0, "train LoRA adapters of this rank; 0: all weights", common=True)


@dataclass(frozen=True)
class Config(GRPOConfig, UpdateConfig, WarmupConfig, RunConfig):
    """All flags in one flat object."""


GROUPS = {"the run": RunConfig, "the warm-up": WarmupConfig, "GRPO": UpdateConfig,
          "the objective": GRPOConfig}


def defaults(width: int) -> Defaults:
    """Those for a model whose hidden size is `width`."""
    return SCRATCH if width < NARROW else PRETRAINED


def filled_in(config: Config, width: int) -> Config:
    """The flags, with what depends on the checkpoint filled in; `width` is the hidden size
    of --model. A resumed run reads all flags from run.json: nothing is missing."""
    suits = defaults(width)
    times = suits.adapters if config.lora_rank else 1.0
    values = {"warmup_steps": suits.warmup_steps, "warmup_lr": suits.warmup_lr,
              "lr": suits.lr * times}
    if suits is PRETRAINED:  # Adam's best rate falls with the width (muP, arXiv 2203.03466)
        narrower = max(1.0, WIDE / width)
        values["lr"] *= narrower
        if config.lora_rank:  # near what a Qwen of 0.5B and a SmolLM2 of 135M learnt at
            values["warmup_lr"] *= narrower
            values["lr"] *= narrower
    if config.model:
        values["warmup_lr"] *= times
        if not config.warmup:  # it would undo what the checkpoint learnt
            values["warmup_steps"] = 0
    missing = {name: value for name, value in values.items()
               if getattr(config, name) == BY_CHECKPOINT}
    config = replace(config, **missing)
    if config.warmup_steps and not config.warmup:
        config = replace(config, warmup="scripts")
    return config


def described(config: Config, rlm_config, plan) -> str:
    """What a run begins with and why, for people."""
    made = defaults(plan.config.hidden_size) is SCRATCH
    kind = "made from nothing" if made else "pretrained"
    precision = str(plan.dtype).removeprefix("torch.")
    trained = f"adapters of rank {config.lora_rank}" if config.lora_rank else "all weights"
    warmup = f"a warm-up of {config.warmup_steps} steps at {config.warmup_lr:g}"
    if not config.warmup_steps:
        warmup = "no warm-up"
    return (f"{warmup}, then {config.steps} steps of GRPO at {config.lr:g} on {trained}\n"
            f"the defaults of a model {kind}, in {precision} on {plan.device}; "
            f"{rlm_config.style} prompts; trees of at most {rlm_config.max_nodes} nodes, "
            f"{rlm_config.max_turns} turns each")
