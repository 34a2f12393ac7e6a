"""Scores methods on questions, with their cost and a 95 % interval.

    python eval.py --model DIR                      a checkpoint on held-out questions
    python eval.py --model DIR --methods rlm1,direct,retrieval --lengths 2000,8000,32000
    python eval.py --policy oracle --tasks requests --lengths 128000     a script, no model

Every method gets the same questions, and training has seen none of them. Scores are means
with 95 % intervals, and methods are compared question by question. Trees that the machine
or a server lost are counted apart and stay out of the means.

Left out: several answers per question (pass@k), and differences of two models.
"""
import asyncio
import itertools
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import ModuleType

import engine  # noqa: F401  before torch: it says how torch's threads wait

import tasks
import util
from ask import Answering, policy_of
from config import RLMConfig, load_config, task_of
from repl import REPLError, trees_at_once
from rlm import rollout
from sampler import SamplerError
from tasks import Task
from tasks.questions import heldout_tasks, read, split
from tasks.scripts import scripted
from training import report
from training.scores import differences, record_of, summary, trained_as
from training.trees import Job, grow, side_by_side
from tree import Completion, Node, Rollout, write_rollouts
from util import flag, write_text

# The last three are in baselines/methods.py.
METHODS = ("rlm0", "rlm1", "rlm2", "direct", "compaction", "retrieval")


# ------------------------------------------------------------------------------------------
# Methods

def rlm_config_of(method: str, config: RLMConfig) -> RLMConfig:
    """The checkpoint's configuration, with REPLs down to the depth in the method's name; a
    root of rlm0 is alone. Raises ValueError where the checkpoint has no children."""
    depth = int(method.removeprefix("rlm"))
    if depth == 0:
        return replace(config, max_depth=0, max_nodes=1)
    if config.max_nodes == 1:
        raise ValueError(f"{method}: rlm.json says max_nodes 1, so there are no children")
    return replace(config, max_depth=depth)


# ------------------------------------------------------------------------------------------
# The command line

@dataclass(frozen=True)
class Evaluation:
    """What is asked, and how."""
    methods: str = flag("", f"some of {','.join(METHODS)}; empty: the rlm that the "
                            "checkpoint was trained as, else rlm1", common=True)
    policy: str = flag("", "the kind's script in place of a model", choices=("oracle",))
    tasks: str = flag(
        "", "kinds of questions, as a,b; each is a name or path/to/my_task.py; empty: what "
            "the checkpoint was trained on, if it is no file, else requests; with --data "
            "what its fields say", common=True)
    lengths: str = flag(
        "", "of contexts, as 8000,128k,1m: characters / 4, so about tokens; empty: the "
            "kind's usual length", common=True)
    data: str = flag("", "JSONL file of questions of the one kind in --tasks", common=True)
    split: str = flag("heldout", "questions kept from training, those of training, or all",
                      choices=("heldout", "train", "all"))
    n: int = flag(128, "questions per kind and length", 1, common=True)
    reward: str = flag("", "path/to/file.py[:function] that scores in place of the task")
    html: str = flag("", "write the report, one page, to this file")
    save: str = flag("", "write the trees to this JSONL file, after each line of the table")


