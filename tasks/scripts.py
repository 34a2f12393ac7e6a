"""What the warm-up imitates: scripts that play a question, or trees that were saved."""
import random

import tasks
from tasks import Task
from tree import Completion, Node, Rollout, read_rollouts


def script_policy(questions: list[Task], tokenizer, seed, alone: bool):
    """The policy that writes what the scripts of a kind say. The scripts of a node are
    drawn from (seed, the number of its tree, its path). `alone` asks for those that call
    nobody. Raises ValueError for a kind without scripts."""
    kind = tasks.of(questions[0])
    if not (hasattr(kind, "demonstrate") or hasattr(kind, "oracle")):
        raise ValueError(f"the task {questions[0].kind} has no scripts to learn from: give "
                         "--model, and --warmup FILE or --warmup-steps 0")

    async def policy(node: Node, max_tokens: int, key: tuple) -> Completion:
        *_, number, path, turn = key

        def script(task: Task, node: Node) -> str:
            rng = random.Random(f"{(seed, number)} {path}")
            return tasks.demonstrate(task, node, rng, alone)

        write = tasks.scripted(script, questions[number], tokenizer)
        return await write(node, max_tokens, key)

    return policy


def saved_trees(path: str, tokenizer) -> list[Rollout]:
    """The saved trees that are fit to learn from: an answer, no REPL error, a reward above
    0. Their texts are encoded anew. Raises ValueError if there are none."""
    saved = read_rollouts(path, Task)
    trees = []
    for tree in saved:
        errors = any(node.errors for node in tree.root.walk())
        if tree.root.end == "final" and tree.reward > 0 and not tree.failed and not errors:
            trees.append(tree)
    if not trees:
        raise ValueError(f"{path}: none of its {len(saved)} trees ended with an answer, "
                         "without an error, with a reward above 0")
    print(f"{path}: {len(trees)} of {len(saved)} trees are fit to learn from")
    for tree in trees:
        for node in tree.root.walk():
            node.turns = tokenizer.encode_turns(node.turns)
    return trees
