"""Scores methods on questions, with their cost and a 95 % interval.

    python eval.py --model DIR                      a checkpoint on held-out questions
    python eval.py --model DIR --methods rlm1,direct,retrieval --lengths 2000,8000,32000
    python eval.py --model DIR --samples 8                      what GRPO would see of it
    python eval.py --model DIR --against trees.jsonl            better than what was saved?
    python eval.py --policy oracle --tasks requests --lengths 128000     a script, no model

Every method gets the same questions, and training has seen none of them. Scores are means
with 95 % intervals, and methods are compared question by question. Trees that the machine
or a server lost are counted apart and stay out of the means.
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
from config import RLMConfig, load_config, trained_task
from repl import REPLError, trees_at_once
from rlm import grow
from tasks import Question
from training.questions import heldout_questions, read, split
from training.scripts import message_of, scripted
from training import report
from training.scores import by_question, differences, record_of, summary, method_of
from training.trees import attempt, side_by_side
from tree import Completion, Node, Tree, read_trees, write_trees
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
    policy: str = flag("", "the task's script in place of a model", choices=("oracle",))
    tasks: str = flag(
        "", "tasks, as a,b; each is a name or path/to/my_task.py; empty: what "
            "the checkpoint was trained on, if it is no file, else requests; with --data "
            "what its fields say", common=True)
    lengths: str = flag(
        "", "of contexts, as 8000,128k,1m: characters / 4, so about tokens; empty: the "
            "task's usual length", common=True)
    data: str = flag("", "JSONL file of questions of the one task in --tasks", common=True)
    split: str = flag("heldout", "questions kept from training, those of training, or all",
                      choices=("heldout", "train", "all"))
    n: int = flag(128, "questions per task and length", 1, common=True)
    samples: int = flag(1, "trees per question; above 1 also: what the best of k score, "
                           "and what GRPO would see", 1, common=True)
    against: str = flag("", "trees that an earlier --save wrote, by one method: prints the "
                            "difference, question by question", common=True)
    reward: str = flag("", "path/to/file.py[:function]: a reward, shown under the score")
    html: str = flag("", "write the report, one page, to this file")
    save: str = flag("", "write the trees to this JSONL file, after each line of the table")


@dataclass(frozen=True)
class EvalConfig(Evaluation, Answering):
    """All flags in one flat object."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.model or self.api or self.policy):
            raise ValueError("give one of --model DIR, --api URL, --policy oracle")
        if self.samples > 1 and not self.temperature:
            raise ValueError("at --temperature 0 all --samples of a question are the same")
        if self.data and self.lengths:
            raise ValueError("--lengths is for generated questions, not for --data")
        if self.split == "all" and not self.data:
            raise ValueError("--split all is for --data, not for generated questions")
        lengths_of(self.lengths)
        for unknown in set(listed(self.methods)) - set(METHODS):
            raise ValueError(f"there is no method {unknown}")


def listed(text: str) -> list[str]:
    """The parts of "a,b"; none of ""."""
    return text.split(",") if text else []


def lengths_of(text: str) -> list[int | None]:
    """[8000, 1000000] of "8000,1m"; None is the usual length. Raises ValueError."""
    if not re.fullmatch(r"(\d+[km]?(,\d+[km]?)*)?", text):
        raise ValueError(f"--lengths cannot be {text!r}")
    return [int(part.replace("k", "000").replace("m", "000000"))
            for part in listed(text)] or [None]


def questions_of(flags: EvalConfig, task: ModuleType, length: int | None) -> list:
    """The questions of a task: of --data the side that --split names, or generated."""
    if not flags.data:
        return heldout_questions(flags.n, task, flags.seed, length=length,
                             heldout=flags.split != "train")
    rows = read(flags.data, task)
    if flags.split != "all":
        trained, heldout = split(rows)
        rows = trained if flags.split == "train" else heldout
    return rows[:flags.n]


def earlier(path: str, questions: dict[tuple, list[Question]]) -> dict[tuple, dict]:
    """The scores of saved trees, `by_question`, beside each cell of `questions`: as
    {(task, length, path): scores}. Raises ValueError if they do not answer the same
    questions, or by more than one method."""
    trees = read_trees(path, Question)
    asked = {question.id for part in questions.values() for question in part}
    answered = {tree.question.id for tree in trees}
    if asked != answered:
        raise ValueError(
            f"{path} does not answer the same questions: {len(asked & answered)} of its "
            f"{len(answered)} are among the {len(asked)} that are asked now")
    if len({tree.group for tree in trees}) > len(answered):
        raise ValueError(f"{path} has answers of several methods: save one alone")
    scores = by_question([record_of(tree) for tree in trees])
    return {(*of, path): scores for of in questions}


