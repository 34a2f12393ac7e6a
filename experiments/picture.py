"""A group of trees as one picture: who gets which advantage.

    python -m experiments.picture TREES.jsonl OUT.svg

TREES.jsonl is written by tree.write_rollouts or `eval.py --save`. The first group with
unequal rewards is drawn, each node in the colour of its tree's advantage. The first
child of the best tree is shown as text.
"""
import sys
from html import escape

from grpo import GRPOConfig, advantages
from tasks import Task
from tree import Node, Rollout, read_rollouts, render
from util import write_text

BAD, ZERO, GOOD = (217, 119, 6), (150, 150, 150), (37, 122, 213)  # orange, grey, blue
WIDTH, CELL, LEVEL = 480, 120, 32  # of the picture, of a tree, from a node to its children
STYLE = ("text{font:12px sans-serif;fill:#888;text-anchor:middle}"
         ".code{font-family:monospace;text-anchor:start}line{stroke:#888}")


def main() -> None:
    saved, out = sys.argv[1:]
    trees = [tree for tree in read_rollouts(saved, Task) if not tree.failed]
    for group in dict.fromkeys(tree.group for tree in trees):
        members = [tree for tree in trees if tree.group == group]
        if len({tree.reward for tree in members}) > 1:
            write_text(out, picture(members))
            return
    sys.exit(f"{saved}: the trees of each group have the same reward")


def picture(trees: list[Rollout]) -> str:
    trees = sorted(trees, key=lambda tree: -tree.reward)
    parts = [text(WIDTH / 2, 18, f"{len(trees)} answers to: {trees[0].task.query}")]
    height = LEVEL * max(node.depth for tree in trees for node in tree.root.walk())
    for i, advantage in enumerate(advantages(trees, GRPOConfig())):  # four in a line
        x, y = CELL * (i % 4 + 0.5), 50 + (height + 60) * (i // 4)
        step = min(26, (CELL - 16) / leaves(trees[i].root))
        result = f"{trees[i].reward:.2f} → {advantage:+.1f}"
        parts += drawn(trees[i].root, x, y, step, colour(advantage))
        parts.append(text(x, y + height + 24, result))

    y += height + 60
    legend = "reward → advantage; orange nodes become less likely, blue ones more"
    parts.append(text(WIDTH / 2, y, legend))
    y += 10
    for child in trees[0].root.children[:1]:
        for line in render(child, width=56).splitlines():
            y += 16
            parts.append(text(12, y, line, "code"))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 10}" '
            f'xml:space="preserve"><style>{STYLE}</style>{"".join(parts)}</svg>')


def leaves(node: Node) -> int:
    return max(1, sum(map(leaves, node.children)))


def drawn(node: Node, x: float, y: float, step: float, fill: str) -> list[str]:
    """The node at (x, y) with its descendants below it, leaves `step` apart."""
    parts = []
    left = x - step * leaves(node) / 2
    for child in node.children:
        at = left + step * leaves(child) / 2
        left += step * leaves(child)
        parts.append(f'<line x1="{x}" y1="{y}" x2="{at}" y2="{y + LEVEL}"/>')
        parts += drawn(child, at, y + LEVEL, step, fill)
    radius = 6 if node.depth else 9
    return [*parts, f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{fill}"/>']


def colour(advantage: float) -> str:
    """Grey at 0, full at 1 and beyond."""
    end, share = GOOD if advantage > 0 else BAD, min(1.0, abs(advantage))
    return f"rgb{tuple(round(a + share * (b - a)) for a, b in zip(ZERO, end))}"


def text(x: float, y: float, content: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(content)}</text>'


if __name__ == "__main__":
    main()
