"""What the warm-up imitates: scripts that play a question, or trees that were saved."""
import random
import re
from collections.abc import Callable

import tasks
import util
from tasks import Question
from tree import Completion, Node, Tree, read_trees


def scripted(script: Callable, tokenizer):
    """The policy that writes what script(node, key) returns, cut like a model's message.
    Without a tokenizer four characters count as a token."""
    async def policy(node: Node, max_tokens: int, key: tuple) -> Completion:
        text = script(node, key)
        ids = tuple(tokenizer.message(text)) if tokenizer else ()
        sampled = len(ids) or len(text) // 4
        if sampled > max_tokens:
            sampled, ids = max_tokens, ids[:max_tokens]
            text = tokenizer.decode(ids) if tokenizer else text[:4 * max_tokens]
        size = sum(len(m.ids) or len(m.text) // 4 for m in node.messages)
        usage = {"prompt": size, "sampled": sampled}
        return Completion(text, ids, (0.0,) * len(ids), usage)
    return policy


def script_policy(questions: list[Question], tokenizer, seed, alone: bool):
    """The policy that writes what the scripts of a task say, or its oracle where there are
    none. The scripts of a node are drawn from (seed, the number of its tree, its path), so
    a node keeps its strategy. `alone` asks for those without calls. Raises ValueError if
    there are none."""
    task, name = tasks.task_of(questions[0]), questions[0].task
    if not (hasattr(task, "demonstrate") or hasattr(task, "oracle")):
        raise ValueError(f"the task {name} has no scripts to learn from: give --model, and "
                         "--warmup FILE or --warmup-steps 0")

    def script(node: Node, key: tuple) -> str:
        *_, number, path, turn = key
        rng = random.Random(f"{(seed, number)} {path}")
        for _ in range(100):
            if hasattr(task, "demonstrate"):
                message = message_of(task.demonstrate, questions[number], node, rng)
            else:
                message = message_of(task.oracle, questions[number], node)
            if not (alone and re.search(r"\b(rlm|llm)_query", message)):
                return message
        raise ValueError(f"the task {name} has no script that calls nobody")

    return scripted(script, tokenizer)


def message_of(script: Callable, *arguments) -> str:
    """What a task's script writes. Raises ValueError if that is no text."""
    message = script(*arguments)
    util.expect(isinstance(message, str), script, message, "the text of a message")
    return message


def saved_trees(path: str) -> list[Tree]:
    """The saved trees that are fit to learn from: an answer, no REPL error, a reward above
    0. Raises ValueError if there are none."""
    saved = read_trees(path, Question)
    trees = []
    for tree in saved:
        errors = any(node.errors for node in tree.root.walk())
        if tree.root.end == "final" and tree.reward > 0 and not tree.failed and not errors:
            trees.append(tree)
    if not trees:
        raise ValueError(f"{path}: none of its {len(saved)} trees ended with an answer, "
                         "without an error, with a reward above 0")
    print(f"{path}: {len(trees)} of {len(saved)} trees are fit to learn from")
    return trees
