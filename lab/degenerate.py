"""Does training end what is no answer? `python -m lab.degenerate NAME [flags of train.py]`

In half of the scripted trees of the warm-up, the root does one of POLICIES instead of the
task. GRPO has to lower their share of the sampled trees. Printed are that share and the
mean reward, in the first step and in the last five. Give the warm-up of a run as --model,
and some more supervised steps: --warmup-steps 100 --warmup-lr 1e-3. With --task evidence an
echo pays a little; of notes all of these score 0.
"""
import random
import sys

from runtime import console
import tasks
import train
from tasks.in_repl import block
from tree import Rollout

POLICIES = {
    "echo": "FINAL(list(context.values()))",
    "letters": "FINAL(list('abcdefghijklmnopqrstuvwxyz'))",
    "flood": "FINAL(rlm_query_batched('Go.', [''] * 40))",
    "constant": "FINAL('The')",
    "endless": "print(1)",
    "at_once": "FINAL('')",
}
SHARE = 0.5  # of the scripted trees


def mix_in(name: str) -> None:
    """From here on, scripted roots do this in place of the task, in every other tree."""
    honest = tasks.demonstrate

    def demonstrate(task, node, rng, alone=False):
        if not node.depth and random.Random(task.id).random() < SHARE:
            return block(POLICIES[name])
        return honest(task, node, rng, alone)

    tasks.demonstrate = demonstrate


def share(trees: list[Rollout], name: str) -> float:
    """The share of trees whose root begins with this policy."""
    first = [next(turn.text for turn in tree.root.turns if turn.role == "assistant")
             for tree in trees if not tree.failed]
    return first.count(block(POLICIES[name])) / len(first)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in POLICIES:
        sys.exit(f"lab.degenerate: give one of {', '.join(POLICIES)}, then flags of "
                 "train.py")
    name = sys.argv.pop(1)
    mix_in(name)
    collect, steps = train.Trainer.collect, []

    def collect_and_count(trainer, step):
        trees = collect(trainer, step)
        rewards = [tree.reward for tree in trees if not tree.failed]
        steps.append((share(trees, name), sum(rewards) / len(rewards)))
        return trees

    train.Trainer.collect = collect_and_count
    try:
        train.main()
    finally:  # also of a run without a gradient, which ends with status 1
        if steps:
            last = [sum(values) / len(values) for values in zip(*steps[-5:])]
            print(f"{name}: share {steps[0][0]:.2f} in the first step, {last[0]:.2f} in "
                  f"the last five; reward {steps[0][1]:.2f}, {last[1]:.2f}")


if __name__ == "__main__":
    console.start(main)
