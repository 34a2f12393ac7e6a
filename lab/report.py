"""One self-contained HTML page of an evaluation or a training run: `page(...) -> str`.

The tables and charts are plain HTML and SVG. A script shows the trees, each node when it is
opened, so that thousands of nodes cost nothing until then. Nothing is fetched.

What a model wrote is hostile. It reaches the page in two ways only: as text escaped for
HTML, and inside the JSON of a <script type="application/json">, where every "<" is written
\\u003c, so that no </script> can end it. The script makes text nodes of it, never markup,
and a content security policy lets no other script run.

Left out: everything that computes scores (eval.py). Standard library and tree.py.
"""
import base64
import hashlib
import json
import math
from collections.abc import Sequence
from html import escape
from typing import Any

from tree import Node, Rollout


MOST_NODES = 5_000  # of all trees on a page; the file grows by about 2 kB per node
MOST_TEXT = 20_000  # characters of one message on the page
METHOD_COLOURS = ("rlm1", "retrieval", "direct", "compaction", "rlm0", "rlm2")  # .c0 to .c5
CURVES = {  # a metric of metrics.jsonl, and what is written above its chart
    "reward": "mean reward of the sampled trees",
    "entropy": "entropy, nats per token",
    "gap": "sampler against trainer, mean |gap| of log-probabilities",
    "grad_norm": "norm of the gradient",
    "tokens": "sampled tokens per tree",
    "flat": "share of groups without a signal",
}


def page(title: str, settings: dict, rows: list[dict],
         trees: Sequence[tuple[str, Rollout]] = (), tokenizer=None,
         metrics: Sequence[dict] = (), advantages: dict[Node, float] = {},
         gaps: dict[Node, list[float]] = {}, differences: Sequence[dict] = (),
         notes: Sequence[str] = ()) -> str:
    """The page as a text.

    `rows` and `differences` are made by eval.py, `metrics` are the lines of metrics.jsonl.
    `trees` are (label, rollout); labels that are equal before " #" can be shown together.
    `advantages` has those of roots, `gaps` for each sampled token of a node its
    log-probability under the trainer minus that under the sampler."""
    shown = [f"{name} {value}" for name, value in settings.items()
             if not isinstance(value, dict) and value not in (None, "")]
    parts = [f"<h1>{escape(title)}</h1><p class=muted>{escape(' · '.join(shown))}</p>"]
    if rows:
        parts.append(f"<h2>Scores</h2>{score_table(rows)}")
    if notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in notes)
        is_open = " open" if len(notes) < 5 else ""
        parts.append(f"<details{is_open}><summary>Notes ({len(notes)})</summary>"
                     f"<ul class=muted>{items}</ul></details>")
    kinds = dict.fromkeys(row["task"] for row in rows)
    parts += charts("Score against context length", [
        length_chart(kind, [row for row in rows if row["task"] == kind]) for kind in kinds])
    if differences:
        parts.append("<details><summary>Differences between methods on the same questions"
                     f"</summary>{difference_table(differences)}</details>")
    parts += charts("Training", [
        curve(label, [(m["step"], m[name]) for m in metrics
                      if m.get("phase") == "grpo" and finite(m.get(name))])
        for name, label in CURVES.items()])
    packed = pack(trees, tokenizer, advantages, gaps)
    if packed["trees"]:
        parts.append(TREES)

    hashed = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    data = json.dumps(packed).replace("<", "\\u003c")  # ASCII, so no U+2028 either
    text = f"""<!doctype html><html lang=en><meta charset=utf-8>
<meta name=viewport content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hashed}'">
<title>{escape(title)}</title><style>{STYLE}</style>
<main>{"".join(parts)}</main>
<script type="application/json" id=data>{data}</script>
<script>{SCRIPT}</script></html>
"""
    return text.encode("utf-8", "replace").decode()


# ------------------------------------------------------------------------------------------
# Tables

# The columns of numbers: the key in a row, the width in a terminal, digits after the point.
COLUMNS = (("failed", 6, 0), ("in", 7, 0), ("reused", 7, 0), ("out", 6, 0), ("calls", 6, 1),
           ("depth", 5, 1), ("p50", 6, 1), ("p95", 6, 1), ("dollars", 8, 4))
