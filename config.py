"""How a tree may grow: RLMConfig, which is saved beside the weights as rlm.json.

Training, evaluation and inference read the same file, so what was trained is what is used.
"""
import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sandbox.isolation import Limits
from util import check, flag, is_path, read_json, write_json


@dataclass(frozen=True)
class RLMConfig:
    """The budgets of a tree, and the style of its prompts."""
    max_depth: int = 1  # nodes down to this depth have a REPL; the root is at depth 0
    max_turns: int = 6  # messages that the policy may write in one node
    turn_tokens: int = 1024  # sampled tokens of one message, at most
    window: int = 32_768  # tokens of one node, prompts and observations included
    max_nodes: int = 32  # nodes of a tree, the root included
    tree_tokens: int = 200_000  # sampled tokens of a tree
    tree_seconds: float = 900.0  # processor time of its code; waiting for the model is free
    style: str = flag("full", "full: for pretrained models; brief: for those made from "
                              "nothing", choices=("full", "brief"))
    task: str = ""  # the task that it was trained on: a name, or a file
    limits: Limits = field(default_factory=Limits)

    def save(self, path: str) -> None:
        write_json(path, asdict(self))


def load_config(model_dir: str, positions: float = math.inf, sandbox: str = "auto",
                rlm_file: str = "", suited: dict = {}) -> RLMConfig:
    """rlm.json of a checkpoint, or the defaults. If it names no task, the fields in
    `suited` replace its own. Those of a file `rlm_file` replace both. The window is at most
    the model's positions. `sandbox` depends on this machine, so no file sets it."""
    config, saved = RLMConfig(), Path(model_dir, "rlm.json")
    if model_dir and saved.exists():
        config = changed(config, read_json(saved), saved)
    if not config.task:
        config = changed(config, suited, "AFTER_SCRIPTS")
    if rlm_file:
        config = changed(config, read_json(rlm_file), rlm_file)
    limits = replace(config.limits, sandbox=sandbox)
    return replace(config, window=min(config.window, positions), limits=limits)


def changed(config: RLMConfig | Limits, values: Any, source: Any) -> RLMConfig | Limits:
    """The configuration with these values in place of its own. Raises ValueError that names
    the `source`."""
    if not isinstance(values, dict):
        raise ValueError(f"{source}: {values!r:.40} is no JSON object")
    for name in values.keys() - {f.name for f in fields(config)}:
        raise ValueError(f"{source}: there is no field {name!r}")
    if "limits" in values:
        limits = changed(config.limits, values["limits"], source)
        values = values | {"limits": limits}
    config = replace(config, **values)
    try:
        check(config)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    return config


def trained_task(config: RLMConfig, given: str = "") -> str:
    """The task that is given, else that of the training. Raises ValueError if that is a
    file: whoever opens a checkpoint from elsewhere must not run its code."""
    if not given and is_path(config.task):
        raise ValueError(f"the model's task is a program, {config.task}: name it, if it "
                         "may run (--task; eval.py: --tasks; RLM: task)")
    return given or config.task
