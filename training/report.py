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
import textwrap
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from repl import cut
from tasks.common import as_text
from training.metrics import shares
from training.scores import WHAT_HELPS, alike, best_of, mean_of
from tree import Message, Node, Tree

TEMPLATE = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
MOST_TEXT = 20_000  # characters of one message on the page
CURVES = {  # a metric of metrics.jsonl, and the caption of its chart
    "reward": "mean of the sampled trees; dots: evaluations",
    "score": "of the task, where --reward replaces it",
    "flat": "share of trees without any advantage",
    "asks": "share of roots that ask children",
    "ran": "share of messages whose code ran",
    "entropy": "of what is sampled, nats per token",
    "forgot": "share that good nodes lost by the step; above 0.2 it is shortened",
    "tokens": "sampled per tree",
    "grad_norm": "of the gradient before clipping",
    "gap": "between log-probabilities of sampler and trainer",
}


def page(title: str, settings: dict, table: str, steps: dict[Any, str],
         metrics: Sequence[dict] = ()) -> str:
    """The page as a text. `table` has lines as they are printed, `metrics` those of
    metrics.jsonl. `steps` has the trees of each step as `of_trees` made them; an evaluation
    has one "step" with an empty name."""
    given = [f"{name} {value}" for name, value in settings.items()
             if value not in (None, "") and value is not False]
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


# ------------------------------------------------------------------------------------------
# The table, of at most WIDTH columns

WIDTH = 100
HEAD = (f"{'task':14} {'method':10} {'context':>10} {'questions':>9} {'score':>5} "
        f"{'95 % interval':14} {'tokens in':>9} {'out':>6} {'nodes':>5} {'seconds':>7}")


def table_lines(row: dict) -> str:
    """The summary of an evaluation as a row under HEAD, and a note under it."""
    line = (f"{row['task']:14.14} {row['method']:10} {number(row, 'length', 10)} "
            f"{score_columns(row)} {number(row, 'in', 9)} {number(row, 'out', 6)} "
            f"{number(row, 'nodes', 5, 1)} {number(row, 'seconds', 7, 1)}")
    notes = [f"roots ended: {shares(row['ends']) or 'none'}",
             f"failed trees: {row['failed']}"]
    if row["reward"] != row["score"]:
        notes.append(f"reward: {row['reward']:.3f}")
    return f"{line}\n{note('; '.join(notes))}"


def sample_lines(groups: Collection[list[float]], samples: int) -> str:
    """Under a row: what the best of k trees per question score, for powers of two, and what
    GRPO would see. `groups` are the rewards of each question's trees."""
    lines = []
    for k in sorted({samples, *(2 ** i for i in range(samples.bit_length()))}):
        best = mean_of([best_of(scores, k) for scores in groups if len(scores) >= k])
        lines.append(f"{f'    the best of {k} (pass@{k})':36} {score_columns(best)}")
    kinds = Counter(map(alike, groups))
    varied = shares(dict(kinds.most_common()))
    lines.append(note(f"questions by what their trees score: {varied}"))
    learns = (f"With --group {samples} GRPO learns only where the trees of a question "
              f"differ in score: {kinds['mixed']} of {len(groups)} here.")
    if not kinds["mixed"]:
        learns += f" {WHAT_HELPS}: docs/training.md#when-it-does-not-learn"
    return "\n".join([*lines, note(learns)])


def difference_line(d: dict) -> str:
    """Two methods on the same questions, paired."""
    asked = f"{d['n']} question{'s' * (d['n'] != 1)} of {d['task']} {d['length'] or ''}"
    return note(f"{d['a']} minus {d['b']} on {asked.strip()}: "
                f"{d['difference']:+.3f} (95 %: {d['low']:+.3f} to {d['high']:+.3f})", "")


def score_columns(row: dict) -> str:
    """How many questions, their mean score, and its interval."""
    interval = f"[{number(row, 'low', 5, 3)}, {number(row, 'high', 5, 3)}]"
    return f"{row['n']:9} {number(row, 'score', 5, 3)} {interval}"


def number(row: dict, name: str, width: int, digits: int = 0) -> str:
    """A value of the row in a column, "-" if there is none."""
    value = row[name]
    return "-".rjust(width) if value is None else f"{value:{width},.{digits}f}"


def note(text: str, indent: str = "    ") -> str:
    """Lines of at most WIDTH."""
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent,
                         break_on_hyphens=False)


# ------------------------------------------------------------------------------------------
# Curves

def measured(metrics: Sequence[dict]) -> dict:
    """The curves over the steps of GRPO that have two points, with the reward those of
    evaluations; and the steps that were shortened."""
    steps = [m for m in metrics if m.get("phase") == "grpo"]
    dots = [(m["step"], m["reward"], m["name"]) for m in metrics
            if m.get("name") in ("heldout_warmup", "validation", "heldout_final")]
    curves = []
    for name, caption in CURVES.items():
        line = [(m["step"], m[name]) for m in steps if name in m]
        if len(line) > 1 and line not in [curve["line"] for curve in curves]:
            curves.append({"name": name, "caption": caption, "line": line,
                           "dots": dots if name == "reward" else []})
    shortened = {m["step"]: m["step_left"] for m in steps if m.get("step_left", 1) < 1}
    return {"curves": curves, "shortened": shortened}


# ------------------------------------------------------------------------------------------
# Trees

def of_trees(trees: Iterable[tuple[str, Tree]], tokenizer=None,
             advantages: dict[Node, float] = {}) -> str:
    """The (label, tree) of a step, as the page holds them. `advantages` has those of the
    trained nodes. With a tokenizer, sampled tokens show how likely they were."""
    values = [tree_values(label, tree, tokenizer, advantages) for label, tree in trees]
    return deflated({"trees": values})


def tree_values(label: str, tree: Tree, tokenizer,
                advantages: dict[Node, float]) -> dict:
    """A tree as JSON values. Its nodes are a list, and name their children by place."""
    nodes = list(tree.root.walk())
    place = {node: i for i, node in enumerate(nodes)}

    def message_values(message: Message, example: bool) -> dict:
        role = f"example {message.role}" if example else message.role
        row = {"role": role, "text": short_text(message.text)}
        if message.logprobs and tokenizer:
            row["tokens"] = [(tokenizer.decode([i]), rounded(logprob))
                             for i, logprob in zip(message.ids, message.logprobs)]
        return row

    def node_values(node: Node) -> dict:
        seen = node.messages if node.path else node.conversation  # all show the same
        examples = len(seen) - len(node.messages)
        return {
            "name": node.name, "depth": node.depth,
            "end": f"{node.end}: {node.reason}" if node.reason else node.end,
            "n": node.sampled + node.counted, "errors": len(node.errors),
            "adv": rounded(advantages.get(node)), "answer": short_text(node.answer),
            "children": [place[child] for child in node.children],
            "asked_in": node.asked_in,
            "messages": [message_values(message, 0 < i <= examples)
                      for i, message in enumerate(seen)]}

    return {
        "name": label, "group": tree.group, "query": short_text(tree.question.query),
        "gold": short_text(tree.question.answer), "reward": rounded(tree.reward),
        "score": rounded(tree.root.score), "failed": short_text(tree.failed),
        "nodes": [node_values(node) for node in nodes]}


def rounded(value: float | None) -> float | None:
    """Three digits are enough for the page."""
    return None if value is None else round(value, 3)


def short_text(value: Any) -> str:
    """A value as text, cut to MOST_TEXT."""
    return cut(as_text(value), MOST_TEXT)
