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
METHODS = ("rlm1", "retrieval", "direct", "compaction", "rlm0", "rlm2")  # .c0 to .c5
CURVES = {  # a metric of metrics.jsonl, and the caption of its chart
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
        parts.append(score_table(rows))
    if notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in notes)
        parts.append(f"<h2>Notes</h2><ul class=muted>{items}</ul>")
    charts = [length_chart(kind, [row for row in rows if row["task"] == kind])
              for kind in dict.fromkeys(row["task"] for row in rows)]
    charts += [curve(caption, [(m["step"], m[name]) for m in metrics
                               if m.get("phase") == "grpo" and finite(m.get(name))])
               for name, caption in CURVES.items()]
    if any(charts):
        parts.append(f"<h2>Charts</h2><div class=figures>{''.join(charts)}</div>")
    if differences:
        parts.append(difference_table(differences))
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
HEAD = (f"{'task':11} {'method':10} {'length':>9} {'n':>4} {'score':>5}  "
        f"{'95 % interval':14} "
        + " ".join(f"{name:>{width}}" for name, width, _ in COLUMNS))


def table_line(row: dict) -> str:
    """A row as a line under HEAD, for a terminal."""
    line = (f"{row['task']:11} {row['method']:10} {number(row['length']):>9} "
            f"{row['n']:4} {number(row['score'], 3):>5}  {interval(row):14}")
    for name, width, digits in COLUMNS:
        line += f" {number(row[name], digits):>{width}}"
    return line


def score_table(rows: list[dict]) -> str:
    head = ["task", "method", "length", "n", "score", "interval", "unanswered", "seen",
            *(name for name, _, _ in COLUMNS)]
    lines = [[r["task"], r["method"], number(r["length"]), number(r["n"]),
              number(r["score"], 3), interval(r), number(r["unanswered"]),
              number(r["seen"], 3),
              *(number(r[name], digits) for name, _, digits in COLUMNS)] for r in rows]
    return html_table("Scores", head, lines) + (
        "<p class=muted>Length in tokens; 95 % bootstrap interval of the mean score; "
        "unanswered: trees that ended without an answer; seen: share of the context that "
        "was shown; failed: lost by the machine or the server and not scored; then tokens, "
        "calls and depth per question, seconds from start to answer, and dollars per "
        "question where the price is known.</p>")


def difference_table(differences: Sequence[dict]) -> str:
    head = ["task", "methods", "length", "n", "difference", "interval", "excludes 0"]
    lines = [[d["task"], f"{d['a']} − {d['b']}", number(d["length"]), number(d["n"]),
              f"{d['difference']:+.3f}", f"[{d['low']:+.3f}, {d['high']:+.3f}]",
              "" if d["low"] <= 0 <= d["high"] else "yes"] for d in differences]
    return html_table("Differences between methods on the same questions", head, lines)


def html_table(title: str, head: list[str], lines: list[list[str]]) -> str:
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>"
        for line in lines)
    return (f"<h2>{title}</h2><div class=scroll><table><thead><tr>{names}</tr></thead>"
            f"<tbody>{body}</tbody></table></div>")


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def interval(row: dict) -> str:
    return f"[{row['low']:.3f}, {row['high']:.3f}]" if row["n"] else "-"


# ------------------------------------------------------------------------------------------
# Charts

def length_chart(task: str, rows: list[dict]) -> str:
    """Score (0 to 1) against context length (logarithmic), one line per method; "" if there
    are not two lengths."""
    rows = sorted((r for r in rows if r["n"]), key=lambda r: r["length"])
    lengths = sorted({r["length"] for r in rows})
    if len(lengths) < 2:
        return ""
    lines = {}
    for r in rows:
        said = f"{r['method']}, {r['length']:,} tokens: {r['score']:.3f} {interval(r)}"
        point = (math.log(r["length"]), r["score"], r["low"], r["high"], said)
        lines.setdefault(r["method"], []).append(point)
    return chart(f"{task}: score against tokens of context", lines,
                 [(math.log(length), short(length)) for length in lengths],
                 (0, 0.25, 0.5, 0.75, 1))


def curve(caption: str, points: list[tuple[float, float]]) -> str:
    """A metric over the steps; "" for fewer than two points."""
    if len(points) < 2:
        return ""
    values = [value for _, value in points]
    low, high = min(0.0, *values), max(values)
    if high <= low:
        high = low + 1.0
    line = [(step, value, value, value, "") for step, value in points]
    ends = [(step, str(step)) for step, _ in (points[0], points[-1])]
    return chart(caption, {"": line}, ends, (low, (low + high) / 2, high))


