"""A group of trees as one picture: who gets which advantage.

    python -m experiments.picture OUT.svg RUN/warmup

Samples eight trees for the first held-out question of `notes` to which one tree of the
eight gives the right answer and another one nothing right. Each tree is drawn with its root
on top, each node in the colour of its advantage. Of the best tree one child is shown with
what it saw and wrote.
"""
import asyncio
import sys
from html import escape

import engine  # before torch: it says how torch's threads wait

import grpo
import rlm
import tasks
from tasks.questions import heldout_tasks
from tree import Node, Rollout
from util import write_text

GROUP = 8
BAD, ZERO, GOOD = (217, 119, 6), (150, 150, 150), (37, 122, 213)  # orange, grey, blue
WIDTH, CELL, ROW, TOP = 480, 120, 92, 50  # one tree takes CELL x ROW
STYLE = ("text{font:12px sans-serif;fill:#222}.code{font-family:monospace}"
         "path{fill:none;stroke:#888}@media(prefers-color-scheme:dark){text{fill:#eee}}")


def sampled(path: str) -> list[Rollout]:
    model = rlm.RLM(path, batch=GROUP)
    for number, task in enumerate(heldout_tasks(100, tasks.load("notes"))):
        trees = asyncio.run(rlm.collect([task] * GROUP, model.policy, model.tokenizer,
                                        model.config, ("picture", number)))
        rewards = [tree.reward for tree in trees]
        if min(rewards) == 0 and max(rewards) == 1:
            return trees
    raise ValueError(f"{path}: no question has both right and wrong answers")


def picture(trees: list[Rollout]) -> str:
    credit = grpo.credit(trees, grpo.GRPOConfig())
    advantage = {node: given.advantages[0] for node, given in credit.items()}
    trees = sorted(trees, key=lambda tree: -tree.reward)
    parts = [text(WIDTH / 2, 18, f"{len(trees)} answers to: {trees[0].task.query}")]
    for i, tree in enumerate(trees):
        parts += drawn(tree, advantage, CELL * (i % 4) + CELL / 2, TOP + ROW * (i // 4))

    y = TOP + ROW * ((len(trees) + 3) // 4)
    parts += [text(WIDTH / 2, y, "reward of a root → advantage of it and its children"),
              text(WIDTH / 2 - 92, y + 17, "made less likely", "end"),
              text(WIDTH / 2 + 92, y + 17, "made more likely", "start")]
    for i in range(-10, 11):
        parts.append(f'<rect x="{WIDTH / 2 + 8 * i - 4:g}" y="{y + 8}" width="8" '
                     f'height="8" fill="{colour(i / 10)}"/>')
    y += 42
    for child in trees[0].root.children[:1]:
        parts.append(text(12, y, "The first child of the first tree:", "start"))
        for line in said(child):
            y += 16
            parts.append(text(24, y, line[:60], "start", "code"))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 10}">'
            f"<style>{STYLE}</style>{''.join(parts)}</svg>\n")


def drawn(tree: Rollout, advantage: dict[Node, float], x: float, y: float) -> list[str]:
    """The root at (x, y), its children below it, then the reward."""
    root, children = tree.root, tree.root.children
    step = min(26, (CELL - 16) / max(1, len(children)))
    left = x - step * (len(children) - 1) / 2
    parts = []
    for i, child in enumerate(children):
        at, below = left + step * i, y + 32
        parts += [f'<path d="M{x:g} {y:g}L{at:g} {below:g}"/>',
                  circle(at, below, 6, advantage.get(child, 0.0))]
    own = advantage.get(root, 0.0)
    below = f"{tree.reward:.2f} → {own:+.1f}"
    return [*parts, circle(x, y, 9, own), text(x, y + 56, below)]


def said(node: Node) -> list[str]:
    """What a node wrote (») and was shown (·), without fences and repeated questions."""
    lines = []
    for turn in node.turns[2:]:
        shown = [line for line in turn.text.split("\n") if not line.startswith("```")]
        if turn.role == "assistant":
            lines += [f"» {line}" for line in shown]
        else:
            lines.append(f"· {shown[0]}")
    return lines


def colour(advantage: float) -> str:
    """Grey at 0, full at 1 and beyond."""
    end, share = GOOD if advantage > 0 else BAD, min(1.0, abs(advantage))
    return f"rgb{tuple(round(a + share * (b - a)) for a, b in zip(ZERO, end))}"


def circle(x: float, y: float, radius: int, advantage: float) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="{radius}" fill="{colour(advantage)}"/>'


def text(x: float, y: float, content: str, anchor: str = "middle", kind: str = "") -> str:
    return (f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}" '
            f'xml:space="preserve">{escape(content)}</text>')


if __name__ == "__main__":
    out, path = sys.argv[1:]
    write_text(out, picture(sampled(path)))