HEAD = (f"{'task':10} {'method':10} {'length':>9} {'n':>4} {'score':>5}  "
        f"{'95 % interval':14} "
        + " ".join(f"{name:>{width}}" for name, width, _ in COLUMNS))


def table_line(row: dict) -> str:
    """A row as a line under HEAD, for a terminal."""
    interval = f"[{row['low']:.3f}, {row['high']:.3f}]" if row["n"] else "-"
    line = (f"{row['task']:10} {row['method']:10} {number(row['length'], 0, '-'):>9} "
            f"{row['n']:4} {number(row['score'], 3, '-'):>5}  {interval:14}")
    for name, width, digits in COLUMNS:
        line += f" {number(row[name], digits, '-'):>{width}}"
    return line


def score_table(rows: list[dict]) -> str:
    lines = []
    for r in rows:
        low, high = r["low"] or 0.0, r["high"] or 0.0
        interval = f"[{low:.3f}, {high:.3f}]" if r["n"] else ""
        width = max(0.8, 100 * (high - low))
        bar = (f'<svg class=bar viewBox="0 0 100 12" preserveAspectRatio=none '
               f'aria-hidden=true><rect width=100 height=12 class=back />'
               f'<rect x={100 * low:.1f} y=3 height=6 width={width:.1f} '
               f'class="{colour(r["method"])}"/></svg>')
        lines.append([r["task"], r["method"], number(r["length"]), number(r["n"]),
                      number(r["score"], 3), (interval, bar), number(r["unanswered"]),
                      number(r["seen"], 3),
                      *(number(r[name], digits) for name, _, digits in COLUMNS)])
    head = ["task", "method", "length", "n", "score", "interval", "unanswered", "seen",
            *(name for name, _, _ in COLUMNS)]
    return html_table(head, lines) + (
        "<p class=muted>Length in tokens; 95 % bootstrap interval of the mean score; "
        "unanswered: trees that ended without an answer; seen: share of the context that "
        "was shown; failed: lost by the machine or the server and not scored; then tokens, "
        "calls and depth per question, seconds from start to answer, and dollars per "
        "question where the price is known.</p>")


def difference_table(differences: Sequence[dict]) -> str:
    lines = [[d["task"], number(d["length"]), f"{d['a']} − {d['b']}", number(d["n"]),
              f"{d['difference']:+.3f}", f"[{d['low']:+.3f}, {d['high']:+.3f}]",
              "" if d["low"] <= 0 <= d["high"] else "yes"] for d in differences]
    head = ["task", "length", "methods", "n", "difference", "interval", "excludes 0"]
    return html_table(head, lines)


def html_table(head: list[str], lines: list[list]) -> str:
    """A cell is a text, or a pair of a text and trusted markup to put behind it."""
    def cell(value: str | tuple[str, str]) -> str:
        text, markup = value if isinstance(value, tuple) else (value, "")
        return f"<td>{escape(text)}{markup}</td>"

    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(cell, line))}</tr>" for line in lines)
    return (f"<div class=scroll><table><thead><tr>{names}</tr></thead>"
            f"<tbody>{body}</tbody></table></div>")


def number(value: float | None, digits: int = 0, unknown: str = "–") -> str:
    return unknown if value is None else f"{value:,.{digits}f}"


# ------------------------------------------------------------------------------------------
# Charts

def charts(title: str, drawn: list[str]) -> list[str]:
    """A heading and the charts that are not empty; nothing if all are."""
    if not any(drawn):
        return []
    return [f"<h2>{title}</h2><div class=charts>{''.join(drawn)}</div>"]


def colour(method: str) -> str:
    """The classes of a method's marks: .c0 to .c5, and dashed for one that is bare."""
    base = method.removesuffix("-bare")
    at = METHOD_COLOURS.index(base) if base in METHOD_COLOURS else 0
    return f"c{at}" if method == base else f"c{at} bare"