async def answer(method: str, question: Question, policy, tokenizer, config: RLMConfig,
                 key: tuple, reward: Callable | None = None) -> tuple[dict, Tree]:
    """Answer a question. Returns the record, with tokens and seconds, and the tree."""
    used: Counter = Counter()  # tokens: prompt, sampled
    begun = time.monotonic()
    made_by = grow
    if method.startswith("rlm"):
        config = rlm_config_of(method, config)
    else:
        from baselines import methods
        made_by = partial(methods.answer, method)

    async def counted(node: Node, max_tokens: int, key: tuple) -> Completion:
        done = await policy(node, max_tokens, key)
        used.update(done.usage)
        return done

    grown = partial(made_by, question, counted, tokenizer, config, key)
    grown = await attempt(grown, question, reward)
    tree = Tree(question, f"{method} {question.id}", *grown)
    return record_of(tree) | {"in": used["prompt"], "out": used["sampled"],
                              "seconds": round(time.monotonic() - begun, 3)}, tree


def measure(flags: EvalConfig) -> None:
    """Put every question to every method, and print the scores."""
    config = load_config(flags.model, math.inf, flags.sandbox, flags.rlm)
    by_rows = flags.data and not util.is_path(config.task)
    specs = listed(flags.tasks) or ["" if by_rows else trained_task(config)]
    loaded = [tasks.load(spec, flags.data) for spec in specs]
    asked = {tasks.name_of(task): task for task in loaded}
    for name in asked:
        for function in filter(None, (flags.policy, "score")):
            util.function_of(asked[name], function)
    for path in filter(None, (flags.save, flags.html)):
        if not os.path.isdir(os.path.dirname(path) or "."):
            raise ValueError(f"{path}: there is no such directory")
    reward = util.load_function(flags.reward, "score(question, answer, root)")
    questions = {(name, length): questions_of(flags, task, length)
                 for name, task in asked.items() for length in lengths_of(flags.lengths)}
    before = earlier(flags.against, questions) if flags.against else {}
    policy, tokenizer = None, None
    if flags.model or flags.api:
        policy, tokenizer, config = policy_of(flags, batch=96)
    methods = listed(flags.methods) or [method_of(config)]
    at_once = min(8 if flags.api else 64, trees_at_once(config.max_nodes))

    async def one(method: str, question: Question, key: tuple) -> tuple[dict, Tree]:
        chosen = policy
        if flags.policy:
            oracle = asked[question.task].oracle
            chosen = scripted(
                lambda node, key: message_of(oracle, question, node), tokenizer)
        record, tree = await answer(
            method, question, chosen, tokenizer, config, key, reward)
        # A seed gives the context again.
        return record, replace(tree, question=replace(question, context=None))

    table, cells, trees = [], {}, {}

    def say(lines: str) -> None:
        print(lines)
        table.append(lines)

    say(report.HEAD)
    for of, method in itertools.product(questions, methods):
        cell = (*of, method)
        todo = [(method, question, (flags.seed, *cell, i * flags.samples + n))
                for i, question in enumerate(questions[of]) for n in range(flags.samples)]
        answers = asyncio.run(side_by_side(one, todo, at_once, f"{of[0]} {method}"))
        records = [record for record, _ in answers]
        cells[cell] = by_question(records)
        say(report.table_lines(summary(records, *cell)))
        if flags.samples > 1 and cells[cell]:
            rewards = by_question(records, "reward")
            say(report.sample_lines(rewards.values(), flags.samples))
        for why in sorted({record["failed"] for record in records} - {""})[:3]:
            say(report.note(f"failed: {why:.200}"))
        name = " ".join(str(part) for part in cell if part is not None)
        trees |= {f"{name} {i}": tree for i, (_, tree) in enumerate(answers)}
        if flags.save:
            write_trees(flags.save, trees.values())

    for pair in differences(cells | before):
        say(report.difference_line(pair))
    if flags.html:
        steps = {"": report.of_trees(trees.items(), tokenizer)}
        shown = asdict(replace(flags, html="", save=""))
        write_text(flags.html, report.page(
            "Evaluation", shown, "\n".join(table), steps))
    if not any(cells.values()):
        raise REPLError("no question could be scored")


def main() -> None:
    try:
        measure(util.read_flags(
            "Score methods on questions.", EvalConfig,
            {"what is asked": Evaluation, "who answers": Answering}))
    except KeyboardInterrupt:
        sys.exit("eval.py: interrupted")
    except (OSError, ValueError, ImportError, REPLError) as error:
        if util.is_theirs(error):
            raise
        sys.exit(f"eval.py: {error}")


if __name__ == "__main__":
    main()