def chart(caption: str, lines: dict[str, list[tuple]], x_ticks: list[tuple[float, str]],
          y_ticks: Sequence[float]) -> str:
    """An SVG figure. A line is a list of points (x, y, low, high, what it says); a point
    that says nothing has no mark."""
    first, last = x_ticks[0][0], x_ticks[-1][0]
    bottom, top = y_ticks[0], y_ticks[-1]

    def x(value: float) -> float:
        return 76 + 374 * (value - first) / ((last - first) or 1)

    def y(value: float) -> float:
        return 250 - 236 * (value - bottom) / (top - bottom)

    parts, legend = [], []
    for v in y_ticks:
        parts.append(f'<line x1=76 x2=470 y1={y(v):.1f} y2={y(v):.1f} class=grid />'
                     f'<text x=70 y={y(v) + 5:.1f} text-anchor=end>{v:.3g}</text>')
    for v, name in x_ticks:
        parts.append(f'<text x={x(v):.0f} y=272 text-anchor=middle>{name}</text>')
    for i, (name, points) in enumerate(lines.items()):
        base = name.removesuffix("-bare")
        style = f"c{METHODS.index(base) if base in METHODS else 0}"
        if base != name:
            style += " bare"
        corners = []
        for at, value, low, high, said in points:
            cx = x(at) + 3 * i  # side by side, so that no interval hides another
            corners.append(f"{cx:.1f},{y(value):.1f}")
            if not said:
                continue
            parts.append(
                f'<line x1={cx:.1f} x2={cx:.1f} y1={y(low):.1f} y2={y(high):.1f} '
                f'class="{style}"/><circle cx={cx:.1f} cy={y(value):.1f} r=3 '
                f'class="{style}"><title>{escape(said)}</title></circle>')
        parts.append(f'<polyline points="{" ".join(corners)}" class="{style}"/>')
        if name:
            legend.append(f'<li><i class="{style}"></i>{escape(name)}</li>')
    return (f'<figure><figcaption>{escape(caption)}</figcaption><svg viewBox="0 0 480 280" '
            f'role=img aria-label="{escape(caption)}">{"".join(parts)}</svg>'
            f'<ul class=legend>{"".join(legend)}</ul></figure>')


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
:root{color-scheme:light dark;--bg:light-dark(#fff,#14161a);
--fg:light-dark(#1b1d22,#e4e6eb);--muted:light-dark(#666c78,#9aa1ae);
--line:light-dark(#dfe2e8,#30343c);
--soft:light-dark(#f4f5f8,#1d2026);--blue:light-dark(#1f6fd0,#5aa2f5)}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif;
overflow-wrap:anywhere}
main{max-width:1200px;margin:0 auto;padding:16px}
h1{font-size:1.5rem;margin:.3em 0}h2{font-size:1.15rem;margin:1.6em 0 .5em}h3{margin:0}
.muted{color:var(--muted);font-size:.87rem}
.bad{color:light-dark(#b3261e,#ff8a80)}

.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}
th,td{padding:4px 10px;text-align:right;border-bottom:1px solid var(--line);
white-space:nowrap}th{color:var(--muted);font-weight:500}
th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}

.figures{display:flex;flex-wrap:wrap;gap:16px}
figure{margin:0;flex:1 1 300px;max-width:520px}
figcaption{font-weight:600;font-size:.9rem}svg{width:100%;height:auto}
svg text{fill:var(--muted);font-size:14px}.grid{stroke:var(--line)}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;padding:0;margin:4px 0;
font-size:.87rem}.bare{stroke-dasharray:5 4}
.legend i{display:inline-block;width:18px;border-top:3px solid;margin:0 6px 4px 0}
.legend .bare{border-top-style:dashed}
[class^=c]{stroke:var(--c);fill:var(--c)}i[class^=c]{color:var(--c)}
.c0{--c:var(--blue)}.c1{--c:light-dark(#c8541b,#f08a4f)}.c2{--c:light-dark(#1a8a5f,#45c493)}
.c3{--c:light-dark(#8250c4,#b48bf0)}.c4{--c:light-dark(#b8860b,#e0b23c)}
.c5{--c:light-dark(#c2306b,#f06a9d)}polyline[class]{fill:none;stroke-width:2.5}

.browser{display:grid;grid-template-columns:280px 1fr;gap:16px}.browser>*{min-width:0}
label{display:block;font-size:.87rem;color:var(--muted);margin-bottom:6px}
select,button{font:inherit;color:inherit;background:var(--soft);border-radius:6px;
border:1px solid var(--line);padding:4px 8px;max-width:100%;cursor:pointer}
#list{max-height:70vh;overflow:auto}#list button:focus{border-color:var(--blue)}
#list button{display:block;width:100%;text-align:left}
details{border-left:2px solid var(--line);padding-left:10px;margin:4px 0}
summary{cursor:pointer;padding:3px 0}
.turn{margin:8px 0;border:1px solid var(--line);border-radius:6px;overflow:hidden}
.turn>b{display:block;padding:2px 8px;font-size:.78rem;font-weight:500;
background:var(--soft);color:var(--muted)}
.turn.assistant{border-color:var(--blue)}.turn p{margin:0;padding:6px 8px 0}
pre{margin:0;padding:8px;font:13px/1.45 ui-monospace,monospace;white-space:pre-wrap;
max-height:420px;overflow:auto}
.tokens span{border-radius:2px;cursor:pointer}.tokens .off{color:var(--muted)}
.tokens .on{box-shadow:inset 0 -1px var(--fg)}
@media(max-width:700px){.browser{grid-template-columns:1fr}#list{max-height:200px}}
"""

SCRIPT = """'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const $ = id => document.getElementById(id);
const MORE = 200;  // elements that are made at once, so that thousands stay quick

function el(tag, text = '', kind = '', ...inside) {  // text only ever becomes text nodes
  const e = document.createElement(tag);
  e.textContent = text;
  e.className = kind;
  e.append(...inside);
  return e;
}

function paged(box, items, make) {
  let at = 0;
  const more = el('button');
  more.onclick = () => {
    more.remove();
    for (const item of items.slice(at, at += MORE)) box.append(make(item));
    if (at >= items.length) return;
    more.textContent = (items.length - at) + ' more';
    box.append(more);
  };
  more.onclick();
}

function tokens(turn, hasGap) {
  let about = 'Tap a token. Underlined: sampled (mask 1); the warmer, the less likely.';
  if (turn.s && hasGap) {
    const largest = Math.max(0, ...turn.g.map(Math.abs));
    about += ` Largest |gap| of log-probabilities: ${largest.toExponential(1)}.`;
  }
  const info = el('p', about, 'muted');
  const spans = turn.i.map((id, k) => {
    const span = el('span', data.pieces[id], turn.s ? 'on' : 'off');
    let facts = `${JSON.stringify(data.pieces[id])}  id ${id}  mask ${turn.s}`;
    if (turn.s) {
      const heat = Math.min(0.85, -turn.l[k] / 4).toFixed(2);
      span.style.background = `rgba(232,126,46,${heat})`;
      facts += `  log-probability ${turn.l[k]}`;
      if (hasGap) facts += `  gap ${turn.g[k]}`;
    }
    span.onclick = () => { info.textContent = facts; };
    return span;
  });
  return el('div', '', '', info, el('pre', '', 'tokens', ...spans));
}

function block(name, text, kind = '') {
  return el('div', '', 'turn ' + kind, el('b', name + ' '), el('pre', text));
}

function message(turn, hasGap) {
  const box = block(turn.r, data.texts[turn.x], turn.r);
  if (!turn.i) return box;
  let shown = box.lastChild, hidden;
  const flip = el('button', turn.i.length + ' tokens');
  flip.onclick = () => {
    hidden ??= tokens(turn, hasGap);
    shown.replaceWith(hidden);
    [shown, hidden] = [hidden, shown];
  };
  box.firstChild.append(flip);
  return box;
}

function branch(tree, i) {
  const node = tree.nodes[i];
  const said = node.t.filter(t => t.r === 'assistant').length;
  const answer = data.texts[node.a].replace(/\\s+/g, ' ').slice(0, 80);
  const isBad = node.err || !['final', 'text'].includes(node.e);
  const name = node.p ? node.k + ' ' + node.p : 'root';
  const errors = node.err ? ` · ${node.err} errors` : '';
  const line = `${name} · ${node.e} · ${said} messages · ${node.c.length} children` +
    `${errors} → ${answer}`;
  const box = el('details', '', '', el('summary', line, isBad ? 'bad' : ''));
  box.ontoggle = () => {
    if (box.childElementCount > 1) return;
    let facts = `REPL ${node.sec} s`;
    if (tree.adv !== null)
      facts += ` · ${i ? 'inherited advantage' : 'advantage'} ${tree.adv.toFixed(3)}`;
    const below = el('div');
    box.append(el('p', facts, 'muted'), ...node.t.map(turn => message(turn, node.g)),
      block('answer', data.texts[node.a]), below);
    if (node.c.length) paged(below, node.c, child => branch(tree, child));
  };
  return box;
}

function show(tree) {
  let head = tree.failed ? 'failed: ' + tree.failed : 'reward ' + tree.reward.toFixed(3);
  if (!tree.failed && tree.adv !== null)
    head += ` · advantage ${tree.adv.toFixed(3)}, inherited by every node`;
  const root = branch(tree, 0);
  $('tree').replaceChildren(el('h3', tree.name), el('p', head),
    block('question', tree.query), block('gold answer', data.texts[tree.gold]), root);
  root.open = true;
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
    button.onclick = () => show(tree);
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
