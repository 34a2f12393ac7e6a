"""Many trees at once: grown side by side, shared out over the ranks, and scored."""
import asyncio
import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tqdm import tqdm

import tasks
import util
from config import RLMConfig
from engine.parallel import World
from repl import REPLError, trees_at_once
from rlm import rollout
from tasks import Task
from tree import Lost, Node, Refused, Rollout, Unscored

EVERY_SECONDS = 30.0  # between lines of progress, where nobody sees a bar


@dataclass(frozen=True)
class Job:
    """One tree that is to be grown."""
    task: Task
    key: tuple = ()  # seeds the sampling; no two trees of a run have the same
    group: str = ""  # the trees of one question


def jobs(questions: list[Task], key: tuple = (), times: int = 1) -> list[Job]:
    """`times` trees for each question. A key ends with the number of its tree."""
    return [Job(task, (*key, i * times + n), str(i))
            for i, task in enumerate(questions) for n in range(times)]


async def collect(todo: list[Job], policy, tokenizer, config: RLMConfig,
                  world: World | None = None, at_once: int = 256, label: str = "",
                  reward: Callable | None = None) -> list[Rollout]:
    """Each tree with its reward, in order. With a `world` each rank grows its share, and
    then all ranks have the same trees."""
    share = world.share(todo) if world else todo
    at_once = min(at_once, trees_at_once(config.max_nodes))
    one = partial(grow, policy=policy, tokenizer=tokenizer, config=config, reward=reward)
    grown = await side_by_side(one, [(job,) for job in share], at_once, label)
    if world:  # every rank knows the questions, so only the trees are exchanged
        grown = [tree for part in world.gather(grown) for tree in part]
    return [Rollout(job.task, job.group, *tree)
            for job, tree in zip(todo, grown, strict=True)]


def some_left(rollouts: list[Rollout]) -> list[Rollout]:
    """The rollouts. Raises REPLError if every one of them is lost."""
    if all(rollout.failed for rollout in rollouts):
        raise REPLError(f"every tree was lost: {rollouts[0].failed}")
    return rollouts


async def grow(job: Job, policy, tokenizer, config: RLMConfig,
               reward: Callable | None = None,
               method: Callable = rollout) -> tuple[Node, float, str]:
    """One tree, made by `method`: its root, its reward, and why it failed ("" if it did
    not).

    If the machine loses the tree, another is grown with the same key: a killed REPL server
    loses all trees. If that is lost too, if the question is refused, or if there is no
    score, the reward is 0. Such trees stay out of means and baselines."""
    for _ in range(2):
        try:
            root = await method(job.task, policy, tokenizer, config, job.key)
            break
        except (REPLError, Lost, OSError) as error:
            if util.is_theirs(error):
                raise
            failed = repr(error)
        except Refused as error:  # it would be refused again
            return Node(end="refused"), 0.0, f"refused: {error!s:.200}"
    else:
        return Node(end="failed"), 0.0, failed
    try:
        return root, await reward_of(root, job.task, reward), ""
    except Unscored as error:
        return root, 0.0, repr(error)


async def reward_of(root: Node, task: Task, reward: Callable | None = None) -> float:
    """The task's score of the answer, or `reward(task, answer, root)` in its place, plain
    or async. Then the task's own score is kept as root.score. Raises ValueError if a score
    is not finite."""
    async def number(function: Callable, *arguments) -> float:
        value = function(*arguments)
        if inspect.isawaitable(value):
            value = await value
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"the score of {task.id} is {value!r}, no finite number")
        return float(value)

    own = await number(tasks.of(task).score, task, root.answer)
    if reward is None:
        return own
    root.score = own
    return await number(reward, task, root.answer, root)


async def side_by_side(one: Callable, items: list[tuple], at_once: int, label: str) -> list:
    """`await one(*item)` for all items, in order, up to `at_once` at a time. Without a
    label there is no bar. Where stderr is no terminal, lines take its place."""
    gate, done = asyncio.Semaphore(at_once), []
    printed_at = time.monotonic()

    async def gated(item: tuple) -> Any:
        nonlocal printed_at
        async with gate:
            result = await one(*item)
        bar.update()
        done.append(item)
        if label and bar.disable and time.monotonic() - printed_at > EVERY_SECONDS:
            printed_at = time.monotonic()
            print(f"{label}: {len(done)} of {len(items)}")
        return result

    hidden = None if label else True  # None: shown in a terminal
    with tqdm(total=len(items), desc=label, leave=False, disable=hidden) as bar:
        return await asyncio.gather(*map(gated, items))
