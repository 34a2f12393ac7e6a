"""One self-contained HTML page of an evaluation or a training run: `page(...) -> str`.

The scores are plain HTML. Curves and trees are deflated JSON, which the script of
report.html draws: each question with its group of trees, each node in the colour of its
advantage, and of one tree all that its nodes read and wrote. Nothing is fetched.

What a model wrote is hostile. It reaches the page in two ways only: as text escaped for
HTML, and inside the deflated JSON, which the script turns into text nodes. A content
security policy lets no other script run.
"""
import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from repl import cut
from tasks.text import as_text
from training.metrics import shares
from tree import Node, Rollout, Turn

TEMPLATE = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
MOST_TEXT = 20_000  # characters of one message on the page
CURVES = {  # a metric of metrics.jsonl, and the caption of its chart
    "reward": "mean of the sampled trees; dots: evaluations",
    "score": "the task's own, where a reward replaces it",
    "flat": "share of trees without any advantage",
    "asks": "share of roots that ask children",
    "ran": "share of messages whose code ran",
    "entropy": "of what is sampled, nats per token",
    "forgot": "share that good nodes lost by the step; above 0.2 it is shortened",
    "tokens": "sampled per tree",
    "grad_norm": "of the gradient before clipping",
    "gap": "between log-probabilities of sampler and trainer",
}


def page(title: str, settings: dict, rows: list[dict], steps: dict[Any, str],
         metrics: Sequence[dict] = (), differences: Sequence[dict] = ()) -> str:
    """The page as a text. `rows` and `differences` are made by eval.py, `metrics` are the
    lines of metrics.jsonl. `steps` has the trees of each step as `of_trees` made them; an
    evaluation has one "step" with an empty name."""
    given = [f"{name} {value}" for name, value in settings.items()
             if value not in (None, "") and value is not False]
    table = "\n".join(
        [HEAD, *map(table_line, rows), *map(difference_line, differences)])
    body = (f"<h1>{escape(title)}</h1><details><summary>settings</summary>"
            f"<p>{escape(' · '.join(given))}</p></details>"
            f"<pre style=white-space:pre>{escape(table)}</pre>")

    script = TEMPLATE.rpartition("<script>")[2].partition("</script>")[0]
    policy = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    first = {"steps": [*steps], **measured(metrics)}
    data = "\n".join([deflated(first), *steps.values()])
    fill = {"title": escape(title), "policy": policy, "body": body, "data": data}
    text = re.sub(r"\{\{(\w+)\}\}", lambda name: fill[name[1]], TEMPLATE)
    return text.encode("utf-8", "replace").decode()


def deflated(value: Any) -> str:
    """JSON, deflated and in base64, so that no part of it can end a script element."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


HEAD = (f"{'task':15} {'method':10} {'length':>9} {'n':>4} {'failed':>6} {'score':>6}  "
        f"{'95 % interval':14} {'in tok':>9} {'out tok':>7} {'nodes':>6} {'seconds':>7}  "
        "how the roots ended")


def table_line(row: dict) -> str:
    """The summary of an evaluation as a line under HEAD."""
    def number(name: str, width: int, digits: int = 0) -> str:
        value = row[name]
        return "-".rjust(width) if value is None else f"{value:{width},.{digits}f}"

    interval = f"[{number('low', 5, 3)}, {number('high', 5, 3)}]"
    own = row.get("own")  # the task's own score, where --reward replaced it
    return (f"{row['task']:15} {row['method']:10} {number('length', 9)} {row['n']:4} "
            f"{row['failed']:6} {number('score', 6, 3)}  {interval} {number('in', 9)} "
            f"{number('out', 7)} {number('nodes', 6, 1)} {number('seconds', 7, 1)}  "
            f"{shares(row['ends'])}{'' if own is None else f'  own score {own:.3f}'}")


def difference_line(d: dict) -> str:
    """Two methods on the same questions."""
    return (f"{d['task']} {d['length'] or ''} {d['a']} - {d['b']} = {d['difference']:+.3f}"
            f"  [{d['low']:+.3f}, {d['high']:+.3f}]  n {d['n']}")


def measured(metrics: Sequence[dict]) -> dict:
    """The curves over the steps of GRPO that have two points, with the reward the scores on
    questions that were asked alone; and the steps that were shortened."""
    steps = [m for m in metrics if m.get("phase") == "grpo"]
    scores = [(m["step"], m["score"], m["name"]) for m in metrics
              if m.get("name") in ("heldout_warmup", "validation", "heldout_final")]
    curves = []
    for name, caption in CURVES.items():
        line = [(m["step"], m[name]) for m in steps if name in m]
        if len(line) > 1:
            curves.append({"name": name, "caption": caption, "line": line,
                           "dots": scores if name == "reward" else []})
    shortened = {m["step"]: m["step_left"] for m in steps if m.get("step_left", 1) < 1}
    return {"curves": curves, "shortened": shortened}


# ------------------------------------------------------------------------------------------
# Trees

def of_trees(trees: Iterable[tuple[str, Rollout]], tokenizer=None,
             advantages: dict[Node, float] = {}) -> str:
    """The (label, rollout) of a step, as the page holds them. `advantages` has those of the
    trained nodes. With a tokenizer, sampled tokens show how likely they were."""
    values = [tree_values(label, rollout, tokenizer, advantages)
              for label, rollout in trees]
    return deflated({"trees": values})


def tree_values(label: str, rollout: Rollout, tokenizer,
                advantages: dict[Node, float]) -> dict:
    """A tree as JSON values. Its nodes are a list, and name their children by place."""
    nodes = list(rollout.root.walk())
    place = {node: i for i, node in enumerate(nodes)}

    def turn_values(turn: Turn, example: bool) -> dict:
        role = f"example {turn.role}" if example else turn.role
        row = {"role": role, "text": short_text(turn.text)}
        if turn.logprobs and tokenizer:
            row["tokens"] = [(tokenizer.decode([i]), rounded(logprob))
                             for i, logprob in zip(turn.ids, turn.logprobs)]
        return row

    def node_values(node: Node) -> dict:
        seen = node.turns if node.path else node.conversation  # all show the same
        examples = len(seen) - len(node.turns)
        return {
            "name": node.name, "depth": node.depth,
            "end": f"{node.end}: {node.reason}" if node.reason else node.end,
            "n": node.sampled + node.counted, "errors": len(node.errors),
            "adv": rounded(advantages.get(node)), "answer": short_text(node.answer),
            "children": [place[child] for child in node.children],
            "asked_in": node.asked_in,
            "turns": [turn_values(turn, 0 < i <= examples)
                      for i, turn in enumerate(seen)]}

    return {
        "name": label, "group": rollout.group, "query": short_text(rollout.task.query),
        "gold": short_text(rollout.task.answer), "reward": rounded(rollout.reward),
        "score": rounded(rollout.root.score), "failed": short_text(rollout.failed),
        "nodes": [node_values(node) for node in nodes]}


def rounded(value: float | None) -> float | None:
    """Three digits are enough for the page."""
    return None if value is None else round(value, 3)


def short_text(value: Any) -> str:
    """A value as text, cut to MOST_TEXT."""
    return cut(as_text(value), MOST_TEXT)
