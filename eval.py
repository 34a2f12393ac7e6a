"""Scores methods on questions, with their cost and a 95 % interval.

    python eval.py --model DIR                      a checkpoint on held-out questions
    python eval.py --model DIR --methods rlm1,direct,retrieval --lengths 2000,8000,32000
    python eval.py --policy oracle --tasks requests --lengths 128000     a script, no model

Every method gets the same questions, and training has seen none of them. Scores are means
with 95 % intervals, and methods are compared question by question. Trees that the machine
or a server lost are counted apart and stay out of the means.

Left out: several answers per question (pass@k), and differences of two models.
"""
import argparse
import asyncio
import itertools
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType

import engine  # before torch: it says how torch's threads wait

import rlm
import tasks
import util
from repl import REPLError, trees_at_once
from rlm import RLMConfig, side_by_side
from sampler import SamplerError
from tasks import Task
from tasks.questions import heldout_tasks, read, split
from tasks.scripts import scripted
from training import report
from training.scores import differences, record_of, summary, trained_as
from tree import Completion, Node, Rollout, Sampling, write_rollouts
from util import write_text

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

def read_flags() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def lengths(text: str) -> list[int]:
        return [int(part.replace("k", "000").replace("m", "000000"))
                for part in names(text)]

    parser = util.parser("Score methods on questions.")
    add = parser.add_argument
    only = parser.add_mutually_exclusive_group().add_argument
    only("--model", help="checkpoint directory")
    only("--api", metavar="URL", help="as http://localhost:8000/v1; key: OPENAI_API_KEY")
    add("--api-model", metavar="NAME", help="the server's model")
    add("--policy", choices=("oracle",), help="the kind's script in place of a model")
    add("--methods", type=names, help=f"some of {','.join(METHODS)} (default: the rlm that "
        "the checkpoint was trained as, else rlm1)")
    add("--temperature", type=float, default=1.0, help="0 is greedy (default 1.0)")
    add("--top-p", type=float, default=1.0, help="share to sample from (default 1.0: all)")
    add("--sandbox", default="auto", choices=rlm.CHOICES["sandbox"],
        help="namespaces around the REPL (default auto: where possible)")
    add("--tasks", type=names, help="kinds of questions, as a,b; each is a name or "
        "path/to/my_task.py (default: what the checkpoint was trained on, if it is no "
        "file, else requests; with --data what its fields say)")
    add("--rlm", default="", help="file with fields of rlm.json, in place of the model's")
    add("--lengths", type=lengths, default=[None], help="of contexts, as 8000,128k,1m: "
        "characters / 4, so about tokens (default: the kind's usual length)")
    add("--data", help="JSONL file of questions of the one kind in --tasks")
    add("--split", default="heldout", choices=("heldout", "train", "all"),
        help="questions kept from training (the default), those of training, or all")
    add("--n", type=int, default=128, help="questions per kind and length (default 128)")
    add("--seed", type=int, default=0, help="of questions and sampling (default 0)")
    add("--reward", help="file.py or file.py:function that scores in place of the task")
    add("--html", help="write the report, one page, to this file")
    add("--save", help="write the trees to this JSONL file, after each line of the table")
    args = parser.parse_args()
    if not (args.model or args.policy or args.api and args.api_model):
        parser.error("needs --model DIR, or --api URL with --api-model, or --policy oracle")
    if args.policy and args.api:
        parser.error("--policy oracle asks no server")
    if args.data and args.lengths != [None]:
        parser.error("--lengths is for generated questions, not for those of --data")
    for unknown in set(args.methods or ()) - set(METHODS):
        parser.error(f"there is no method {unknown}")
    return args


def questions_of(args: argparse.Namespace, kind: ModuleType, length: int | None) -> list:
    """The questions of a task: of --data the side that --split names, or generated."""
    if not args.data:
        return heldout_tasks(args.n, kind, args.seed, length=length,
                             heldout=args.split != "train")
    rows = read(args.data, kind)
    if args.split != "all":
        trained, heldout = split(rows)
        rows = trained if args.split == "train" else heldout
    return rows[:args.n]