def length_chart(task: str, rows: list[dict]) -> str:
    """Score (0 to 1) against context length (logarithmic), one line per method; "" if there
    are not two lengths."""
    rows = [r for r in rows if r["n"]]
    lengths = sorted({r["length"] for r in rows})
    if len(lengths) < 2:
        return ""
    span = math.log(lengths[-1] / lengths[0])

    def x(length: float) -> float:
        return 60 + 380 * math.log(length / lengths[0]) / span

    def y(score: float) -> float:
        return 250 - 236 * score

    parts, legend = axes(40, 460, y, (0, 0.25, 0.5, 0.75, 1)), []
    for v in lengths:
        parts.append(f'<text x={x(v):.0f} y=270 text-anchor=middle>{short(v)}</text>')
    parts.append('<text x=250 y=290 text-anchor=middle>tokens of context</text>')
    for i, method in enumerate(dict.fromkeys(r["method"] for r in rows)):
        style, points = colour(method), []
        own = [r for r in rows if r["method"] == method]
        for r in sorted(own, key=lambda r: r["length"]):
            at = x(r["length"]) + 3 * i  # side by side, so that no interval hides another
            low, middle, high = (f"{y(r[name]):.1f}" for name in ("low", "score", "high"))
            said = (f"{escape(method)}, {r['length']:,} tokens: {r['score']:.3f} "
                    f"[{r['low']:.3f}, {r['high']:.3f}]")
            points.append(f"{at:.1f},{middle}")
            parts.append(
                f'<line x1={at:.1f} x2={at:.1f} y1={low} y2={high} class="{style}"/>'
                f'<circle cx={at:.1f} cy={middle} r=4 class="{style}">'
                f'<title>{said}</title></circle>')
        parts.append(f'<polyline points="{" ".join(points)}" class="{style}"/>')
        legend.append(f'<li><i class="{style}"></i>{escape(method)}</li>')
    name = f"score against length, {escape(task)}"
    return (f'<figure><figcaption>{escape(task)}</figcaption><svg viewBox="0 0 480 300" '
            f'role=img aria-label="{name}">{"".join(parts)}</svg>'
            f'<ul class=legend>{"".join(legend)}</ul></figure>')


def curve(label: str, points: list[tuple[float, float]]) -> str:
    """A metric over the steps; "" for fewer than two points."""
    if len(points) < 2:
        return ""
    values = [value for _, value in points]
    low, high = min(0.0, *values), max(values)
    if high <= low:
        high = low + 1.0
    first, last = points[0][0], points[-1][0]

    def x(step: float) -> float:
        return 76 + 384 * (step - first) / ((last - first) or 1)

    def y(value: float) -> float:
        return 180 - 160 * (value - low) / (high - low)

    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
    parts = axes(76, 460, y, (low, (low + high) / 2, high))
    for v in (first, last):
        parts.append(f'<text x={x(v):.0f} y=200 text-anchor=middle>{v}</text>')
    parts.append(f'<polyline points="{line}" class=c0 />')
    return (f'<figure><figcaption>{escape(label)}</figcaption><svg viewBox="0 0 480 210" '
            f'role=img aria-label="{escape(label)}">{"".join(parts)}</svg></figure>')


def axes(left: int, right: int, y, ticks: Sequence[float]) -> list[str]:
    return [f'<line x1={left} x2={right} y1={y(v):.1f} y2={y(v):.1f} class=grid />'
            f'<text x={left - 6} y={y(v) + 5:.1f} text-anchor=end>{v:.3g}</text>'
            for v in ticks]


