"""Many trees at once: grown side by side, shared out over the ranks, and scored."""
import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tqdm import tqdm

import tasks
import util
from config import RLMConfig
from engine.parallel import World
from repl import REPLError, trees_at_once
from rlm import grow
from tasks import Question
from tree import Lost, Node, Refused, Tree, Unscored

EVERY_SECONDS = 30.0  # between lines of progress, where nobody sees a bar


async def collect(questions: list[Question], policy, tokenizer, config: RLMConfig,
                  key: tuple = (), group: int = 1, world: World | None = None,
                  at_once: int = 256, label: str = "",
                  reward: Callable | None = None) -> list[Tree]:
    """`group` trees for each question, in order, each with its reward. The sampling of a
    tree is seeded by `key` and its number. With a `world` each rank grows its share, and
    then all ranks have the same trees. Raises REPLError if every one of them failed."""
    todo = []
    for i, question in enumerate(questions):
        for n in range(i * group, (i + 1) * group):
            tree = partial(grow, question, policy, tokenizer, config, (*key, n))
            todo.append((tree, question, reward))
    if world:  # neighbours, as those of a question have a prompt in common
        ends = [len(todo) * rank // world.size for rank in (world.rank, world.rank + 1)]
        todo = todo[slice(*ends)]

    at_once = min(at_once, trees_at_once(config.max_nodes))
    grown = await side_by_side(attempt, todo, at_once, label)
    if world:  # every rank knows the questions, so only the trees are exchanged
        grown = [tree for part in world.gather(grown) for tree in part]
    trees = [Tree(questions[i // group], str(i // group), *tree)
             for i, tree in enumerate(grown)]
    if trees and all(tree.failed for tree in trees):
        raise REPLError(f"every tree failed: {trees[0].failed}")
    return trees


async def attempt(grown: Callable, question: Question,
                  reward: Callable | None = None) -> tuple[Node, float, str]:
    """One tree, as `await grown()` makes it: its root, its reward, and why it failed ("" if
    it did not). The reward is the task's score of the answer, which is kept as root.score;
    or `reward(question, answer, root)`. Both may be async.

    If the machine loses the tree, another is grown with the same key: a killed REPL server
    loses all trees. If that is lost too, if the question is refused, or if there is no
    score, the reward is 0. Such trees stay out of means and baselines."""
    for _ in range(2):
        try:
            root = await grown()
            break
        except (REPLError, Lost, OSError) as error:
            if util.is_theirs(error):
                raise
            failed = repr(error)
        except Refused as error:  # it would be refused again
            return Node(end="refused"), 0.0, f"refused: {error!s:.200}"
    else:
        return Node(end="failed"), 0.0, failed
    score = tasks.task_of(question).score
    try:
        root.score = given = await tasks.scored(score, question, root.answer)
        if reward:
            given = await tasks.scored(reward, question, root.answer, root)
    except Unscored as error:
        return root, 0.0, repr(error)
    return root, given, ""


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