async def answer(method: str, task: Task, policy, tokenizer, config: RLMConfig, key: tuple,
                 score: Callable = tasks.reward) -> tuple[dict, Rollout]:
    """Answer a question. Returns the record, with tokens and seconds, and the tree."""
    used: Counter = Counter()  # tokens: prompt, sampled
    begun = time.monotonic()
    grow = rlm.rollout
    if method.startswith("rlm"):
        config = rlm_config_of(method, config)
    else:
        from baselines import methods
        grow = partial(methods.answer, method)

    async def counted(node: Node, max_tokens: int, key: tuple) -> Completion:
        done = await policy(node, max_tokens, key)
        used.update(done.usage)
        return done

    job = rlm.Job(task, key, task.id)
    rollout = await rlm.scored_rollout(job, counted, tokenizer, config, score, grow)
    return record_of(rollout) | {"in": used["prompt"], "out": used["sampled"],
                                 "seconds": round(time.monotonic() - begun, 3)}, rollout


def measure(args: argparse.Namespace) -> None:
    """Put every question to every method, and print the scores."""
    tokenizer = None
    config = rlm.load_config(args.model or "", math.inf, args.sandbox, args.rlm)
    specs = args.tasks or [rlm.task_of(config)]
    if args.data and not args.tasks and not hasattr(tasks.load(config.task), "read"):
        specs = [""]  # what it was trained on reads no files: the rows decide
    loaded = [tasks.load(spec, args.data) for spec in specs]
    kinds = {tasks.name_of(kind): kind for kind in loaded}
    for name in kinds:
        for function in filter(None, (args.policy, not args.reward and "score")):
            util.function_of(kinds[name], function)
    for path in filter(None, (args.save, args.html)):
        if not os.path.isdir(os.path.dirname(path) or "."):
            raise ValueError(f"{path}: there is no such directory")
    score = util.load_function(args.reward, "score") if args.reward else tasks.reward
    policy, sampling = None, Sampling(args.temperature, args.top_p)
    if args.api:
        from baselines.api import API
        policy = API(args.api, args.api_model, sampling)
    elif args.model:
        model = rlm.RLM(
            args.model, sampling, args.seed, args.sandbox, 96, args.rlm)
        config, tokenizer, policy = model.config, model.tokenizer, model.policy
    args.methods = args.methods or [trained_as(config)]
    at_once = min(8 if args.api else 64, trees_at_once(config.max_nodes))

    async def one(cell: tuple, number: int, task: Task) -> tuple[dict, Rollout]:
        chosen = policy
        if args.policy:
            oracle = kinds[task.kind].oracle
            chosen = scripted(lambda node, key: oracle(task, node), tokenizer)
        record, rollout = await answer(cell[2], task, chosen, tokenizer, config,
                                       (args.seed, *cell, number), score)
        # A seed gives the context again.
        return record, replace(rollout, task=replace(task, context=None))

    print(report.HEAD)
    cells, rows, trees = {}, [], {}
    for cell in itertools.product(kinds, args.lengths, args.methods):
        questions = questions_of(args, kinds[cell[0]], cell[1])
        todo = [(cell, number, task) for number, task in enumerate(questions)]
        label = f"{cell[0]} {cell[2]}"
        answers = asyncio.run(side_by_side(one, todo, at_once, label))
        cells[cell] = [record for record, _ in answers]
        rows.append(summary(cells[cell], *cell))
        print(report.table_line(rows[-1]))
        for why in sorted({record["failed"] for record in cells[cell]} - {""})[:3]:
            print(f"  failed: {why:.200}")
        name = " ".join(str(part) for part in cell if part is not None)
        trees |= {f"{name} {i}": rollout for i, (_, rollout) in enumerate(answers)}
        if args.save:
            write_rollouts(args.save, trees.values())

    pairs = differences(cells)
    for pair in pairs:
        print(report.difference_line(pair))
    if args.html:
        settings = {name: value for name, value in vars(args).items()
                    if name not in ("html", "save")}
        packed = report.pack(trees.items(), tokenizer)
        write_text(args.html, report.page("Evaluation", settings, rows, {"": packed},
                                          differences=pairs))
    if not any(row["n"] for row in rows):
        raise REPLError("no question could be scored")


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)  # a file shows each line at once, too
    args = read_flags()
    try:
        measure(args)
    except KeyboardInterrupt:
        sys.exit("eval.py: interrupted")
    except (OSError, ValueError, ImportError, SamplerError, REPLError) as error:
        if util.is_theirs(error):
            raise
        sys.exit(f"eval.py: {error}")


if __name__ == "__main__":
    main()
