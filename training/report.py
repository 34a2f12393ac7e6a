"""One self-contained HTML page of an evaluation or a training run: `page(...) -> str`.

The scores and curves are plain HTML and SVG. The trees are deflated JSON: the script of
report.html shows one of them at a time, and each node when it is opened. Nothing is
fetched.

What a model wrote is hostile. It reaches the page in two ways only: as text escaped for
HTML, and inside the deflated JSON, which the script turns into text nodes. A content
security policy lets no other script run.
"""
import base64
import hashlib
import json
import math
import re
import zlib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from training.metrics import shares
from tree import Node, Rollout, Turn

TEMPLATE = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
MOST_TEXT = 20_000  # characters of one message on the page
CURVES = {  # a metric of metrics.jsonl, and the caption of its chart
    "reward": "Mean reward of the sampled trees; dots: questions that were scored alone",
    "entropy": "Entropy of what is sampled, nats per token",
    "gap": "Mean |gap| between the log-probabilities of sampler and trainer",
    "grad_norm": "Norm of the gradient before clipping",
    "tokens": "Sampled tokens per tree",
}


def page(title: str, settings: dict, rows: list[dict],
         trees: Sequence[tuple[str, Rollout]] = (), tokenizer=None,
         metrics: Sequence[dict] = (), advantages: dict[Node, float] = {},
         differences: Sequence[dict] = ()) -> str:
    """The page as a text.

    `rows` and `differences` are made by eval.py, `metrics` are the lines of metrics.jsonl.
    `trees` are (label, rollout). `advantages` has those of the trained nodes. With a
    tokenizer, sampled tokens show log-probabilities."""
    given = [f"{name} {value}" for name, value in settings.items() if value is not None]
    lines = [HEAD, *map(table_line, rows), *map(difference_line, differences)]
    table = "\n".join(lines)
    curves = "".join(curve(name, metrics) for name in CURVES)
    body = (f"<h1>{escape(title)}</h1><details><summary>settings</summary>"
            f"<p>{escape(' · '.join(given))}</p></details><pre>{escape(table)}</pre>"
            f"<div class=figures>{curves}</div>")

    script = TEMPLATE.rpartition("<script>")[2].partition("</script>")[0]
    policy = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    packed = [pack_tree(label, rollout, tokenizer, advantages) for label, rollout in trees]
    data = zlib.compress(json.dumps({"trees": packed}).encode())
    fill = {"title": escape(title), "policy": policy, "body": body,
            "data": base64.b64encode(data).decode()}
    text = re.sub(r"\{\{(\w+)\}\}", lambda name: fill[name[1]], TEMPLATE)
    return text.encode("utf-8", "replace").decode()


# ------------------------------------------------------------------------------------------
# Scores and curves

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


def curve(name: str, metrics: Sequence[dict]) -> str:
    """A metric over the steps of GRPO as an SVG figure, the reward with what was held out;
    "" for fewer than two steps."""
    line = [(m["step"], m[name]) for m in metrics
            if m.get("phase") == "grpo" and finite(m.get(name)) is not None]
    dots = [(m["step"], m["score"]) for m in metrics
            if name == "reward" and m.get("phase") == "eval"
            and m["name"] in ("heldout_warmup", "validation", "heldout_final")]
    if len(line) < 2:
        return ""
    values = [value for _, value in line]
    low, high = min(0.0, *values), 1.0 if name == "reward" else max(values)
    first, last = min(line + dots)[0], max(line + dots)[0]

    def at(step: float, value: float) -> tuple[str, str]:
        return (f"{50 + 400 * (step - first) / (last - first):.1f}",
                f"{180 - 160 * (value - low) / ((high - low) or 1):.1f}")

    points = " ".join(",".join(at(*point)) for point in line)
    parts = [f'<polyline points="{points}"/>']
    for x, y in (at(*dot) for dot in dots):
        parts.append(f'<circle cx="{x}" cy="{y}" r="4"/>')
    for value in (low, (low + high) / 2, high):
        y = at(first, value)[1]
        parts.append(f'<line x1="50" x2="450" y1="{y}" y2="{y}"/>'
                     f'<text x="44" y="{y}" text-anchor="end">{value:.3g}</text>')
    parts.append(f'<text x="50" y="198">{first}</text>'
                 f'<text x="450" y="198" text-anchor="end">step {last}</text>')
    return (f'<figure><figcaption>{CURVES[name]}</figcaption><svg viewBox="0 0 460 204">'
            f'{"".join(parts)}</svg></figure>')


def finite(value: float | None) -> float | None:
    """The value, or None for what JSON cannot say."""
    return value if value is not None and math.isfinite(value) else None


# ------------------------------------------------------------------------------------------
# Trees

def pack_tree(label: str, rollout: Rollout, tokenizer,
              advantages: dict[Node, float]) -> dict:
    """A tree as JSON values. Its nodes are a list, and name their children by place."""
    nodes = list(rollout.root.walk())
    place = {node: i for i, node in enumerate(nodes)}

    def pack_turn(turn: Turn) -> dict:
        row = {"role": turn.role, "text": shown(turn.text)}
        if turn.logprobs and tokenizer:
            row["tokens"] = [(tokenizer.decode([i]), finite(logprob))
                             for i, logprob in zip(turn.ids, turn.logprobs)]
        return row

    def pack_node(node: Node) -> dict:
        name = ".".join(map(str, node.path))
        seen = node.turns if node.path else node.said  # each child is shown the same
        return {
            "name": f"{node.kind} {name}" if name else "root",
            "end": f"{node.end}: {node.reason}" if node.reason else node.end,
            "n": node.sampled + node.counted, "errors": len(node.errors),
            "adv": finite(advantages.get(node)), "answer": shown(node.answer),
            "children": [place[child] for child in node.children],
            "turns": [pack_turn(turn) for turn in seen]}

    return {
        "name": label, "query": shown(rollout.task.query), "failed": shown(rollout.failed),
        "reward": finite(rollout.reward), "gold": shown(rollout.task.answer),
        "nodes": [pack_node(node) for node in nodes]}


def shown(value: Any) -> str:
    """A value as text, cut to MOST_TEXT."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= MOST_TEXT:
        return text
    return f"{text[:MOST_TEXT]}\n… {len(text) - MOST_TEXT:,} more characters"
