"""One self-contained HTML page of an evaluation or a training run: `page(...) -> str`.

The scores and curves are plain HTML and SVG. The trees are deflated JSON; the script of
report.html shows one of them at a time, each node when it is opened, so that thousands of
nodes cost nothing until then. Nothing is fetched.

What a model wrote is hostile. It reaches the page in two ways only: as text escaped for
HTML, and inside the deflated JSON, of which the script makes text nodes. A content security
policy lets no other script run.
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

from rlm import as_text
from runtime.metrics import shares
from tree import Node, Rollout


TEMPLATE = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
MOST_TREES = 20_000_000  # characters of JSON; deflated, about a sixth
MOST_TEXT = 20_000  # characters of one message on the page
CURVES = {  # a metric of metrics.jsonl, and the caption of its chart
    "reward": "Mean reward of the sampled trees; dots: held-out questions",
    "entropy": "Entropy of what is sampled, nats per token",
    "gap": "Sampler against trainer, mean |gap| of log-probabilities",
    "grad_norm": "Norm of the gradient before clipping",
    "tokens": "Sampled tokens per tree",
}


def page(title: str, settings: dict, rows: list[dict],
         trees: Sequence[tuple[str, Rollout]] = (), tokenizer=None,
         metrics: Sequence[dict] = (), advantages: dict[Node, float] = {},
         gaps: dict[Node, list[float]] = {}, differences: Sequence[dict] = (),
         state: str = "") -> str:
    """The page as a text.

    `state` says how far a run has come. `rows` and `differences` are made by eval.py,
    `metrics` are the lines of metrics.jsonl. `trees` are (label, rollout). `advantages` has
    those of nodes that were trained, `gaps` for each sampled token of a node its
    log-probability under the trainer minus that under the sampler."""
    given = [f"{name} {value}" for name, value in settings.items() if value is not None]
    curves = "".join(curve(name, metrics) for name in CURVES)
    body = (f"<h1>{escape(title)}</h1><p>{escape(state)}</p>"
            f"<details><summary>settings</summary><p>{escape(' · '.join(given))}</p>"
            f"</details>{score_table(rows)}{difference_table(differences)}"
            f"<div class=figures>{curves}</div>")

    script = TEMPLATE.rpartition("<script>")[2].partition("</script>")[0]
    policy = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    fill = {"title": escape(title), "policy": policy, "body": body,
            "data": pack(trees, tokenizer, advantages, gaps)}
    text = re.sub(r"\{\{(\w+)\}\}", lambda name: fill[name[1]], TEMPLATE)
    return text.encode("utf-8", "replace").decode()


# ------------------------------------------------------------------------------------------
# Scores and curves

HEAD = (f"{'task':11} {'method':10} {'length':>9} {'n':>4} {'score':>5}  "
        f"{'95 % interval':14} {'failed':>6} {'in tok':>9} {'out tok':>7} {'nodes':>6} "
        f"{'seconds':>7}  how the roots ended")


def table_line(row: dict) -> str:
    """A row as a line under HEAD, for a terminal."""
    line = f"{row['task']:11} {row['method']:10} {row['length'] or '-':>9} {row['n']:4} "
    if not row["n"]:
        return f"{line} no score, {row['failed']} failed"
    return (f"{line}{row['score']:.3f}  {interval(row)} {row['failed']:6} "
            f"{row['in']:9,.0f} {row['out']:7,.0f} {row['nodes']:6.1f} "
            f"{row['seconds']:7.1f}  {shares(row['ends'])}")


def difference_line(d: dict) -> str:
    return (f"{d['task']} {d['length'] or ''} {d['a']} - {d['b']} = {d['difference']:+.3f}"
            f"  [{d['low']:+.3f}, {d['high']:+.3f}]  n {d['n']}")


def score_table(rows: list[dict]) -> str:
    head = ["task", "method", "length", "n", "score", "95 % interval", "failed", "in tok",
            "out tok", "nodes", "seconds"]
    lines = [[r["task"], r["method"], number(r["length"]), number(r["n"]),
              number(r["score"], 3), interval(r), number(r["failed"]), number(r["in"]),
              number(r["out"]), number(r["nodes"], 1), number(r["seconds"], 1)]
             for r in rows]
    return html_table("Scores", head, lines)


def difference_table(differences: Sequence[dict]) -> str:
    head = ["task", "methods", "length", "n", "difference", "95 % interval"]
    lines = [[d["task"], f"{d['a']} − {d['b']}", number(d["length"]), number(d["n"]),
              f"{d['difference']:+.3f}", f"[{d['low']:+.3f}, {d['high']:+.3f}]"]
             for d in differences]
    return html_table("Differences on the same questions", head, lines)


def html_table(title: str, head: list[str], lines: list[list[str]]) -> str:
    """A heading and a table; "" without lines."""
    if not lines:
        return ""
    names = "".join(f"<th>{escape(name)}" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in line)
                   for line in lines)
    return f"<h2>{title}</h2><div class=scroll><table><tr>{names}{body}</table></div>"


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def interval(row: dict) -> str:
    return f"[{row['low']:.3f}, {row['high']:.3f}]" if row["n"] else "-"


def curve(name: str, metrics: Sequence[dict]) -> str:
    """A metric over the steps of GRPO as an SVG figure, the reward with what was held out;
    "" for fewer than two steps."""
    line = [(m["step"], m[name]) for m in metrics
            if m.get("phase") == "grpo" and finite(m.get(name))]
    dots = [(m["step"], m["score"]) for m in metrics
            if name == "reward" and m.get("phase") == "eval"
            and m["name"] in ("heldout_warmup", "heldout_now", "heldout_final")]
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


def finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


# ------------------------------------------------------------------------------------------
# Trees

def pack(trees: Sequence[tuple[str, Rollout]], tokenizer, advantages: dict[Node, float],
         gaps: dict[Node, list[float]]) -> str:
    """What the script shows: JSON, deflated, in base64. One tree at least, and as many as
    MOST_TREES holds."""
    packed, size = [], 0
    for label, rollout in trees:
        row = json.dumps(pack_tree(label, rollout, tokenizer, advantages, gaps))
        size += len(row)
        if packed and size > MOST_TREES:
            break
        packed.append(row)
    left_out = len(trees) - len(packed)
    text = f'{{"left_out": {left_out}, "trees": [{",".join(packed)}]}}'
    return base64.b64encode(zlib.compress(text.encode())).decode()


def pack_tree(label: str, rollout: Rollout, tokenizer, advantages: dict[Node, float],
              gaps: dict[Node, list[float]]) -> dict:
    """A tree as JSON values: its nodes in the order of a walk, which name their children by
    their places in it."""
    nodes = list(rollout.root.walk())
    place = {node: i for i, node in enumerate(nodes)}
    task = rollout.task if isinstance(rollout.task, dict) else vars(rollout.task)

    def pack_turn(turn, node_gaps) -> dict:
        row = {"role": turn.role, "text": cut(turn.text)}
        if turn.logprobs and tokenizer:
            row["tokens"] = [
                [tokenizer.decode([i]),
                 *(float(f"{v:.3g}") if finite(v) else None for v in pair)]
                for i, *pair in zip(turn.ids, turn.logprobs, node_gaps)]
        return row

    def pack_node(node: Node) -> dict:
        # Without measured gaps there is nothing behind the log-probabilities.
        node_gaps = iter(gaps.get(node, [None] * node.sampled))
        name = ".".join(map(str, node.path))
        advantage = advantages.get(node)
        return {
            "name": f"{node.kind} {name}" if name else "root", "end": node.end,
            "n": node.sampled + node.counted, "errors": len(node.errors),
            "adv": advantage if finite(advantage) else None,
            "children": [place[child] for child in node.children],
            "answer": cut(as_text(node.answer)),
            "turns": [pack_turn(turn, node_gaps) for turn in node.turns]}

    return {
        "name": label, "query": cut(task.get("query", "")), "failed": cut(rollout.failed),
        "reward": rollout.reward if finite(rollout.reward) else None,
        "gold": cut(as_text(task.get("answer"))), "nodes": list(map(pack_node, nodes))}


def cut(text: str) -> str:
    if len(text) <= MOST_TEXT:
        return text
    return f"{text[:MOST_TEXT]}\n… {len(text) - MOST_TEXT:,} more characters"