def short(tokens: float) -> str:
    for size, unit in ((1_000_000, "M"), (1000, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return f"{tokens:.0f}"


def finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


# ------------------------------------------------------------------------------------------
# Trees

def pack(trees: Sequence[tuple[str, Rollout]], tokenizer=None,
         advantages: dict[Node, float] = {}, gaps: dict[Node, list[float]] = {}) -> dict:
    """Trees as JSON values for the script: whole ones, in order, up to MOST_NODES nodes.

    The keys are short, since there are thousands of each. A text that repeats (the system
    prompts) is stored once, in `texts`; others refer to it by its number."""
    texts: dict[str, int] = {}
    pieces: dict[int, str] = {}  # what each token stands for

    def text(value: Any) -> int:
        if not isinstance(value, str):
            value = json.dumps(value, ensure_ascii=False, indent=1)
        if len(value) > MOST_TEXT:
            value = f"{value[:MOST_TEXT]}\n… {len(value) - MOST_TEXT:,} more characters"
        return texts.setdefault(value, len(texts))

    def pack_turn(turn, node_gaps) -> dict:
        sampled = turn.logprobs is not None
        row = {"r": turn.role, "x": text(turn.text), "s": int(sampled)}
        if tokenizer is None or not 0 < len(turn.ids) <= MOST_TEXT:
            return row
        row["i"] = turn.ids
        for i in turn.ids:
            if i not in pieces:
                pieces[i] = tokenizer.decode([i])
        if sampled:
            row["l"] = [round(p, 3) if finite(p) else 0 for p in turn.logprobs]
            row["g"] = [float(f"{next(node_gaps, 0):.1e}") for _ in turn.ids]
        return row

    def pack_tree(label: str, rollout: Rollout, nodes: list[Node]) -> dict:
        at = {node: i for i, node in enumerate(nodes)}
        rows = []
        for node in nodes:
            node_gaps = iter(gaps.get(node, ()))
            rows.append({
                "p": ".".join(map(str, node.path)), "k": node.kind, "e": node.end,
                "c": [at[child] for child in node.children], "err": len(node.errors),
                "sec": round(node.repl_seconds, 3), "a": text(node.answer),
                "t": [pack_turn(turn, node_gaps) for turn in node.turns],
                "g": int(node in gaps)})
        task = rollout.task if isinstance(rollout.task, dict) else vars(rollout.task)
        return {"name": label, "query": task.get("query", ""), "reward": rollout.reward,
                "failed": rollout.failed, "gold": text(task.get("answer")),
                "adv": advantages.get(rollout.root), "nodes": rows}

    packed, count = [], 0
    for label, rollout in trees:
        nodes = list(rollout.root.walk())
        if packed and count + len(nodes) > MOST_NODES:
            break
        count += len(nodes)
        packed.append(pack_tree(label, rollout, nodes))
    return {"trees": packed, "left_out": len(trees) - len(packed), "texts": list(texts),
            "pieces": pieces}


TREES = """<h2>Trees</h2><div class=browser><nav>
<label>Show <select id=filter></select></label>
<label>sorted by <select id=order><option>as run<option>lowest reward<option>highest reward
<option>most nodes</select></label><div id=list></div></nav>
<section id=tree></section></div>"""

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1d22;--muted:#666c78;--line:#dfe2e8;
--soft:#f4f5f8;--c0:#1f6fd0;--c1:#c8541b;--c2:#1a8a5f;--c3:#8250c4;--c4:#b8860b;
--c5:#c2306b;--bad:#b3261e;--heat:224,112,32}
@media(prefers-color-scheme:dark){:root{--bg:#14161a;--fg:#e4e6eb;--muted:#9aa1ae;
--line:#30343c;--soft:#1d2026;--c0:#5aa2f5;--c1:#f08a4f;--c2:#45c493;--c3:#b48bf0;
--c4:#e0b23c;--c5:#f06a9d;--bad:#ff8a80;--heat:240,140,60}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
main{max-width:1200px;margin:0 auto;padding:16px}
h1{font-size:1.5rem;margin:.3em 0}h2{font-size:1.15rem;margin:1.6em 0 .5em}h3{margin:0}
.muted{color:var(--muted);font-size:.87rem;overflow-wrap:anywhere}.bad{color:var(--bad)}

.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}
th,td{padding:4px 10px;text-align:right;border-bottom:1px solid var(--line);
white-space:nowrap}th{color:var(--muted);font-weight:500}
th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}
.bar{display:block;width:110px;height:9px;margin-left:auto}.back{fill:var(--soft)}

.charts{display:flex;flex-wrap:wrap;gap:16px}figure{margin:0;flex:1 1 300px;max-width:520px}
figcaption{font-weight:600;font-size:.9rem}svg text{fill:var(--muted);font-size:14px}
svg:not(.bar){width:100%;height:auto}.grid{stroke:var(--line)}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;padding:0;margin:4px 0;
font-size:.87rem}.bare{stroke-dasharray:5 4}i.bare{border-top-style:dashed}
.legend i{display:inline-block;width:18px;border-top:3px solid;margin:0 6px 4px 0}
.c0{stroke:var(--c0);fill:var(--c0);color:var(--c0)}
.c1{stroke:var(--c1);fill:var(--c1);color:var(--c1)}
.c2{stroke:var(--c2);fill:var(--c2);color:var(--c2)}
.c3{stroke:var(--c3);fill:var(--c3);color:var(--c3)}
.c4{stroke:var(--c4);fill:var(--c4);color:var(--c4)}
.c5{stroke:var(--c5);fill:var(--c5);color:var(--c5)}
polyline[class]{fill:none;stroke-width:2.5}rect{stroke:none}

.browser{display:grid;grid-template-columns:280px 1fr;gap:16px}.browser>*{min-width:0}
label{display:block;font-size:.87rem;color:var(--muted);margin-bottom:6px}
select,button{font:inherit;color:inherit;background:var(--soft);border-radius:6px;
border:1px solid var(--line);padding:4px 8px;max-width:100%}button{cursor:pointer}
#list{max-height:70vh;overflow:auto}
#list button{display:block;width:100%;text-align:left;margin-bottom:4px;
overflow-wrap:anywhere}
#list button[aria-current=true]{border-color:var(--c0);box-shadow:inset 3px 0 var(--c0)}
details{border-left:2px solid var(--line);padding-left:10px;margin:4px 0}
summary{cursor:pointer;padding:3px 0;overflow-wrap:anywhere}
.turn{margin:8px 0;border:1px solid var(--line);border-radius:6px;overflow:hidden}
.turn>b{display:block;padding:2px 8px;font-size:.78rem;font-weight:500;
background:var(--soft);color:var(--muted)}
.turn.assistant{border-color:var(--c0)}.turn p{margin:0;padding:6px 8px 0}
pre{margin:0;padding:8px;font:13px/1.45 ui-monospace,monospace;white-space:pre-wrap;
overflow-wrap:anywhere;max-height:420px;overflow:auto}
.tokens span{border-radius:2px;cursor:pointer}.tokens .off{color:var(--muted)}
.tokens .on{box-shadow:inset 0 -1px var(--fg)}
@media(max-width:700px){.browser{grid-template-columns:1fr}#list{max-height:200px}
details{padding-left:6px}main{padding:12px}th,td{padding:4px 7px}}
"""

SCRIPT = """'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const $ = id => document.getElementById(id);
const MORE = 200;  // elements that are made at once, so that thousands stay quick

