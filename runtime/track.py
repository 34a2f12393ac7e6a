"""Sends a run's metrics to TensorBoard or Weights & Biases while it trains.

OUT/metrics.jsonl stays the truth: what is sent there is a copy of its numbers, and a run
does not end because it cannot be sent. The package is imported when it is asked for.
"""
import importlib
import os
import sys
from collections.abc import Callable


def check(name: str) -> None:
    """Raises ValueError if the package of that name is missing."""
    packages = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
    try:
        if name in packages:
            importlib.import_module(packages[name])
    except ImportError as error:
        raise ValueError(
            f"--track {name} needs a package: pip install {name} ({error})") from None


def tracker(name: str, out: str, number: str, flags: dict) -> Callable[[dict], None]:
    """`track(row)` for lines of metrics.jsonl. `number` is the run's own, also after
    --resume. What goes wrong is said once, and then nothing is sent any more."""
    begin = {"none": nothing, "tensorboard": tensorboard, "wandb": wandb}[name]
    track = None

    def careful(row: dict) -> None:
        nonlocal track
        try:
            track = track or begin(out, number, flags)
            track(row)
        except Exception as error:
            print(f"--track {name}: {error!r}; the run goes on without it", file=sys.stderr)
            track = nothing()

    return careful


def nothing(*_) -> Callable[[dict], None]:
    return lambda row: None


def tensorboard(out: str, number: str, flags: dict) -> Callable[[dict], None]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(os.path.join(out, "tensorboard"))

    def track(row: dict) -> None:
        for name, value in numbers(row).items():
            writer.add_scalar(name, value, row["step"])
        writer.flush()

    return track


def wandb(out: str, number: str, flags: dict) -> Callable[[dict], None]:
    import wandb

    name = os.path.basename(os.path.normpath(out))
    run = wandb.init(project="rlm", name=name, id=f"{name}-{number}", resume="allow",
                     config=flags)
    run.define_metric("*", step_metric="step")

    def track(row: dict) -> None:
        run.log({**numbers(row), "step": row["step"]})

    return track


def numbers(row: dict) -> dict[str, float]:
    """The numbers of a line, under its phase, {"grpo/reward": 0.5}, or the name of an
    evaluation, {"heldout_4x/score": 0.5}."""
    group = row.get("name", row["phase"])
    return {f"{group}/{name}": value for name, value in row.items()
            if isinstance(value, (int, float)) and name != "step"}