@dataclass(frozen=True)
class EvalConfig(Evaluation, Answering):
    """All flags in one flat object."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.model or self.api or self.policy):
            raise ValueError("give one of --model DIR, --api URL, --policy oracle")
        if self.policy and self.api:
            raise ValueError("--policy oracle asks no server")
        if self.data and self.lengths:
            raise ValueError("--lengths is for generated questions, not for --data")
        lengths_of(self.lengths)
        for unknown in set(listed(self.methods)) - set(METHODS):
            raise ValueError(f"there is no method {unknown}")


def listed(text: str) -> list[str]:
    """The parts of "a,b"; none of ""."""
    return text.split(",") if text else []


def lengths_of(text: str) -> list[int | None]:
    """[8000, 1000000] of "8000,1m"; None is the usual length. Raises ValueError."""
    if not re.fullmatch(r"(\d+[km]?(,|$))*", text):
        raise ValueError(f"--lengths cannot be {text!r}")
    return [int(part.replace("k", "000").replace("m", "000000"))
            for part in listed(text)] or [None]


def questions_of(flags: EvalConfig, kind: ModuleType, length: int | None) -> list:
    """The questions of a task: of --data the side that --split names, or generated."""
    if not flags.data:
        return heldout_tasks(flags.n, kind, flags.seed, length=length,
                             heldout=flags.split != "train")
    rows = read(flags.data, kind)
    if flags.split != "all":
        trained, heldout = split(rows)
        rows = trained if flags.split == "train" else heldout
    return rows[:flags.n]


async def answer(method: str, task: Task, policy, tokenizer, config: RLMConfig, key: tuple,
                 reward: Callable | None = None) -> tuple[dict, Rollout]:
    """Answer a question. Returns the record, with tokens and seconds, and the tree."""
    used: Counter = Counter()  # tokens: prompt, sampled
    begun = time.monotonic()
    made_by = rollout
    if method.startswith("rlm"):
        config = rlm_config_of(method, config)
    else:
        from baselines import methods
        made_by = partial(methods.answer, method)

    async def counted(node: Node, max_tokens: int, key: tuple) -> Completion:
        done = await policy(node, max_tokens, key)
        used.update(done.usage)
        return done

    tree = Rollout(task, task.id, *await grow(
        Job(task, key), counted, tokenizer, config, reward, made_by))
    return record_of(tree) | {"in": used["prompt"], "out": used["sampled"],
                              "seconds": round(time.monotonic() - begun, 3)}, tree


def measure(flags: EvalConfig) -> None:
    """Put every question to every method, and print the scores."""
    config = load_config(flags.model, math.inf, flags.sandbox, flags.rlm)
    specs = listed(flags.tasks) or [task_of(config)]
    if flags.data and not flags.tasks and not hasattr(tasks.load(config.task), "read"):
        specs = [""]  # what it was trained on reads no files: the rows decide
    loaded = [tasks.load(spec, flags.data) for spec in specs]
    kinds = {tasks.name_of(kind): kind for kind in loaded}
    for name in kinds:
        for function in filter(None, (flags.policy, "score")):
            util.function_of(kinds[name], function)
    for path in filter(None, (flags.save, flags.html)):
        if not os.path.isdir(os.path.dirname(path) or "."):
            raise ValueError(f"{path}: there is no such directory")
    reward = util.load_function(flags.reward, "score") if flags.reward else None
    lengths, policy, tokenizer = lengths_of(flags.lengths), None, None
    if flags.model or flags.api:
        policy, tokenizer, config = policy_of(flags, batch=96)
    methods = listed(flags.methods) or [trained_as(config)]
    at_once = min(8 if flags.api else 64, trees_at_once(config.max_nodes))

    async def one(cell: tuple, number: int, task: Task) -> tuple[dict, Rollout]:
        chosen = policy
        if flags.policy:
            oracle = kinds[task.kind].oracle
            chosen = scripted(lambda node, key: oracle(task, node), tokenizer)
        record, tree = await answer(cell[2], task, chosen, tokenizer, config,
                                    (flags.seed, *cell, number), reward)
        # A seed gives the context again.
        return record, replace(tree, task=replace(task, context=None))

    print(report.HEAD)
    cells, rows, trees = {}, [], {}
    for cell in itertools.product(kinds, lengths, methods):
        questions = questions_of(flags, kinds[cell[0]], cell[1])
        todo = [(cell, number, task) for number, task in enumerate(questions)]
        label = f"{cell[0]} {cell[2]}"
        answers = asyncio.run(side_by_side(one, todo, at_once, label))
        cells[cell] = [record for record, _ in answers]
        rows.append(summary(cells[cell], *cell))
        print(report.table_line(rows[-1]))
        for why in sorted({record["failed"] for record in cells[cell]} - {""})[:3]:
            print(f"  failed: {why:.200}")
        name = " ".join(str(part) for part in cell if part is not None)
        trees |= {f"{name} {i}": tree for i, (_, tree) in enumerate(answers)}
        if flags.save:
            write_rollouts(flags.save, trees.values())

    pairs = differences(cells)
    for pair in pairs:
        print(report.difference_line(pair))
    if flags.html:
        steps = {"": report.of_trees(trees.items(), tokenizer)}
        shown = asdict(replace(flags, html="", save=""))
        write_text(flags.html, report.page("Evaluation", shown, rows, steps,
                                           differences=pairs))
    if not any(row["n"] for row in rows):
        raise REPLError("no question could be scored")


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)  # a file shows each line at once, too
    try:
        measure(util.read_flags(
            "Score methods on questions.", EvalConfig,
            {"what is asked": Evaluation, "who answers": Answering}))
    except KeyboardInterrupt:
        sys.exit("eval.py: interrupted")
    except (OSError, ValueError, ImportError, SamplerError, REPLError) as error:
        if util.is_theirs(error):
            raise
        sys.exit(f"eval.py: {error}")


if __name__ == "__main__":
    main()