function el(tag, text, kind) {  // text only ever becomes a text node
  const e = document.createElement(tag);
  if (text !== undefined) e.textContent = text;
  if (kind) e.className = kind;
  return e;
}

function paged(box, items, make) {
  let at = 0;
  const more = el('button');
  more.onclick = () => {
    more.remove();
    const end = Math.min(items.length, at + MORE);
    for (; at < end; at++) box.append(make(items[at]));
    if (at === items.length) return;
    more.textContent = (items.length - at) + ' more';
    box.append(more);
  };
  more.onclick();
}

function tokens(turn, hasGap) {
  const box = el('div'), pre = el('pre', undefined, 'tokens');
  let about = 'Tap a token. Underlined: sampled (mask 1); the warmer, the less likely.';
  if (turn.s && hasGap) {
    const largest = Math.max(0, ...turn.g.map(Math.abs));
    about += ` Largest |gap| of log-probabilities: ${largest.toExponential(1)}.`;
  }
  const info = el('p', about, 'muted');
  turn.i.forEach((id, k) => {
    const span = el('span', data.pieces[id], turn.s ? 'on' : 'off');
    let facts = JSON.stringify(data.pieces[id]) + '  id ' + id;
    if (turn.s) {
      const heat = Math.min(0.85, -turn.l[k] / 4).toFixed(2);
      span.style.background = `rgba(var(--heat),${heat})`;
      facts += `  mask 1  log-probability ${turn.l[k]}`;
      if (hasGap) facts += `  gap ${turn.g[k]}`;
    } else {
      facts += '  mask 0';
    }
    span.onclick = () => { info.textContent = facts; };
    pre.append(span);
  });
  box.append(info, pre);
  return box;
}

function message(turn, hasGap) {
  const box = el('div', undefined, 'turn ' + turn.r), head = el('b', turn.r + ' ');
  let body = el('pre', data.texts[turn.x]);
  if (turn.i) {
    const flip = el('button', turn.i.length + ' tokens');
    flip.onclick = () => {
      const isText = body.tagName === 'PRE';
      const next = isText ? tokens(turn, hasGap) : el('pre', data.texts[turn.x]);
      body.replaceWith(next);
      body = next;
    };
    head.append(flip);
  }
  box.append(head, body);
  return box;
}

function block(name, text) {
  const box = el('div', undefined, 'turn');
  box.append(el('b', name), el('pre', text));
  return box;
}

function branch(tree, i, open) {
  const node = tree.nodes[i], box = el('details');
  const said = node.t.filter(t => t.r === 'assistant').length;
  const answer = data.texts[node.a].replace(/\\s+/g, ' ').slice(0, 80);
  const isBad = node.err || !['final', 'text'].includes(node.e);
  const name = node.p ? node.k + ' ' + node.p : 'root';
  const errors = node.err ? ` · ${node.err} errors` : '';
  box.append(el('summary', `${name} · ${node.e} · ${said} messages · ` +
    `${node.c.length} children${errors} → ${answer}`, isBad ? 'bad' : ''));
  const fill = () => {
    if (box.childElementCount > 1) return;
    const facts = [`REPL ${node.sec} s`];
    if (tree.adv !== null)
      facts.push((i ? 'inherited advantage ' : 'advantage ') + tree.adv.toFixed(3));
    box.append(el('p', facts.join(' · '), 'muted'));
    for (const turn of node.t) box.append(message(turn, node.g));
    box.append(block('answer', data.texts[node.a]));
    const below = el('div');
    box.append(below);
    if (node.c.length) paged(below, node.c, child => branch(tree, child, false));
  };
  box.ontoggle = () => { if (box.open) fill(); };
  if (open) {
    box.open = true;
    fill();
  }
  return box;
}

function show(tree, button) {
  for (const other of $('list').querySelectorAll('[aria-current]'))
    other.removeAttribute('aria-current');
  button.setAttribute('aria-current', 'true');
  let head = tree.failed ? 'failed: ' + tree.failed : 'reward ' + tree.reward.toFixed(3);
  if (!tree.failed && tree.adv !== null)
    head += ` · advantage ${tree.adv.toFixed(3)}, inherited by every node`;
  $('tree').replaceChildren(el('h3', tree.name), el('p', head),
    block('question', tree.query), block('gold answer', data.texts[tree.gold]),
    branch(tree, 0, true));
}

function list() {
  const kind = $('filter').value, order = $('order').selectedIndex;
  const trees = data.trees.filter(t => kind === 'all' || t.name.split(' #')[0] === kind);
  const key = [() => 0, t => t.reward, t => -t.reward, t => -t.nodes.length][order];
  trees.sort((a, b) => key(a) - key(b));
  $('list').replaceChildren();
  paged($('list'), trees, tree => {
    const score = tree.failed ? 'failed' : tree.reward.toFixed(2);
    const button = el('button', `${tree.name} · ${score} · ${tree.nodes.length} nodes`);
    button.onclick = () => show(tree, button);
    return button;
  });
  if (data.left_out)
    $('list').append(el('p', data.left_out + ' trees are not on this page', 'muted'));
}

if (data.trees.length) {
  for (const kind of ['all', ...new Set(data.trees.map(t => t.name.split(' #')[0]))]) {
    const option = el('option', kind);
    option.value = kind;  // its text would lose line breaks
    $('filter').append(option);
  }
  $('filter').onchange = $('order').onchange = list;
  list();
}
"""
