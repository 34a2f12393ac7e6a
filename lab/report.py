"""One self-contained HTML page of an evaluation or a training run: `page(...) -> str`.

The tables and charts are plain HTML and SVG. The trees are deflated JSON; the script of
report.html shows one of them at a time, each node when it is opened, so that thousands of
nodes cost nothing until then. Nothing is fetched.

What a model wrote is hostile. It reaches the page in three ways only: as text escaped for
HTML, inside the deflated JSON, of which the script makes text nodes, and as the escaped
labels of a tree's drawing (lab/chart.py). A content security policy lets no other script
run.

Left out: everything that computes scores (eval.py). Standard library, tree.py and the
drawing of trees.
"""
import base64
import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lab import chart as drawings
from tree import Node, Rollout


TEMPLATE = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
MOST_BYTES = 2_000_000  # of all trees on a page, deflated; base64 makes it a third more
MOST_TEXT = 20_000  # characters of one message on the page
METHODS = ("rlm1", "retrieval", "direct", "compaction", "rlm0", "rlm2")  # .c0 to .c5
SHARES = (0, 0.25, 0.5, 0.75, 1)  # ticks of what is between 0 and 1
CURVES = {  # a metric of metrics.jsonl, and the caption and unit of its chart
    "reward": ("Reward", "mean reward"),
    "entropy": ("Entropy of what is sampled", "nats per token"),
    "gap": ("Sampler against trainer", "mean |gap| of log-probabilities"),
    "grad_norm": ("Norm of the gradient", "before clipping"),
    "tokens": ("Length", "sampled tokens per tree"),
    "flat": ("Groups without a signal", "share of the groups"),
}


def page(title: str, settings: dict, rows: list[dict],
         trees: Sequence[tuple[str, Rollout]] = (), tokenizer=None,
         metrics: Sequence[dict] = (), advantages: dict[Node, float] = {},
         gaps: dict[Node, list[float]] = {}, differences: Sequence[dict] = (),
         notes: Sequence[str] = (), defaults: dict = {}, state: str = "") -> str:
    """The page as a text.

    `state` says how far a run has come. `rows` and `differences` are made by eval.py,
    `metrics` are the lines of metrics.jsonl. `trees` are (label, rollout); labels that are
    equal before " #" can be shown together.
    `advantages` has those of nodes that were trained, `gaps` for each sampled token of a
    node its log-probability under the trainer minus that under the sampler. Settings that
    are as in `defaults` are folded."""
    parts = [f"<h1>{escape(title)}</h1>"]
    if state:
        parts.append(f"<p>{escape(state)}</p>")
    parts.append(setting_list(settings, defaults))
    if rows:
        parts.append(score_table(rows))
    if notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in notes)
        parts.append(f"<h2>Notes</h2><ul class=muted>{items}</ul>")
    charts = [length_chart(kind, [row for row in rows if row["task"] == kind])
              for kind in dict.fromkeys(row["task"] for row in rows)]
    charts += [curve(name, metrics) for name in CURVES]
    if any(charts):
        parts.append(f"<h2>Charts</h2><div class=figures>{''.join(charts)}</div>")
    if differences:
        parts.append(difference_table(differences))

    advantages = {node: a for node, a in advantages.items() if finite(a)}  # JSON has no NaN
    script = TEMPLATE.rpartition("<script>")[2].partition("</script>")[0]
    policy = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    fill = {"title": escape(title), "policy": policy, "body": "".join(parts),
            "data": pack(trees, tokenizer, advantages, gaps)}
    text = re.sub(r"\{\{(\w+)\}\}", lambda name: fill[name[1]], TEMPLATE)
    return text.encode("utf-8", "replace").decode()


def setting_list(settings: dict, defaults: dict) -> str:
    """What is not as usual, and everything when it is opened."""
    def line(values: dict) -> str:
        shown = [f"{name} {value}" for name, value in values.items()]
        return f"<p class=muted>{escape(' · '.join(shown))}</p>"

    given = {name: value for name, value in settings.items() if value not in (None, "")}
    changed = {name: value for name, value in given.items()
               if not isinstance(value, dict) and value != defaults.get(name)}
    if len(changed) == len(given):
        return line(changed)
    return (f"{line(changed)}<details class=flags><summary>all {len(given)} settings"
            f"</summary>{line(given)}</details>")


# ------------------------------------------------------------------------------------------
# Tables

# The columns of numbers: the key in a row, the width in a terminal, digits after the point.
COLUMNS = (("failed", 6, 0), ("in", 7, 0), ("reused", 10, 0), ("out", 7, 0),
           ("calls", 6, 1), ("depth", 5, 1), ("p50", 6, 1), ("p95", 6, 1),
           ("dollars", 8, 4))
UNITS = {"in": " tok", "reused": " tok", "out": " tok", "p50": " s", "p95": " s"}
TITLES = [name + UNITS.get(name, "") for name, _, _ in COLUMNS]
HEAD = (f"{'task':11} {'method':10} {'length':>9} {'n':>4} {'score':>5}  "
        f"{'95 % interval':14} "
        + " ".join(f"{title:>{column[1]}}" for title, column in zip(TITLES, COLUMNS)))


def table_line(row: dict) -> str:
    """A row as a line under HEAD, for a terminal."""
    line = (f"{row['task']:11} {row['method']:10} {number(row['length']):>9} "
            f"{row['n']:4} {number(row['score'], 3):>5}  {interval(row):14}")
    for name, width, digits in COLUMNS:
        line += f" {number(row[name], digits):>{width}}"
    return line


def score_table(rows: list[dict]) -> str:
    head = ["task", "method", "length", "n", "score", "interval", "unanswered", "seen",
            *TITLES]
    lines = [[r["task"], r["method"], number(r["length"]), number(r["n"]),
              number(r["score"], 3), interval(r), number(r["unanswered"]),
              number(r["seen"], 3),
              *(number(r[name], digits) for name, _, digits in COLUMNS)] for r in rows]
    return html_table("Scores", head, lines) + (
        "<p class=muted>Length in characters / 4; 95 % interval of the mean score, by "
        "Wilson where all scores are 0 or 1, else by a bootstrap; "
        "unanswered: trees that ended without an answer; seen: share of the context that "
        "was shown; failed: lost by the machine or the server and not scored. Then, per "
        "question: tokens in, those of them that came from a cache, tokens out, "
        "calls, depth, seconds of its own (median and 95th percentile), and dollars where "
        "the price is known.</p>")


def difference_table(differences: Sequence[dict]) -> str:
    head = ["task", "methods", "length", "n", "difference", "interval", "excludes 0"]
    lines = [[d["task"], f"{d['a']} − {d['b']}", number(d["length"]), number(d["n"]),
              f"{d['difference']:+.3f}", f"[{d['low']:+.3f}, {d['high']:+.3f}]",
              "" if d["low"] <= 0 <= d["high"] else "yes"] for d in differences]
    return html_table("Differences between methods on the same questions", head, lines)


def html_table(title: str, head: list[str], lines: list[list[str]]) -> str:
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f'<td data-name="{escape(name)}">{escape(cell)}</td>'
                         for name, cell in zip(head, line)) + "</tr>" for line in lines)
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
        said = f"{r['length']:,} tokens: {r['score']:.3f} {interval(r)}"
        point = (math.log(r["length"]), r["score"], r["low"], r["high"], said)
        lines.setdefault(r["method"], []).append(point)
    return chart(f"{task}: score against length", lines,
                 [(math.log(length), short(length)) for length in lengths], SHARES,
                 "tokens of context", "mean score")


def curve(name: str, metrics: Sequence[dict]) -> str:
    """A metric over the steps of GRPO, the reward with what was held out; "" for fewer than
    two points."""
    caption, unit = CURVES[name]
    points = [(m["step"], m[name], m[name], m[name], "") for m in metrics
              if m.get("phase") == "grpo" and finite(m.get(name))]
    if len(points) < 2:
        return ""
    lines = {"training": points}
    for m in metrics if name == "reward" else ():
        if m.get("phase") == "eval" and "step" in m:
            # heldout_warmup, _now and _final: the same questions; heldout_4x: longer ones.
            times = m["name"].rpartition("_")[2]
            line = f"held out, {times} as long" if times.endswith("x") else "held out"
            said = f"step {m['step']}: {m['score']:.3f} {interval(m)}"
            lines.setdefault(line, []).append(
                (m["step"], m["score"], m["low"], m["high"], said))
    steps = [point[0] for line in lines.values() for point in line]
    y_ticks = SHARES
    if name not in ("reward", "flat"):
        values = [value for _, value, *_ in points]
        y_ticks = ticks(min(0.0, *values), max(values))
    return chart(caption, lines, [(v, f"{v:g}") for v in ticks(min(steps), max(steps), 6)],
                 y_ticks, "step of GRPO", unit)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers, at most `most` + 1 of them, the first not above `low` and the last not
    below `high`: multiples of 1, 2 or 5 times a power of ten."""
    if high <= low:
        high = low + 1.0
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for size in (1, 2, 5, 10, 20):
        first, last = math.floor(low / power / size), math.ceil(high / power / size)
        if last - first <= most:
            break
    return [i * size * power for i in range(first, last + 1)]


def chart(caption: str, lines: dict[str, list[tuple]], x_ticks: list[tuple[float, str]],
          y_ticks: Sequence[float], x_name: str, y_name: str) -> str:
    """An SVG figure. A line is a list of points (x, y, low, high, what it says); a point
    that says nothing has no mark."""
    first, last = x_ticks[0][0], x_ticks[-1][0]
    bottom, top = y_ticks[0], y_ticks[-1]

    def x(value: float) -> float:
        return 76 + 374 * (value - first) / ((last - first) or 1)

    def y(value: float) -> float:
        return 264 - 236 * (value - bottom) / (top - bottom)

    parts = [f'<text x=4 y=14>{escape(y_name)}</text>'
             f'<text x=263 y=306 text-anchor=middle>{escape(x_name)}</text>']
    legend, taken = [], []
    for v in y_ticks:
        parts.append(f'<line x1=76 x2=470 y1={y(v):.1f} y2={y(v):.1f} class=grid />'
                     f'<text x=70 y={y(v) + 5:.1f} text-anchor=end>{v:.6g}</text>')
    for v, name in x_ticks:
        parts.append(f'<text x={x(v):.0f} y=286 text-anchor=middle>{name}</text>')
    for i, (name, points) in enumerate(lines.items()):
        if len(lines) > 1 and not any(value for _, value, *_ in points):
            legend.append(f"<li>{escape(name)}: 0 everywhere</li>")
            continue
        base = name.removesuffix("-bare")
        style = f"c{METHODS.index(base) if base in METHODS else i % len(METHODS)}"
        if base != name:
            style += " bare"
        corners = []
        for at, value, low, high, said in points:
            # Beside each other, so that no line and no interval hides another.
            aside = 3 * taken.count((at, value))
            taken.append((at, value))
            cx, cy = x(at) + 3 * i * bool(said), y(value) - aside
            corners.append(f"{cx:.1f},{cy:.1f}")
            if not said:
                continue
            parts.append(
                f'<line x1={cx:.1f} x2={cx:.1f} y1={y(low):.1f} y2={y(high):.1f} '
                f'class="{style}"/><circle cx={cx:.1f} cy={cy:.1f} r=4 '
                f'class="{style}"><title>{escape(f"{name}, {said}")}</title></circle>')
        parts.append(f'<polyline points="{" ".join(corners)}" class="{style}"/>')
        if len(lines) > 1:
            legend.append(f'<li><i class="{style}"></i>{escape(name)}</li>')
    return (f'<figure><figcaption>{escape(caption)}</figcaption><svg viewBox="0 0 480 310" '
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
         advantages: dict[Node, float] = {}, gaps: dict[Node, list[float]] = {}) -> str:
    """JSON lines, deflated, in base64: one line per tree, at least one, as many as
    MOST_BYTES hold. The last line says which tree to open, and how many are left out."""
    deflate = zlib.compressobj()
    parts, size, count = [], 0, 0

    def squeezed(row: dict, deflate) -> bytes:
        line = json.dumps(row, separators=(",", ":")) + "\n"
        return deflate.compress(line.encode()) + deflate.flush(zlib.Z_SYNC_FLUSH)

    for row in packed(trees, tokenizer, advantages, gaps):
        before = deflate.copy()
        part = squeezed(row, deflate)
        size += len(part)
        if count and size > MOST_BYTES:
            deflate = before
            break
        parts.append(part)
        count += 1
    last = {"first": opening(trees[:count]), "left_out": len(trees) - count}
    parts.append(squeezed(last, deflate))
    return base64.b64encode(b"".join(parts) + deflate.flush()).decode()


def packed(trees: Sequence[tuple[str, Rollout]], tokenizer, advantages: dict[Node, float],
           gaps: dict[Node, list[float]]) -> Iterator[dict]:
    """Trees as JSON values for the script.

    The keys are short, since there are thousands of each. A text that repeats (the system
    prompts) and what a token stands for are in the value of the first tree that needs them;
    turns and nodes refer to a text by its number."""
    numbers: dict[str, int] = {}  # of each text
    new_texts: list[str] = []
    new_pieces: dict[int, str] = {}
    known: set[int] = set()  # tokens
    largest = max(map(abs, advantages.values()), default=0.0)

    def text(value: Any) -> int:
        value = cut(as_text(value))
        if value not in numbers:
            numbers[value] = len(numbers)
            new_texts.append(value)
        return numbers[value]

    def pack_turn(turn, node_gaps) -> dict:
        sampled = turn.logprobs is not None
        row = {"r": turn.role, "x": text(turn.text), "s": int(sampled)}
        if tokenizer is None or not 0 < len(turn.ids) <= MOST_TEXT:
            return row
        row["i"] = turn.ids
        for i in set(turn.ids) - known:
            known.add(i)
            new_pieces[i] = tokenizer.decode([i])
        if sampled:
            row["l"] = [round(p, 2) if finite(p) else 0 for p in turn.logprobs]
        if sampled and node_gaps is not None:  # their order of magnitude is what counts
            of_turn = [next(node_gaps, 0) for _ in turn.ids]
            row["g"] = [float(f"{gap:.0e}") if finite(gap) else 0 for gap in of_turn]
        return row

    def pack_node(node: Node, at: dict[Node, int]) -> dict:
        node_gaps = iter(gaps[node]) if node in gaps else None
        return {
            "p": ".".join(map(str, node.path)), "k": node.kind, "e": node.end,
            "c": [at[child] for child in node.children], "err": len(node.errors),
            "sec": round(node.repl_seconds, 3), "n": drawings.sampled(node),
            "own": node.score if finite(node.score) else None,
            "adv": advantages.get(node), "a": text(node.answer),
            "t": [pack_turn(turn, node_gaps) for turn in node.turns],
            "g": int(node in gaps)}

    for label, rollout in trees:
        at = {node: i for i, node in enumerate(rollout.root.walk())}
        task = rollout.task if isinstance(rollout.task, dict) else vars(rollout.task)
        answer, gold = marked(rollout.root.answer, task.get("answer"))
        if task.get("answer") is None:
            gold = None
        tree = {
            "name": label, "group": rollout.group, "query": cut(task.get("query", "")),
            "reward": rollout.reward if finite(rollout.reward) else None,
            "failed": cut(rollout.failed), "end": rollout.root.end,
            "depth": max(node.depth for node in at),
            "sampled": sum(drawings.sampled(node) for node in at),
            "errors": sum(len(node.errors) for node in at), "answer": answer, "gold": gold,
            "svg": drawings.tree(rollout.root, advantages, largest),
            "nodes": [pack_node(node, at) for node in at]}
        yield {"tree": tree, "texts": new_texts, "pieces": new_pieces}
        new_texts, new_pieces = [], {}


def opening(trees: Sequence[tuple[str, Rollout]]) -> int:
    """Which tree to open: the worst interesting one. That is the tree with the lowest
    reward in the group whose rewards differ most. Where no group's do (an evaluation has
    one tree per question), it is the worst that ended properly or delegated. Of equally bad
    ones it is the largest tree."""
    groups, proper = {}, []
    for i, (label, tree) in enumerate(trees):
        if tree.failed:
            continue
        groups.setdefault((label.split(" #")[0], tree.group), []).append(i)
        if drawings.answered(tree.root) or tree.root.children:
            proper.append(i)

    def spread(members: list[int]) -> float:
        rewards = [trees[i][1].reward for i in members]
        return max(rewards) - min(rewards)

    widest = max(groups.values(), key=spread, default=[])
    if not widest or spread(widest) == 0:
        widest = proper or range(len(trees))

    def badness(i: int) -> tuple[float, int]:
        tree = trees[i][1]
        return -tree.reward, len(list(tree.root.walk()))

    return max(widest, key=badness, default=0)


# --- the answer beside the gold -----------------------------------------------------------

def marked(answer: Any, gold: Any) -> tuple[list, list]:
    """Both as [text, is it a hit?] in a row.

    A value of one is a hit where the other has the same value, under the same key if both
    are dicts. If a value is a part of one of the other side, this part is; one of less than
    three characters has to be all of it. Case and white space do not count. Texts that are
    too long, and those without a hit, are left plain."""
    plain = [[cut(as_text(answer)), 0]], [[cut(as_text(gold)), 0]]
    whole = isinstance(gold, list) and any(isinstance(part, list) for part in gold)
    mine, theirs = leaves(answer, whole=whole), leaves(gold, whole=whole)
    if sum(len(text) + 1 for _, text in mine + theirs) > MOST_TEXT:
        return plain
    letters: dict[str, str] = {}
    spans = [[[] for _ in mine], [[] for _ in theirs]]  # the hits in each leaf
    coded = spelled(mine, letters), spelled(theirs, letters)
    mark(mine, coded[0], theirs, coded[1], *spans)
    mark(theirs, coded[1], mine, coded[0], *reversed(spans))
    if not any(map(any, spans)):
        return plain
    sides = [[part for leaf, hits in zip(side, found) for part in leaf_parts(*leaf, hits)]
             for side, found in zip((mine, theirs), spans)]
    return sides[0], sides[1]


def spelled(side: list[tuple[str, str]], letters: dict[str, str]) -> list[tuple[str, list]]:
    """Each leaf as a text of one letter per word or sign, and where these stand in it. So
    str.find, which is fast, finds whole words."""
    coded = []
    for _, text in side:
        words = list(re.finditer(r"\w+|[^\w\s]", text))
        word = "".join(letters.setdefault(match[0].casefold(), chr(len(letters) + 1))
                       for match in words)
        coded.append((word, [match.span() for match in words]))
    return coded


def mark(side: list, coded: list, others: list, needles: list, spans: list,
         of_others: list) -> None:
    """Add to `spans` where leaves of the other side stand in those of this side, and to
    `of_others` all of each leaf that does. Leaves that are alike are looked for once."""
    text = "".join(word + "\0" for word, _ in coded)
    places = [(i, begin, end) for i, (_, at) in enumerate(coded)
              for begin, end in [*at, (0, 0)]]
    alike: dict[str, list[int]] = {}
    for j, (word, _) in enumerate(needles):
        alike.setdefault(word, []).append(j)
    alike.pop("", None)
    for word, owners in alike.items():
        keys, reached = {others[j][0] for j in owners}, set()
        short = len(others[owners[0]][1]) < 3
        last = -len(word)
        while (last := text.find(word, last + len(word))) >= 0:
            i, begin, _ = places[last]
            key = side[i][0]
            fits = not key or "" in keys or key in keys
            if fits and not (short and word != coded[i][0]):
                spans[i].append((begin, places[last + len(word) - 1][2]))
                reached.add(key)
        for j in owners:
            key = others[j][0]
            if reached and (not key or "" in reached or key in reached):
                of_others[j].append((0, len(others[j][1])))


def leaves(value: Any, key: str = "", whole: bool = False) -> list[tuple[str, str]]:
    """The values of a JSON value as texts, each with its key, "" without one. With `whole`
    a list that holds no list (a pair, say) is one value."""
    if value is None:
        return []
    if isinstance(value, dict):
        return [leaf for name, part in value.items()
                for leaf in leaves(part, str(name), whole)]
    if isinstance(value, list):
        inner = any(isinstance(part, (list, dict)) for part in value)
        if inner or not whole:
            return [leaf for part in value for leaf in leaves(part, key, whole)]
        return [(key, json.dumps(value))]
    return [(key, as_text(value))]


def leaf_parts(key: str, text: str, spans: list[tuple[int, int]]) -> list:
    parts, at = [[f"{key}: " if key else "", 0]], 0
    for begin, end in sorted(spans):
        if end > at:
            parts += [[text[at:max(at, begin)], 0], [text[max(at, begin):end], 1]]
            at = end
    return [*parts, [text[at:] + "\n", 0]]


def as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, indent=1)


def cut(text: str) -> str:
    if len(text) <= MOST_TEXT:
        return text
    return f"{text[:MOST_TEXT]}\n… {len(text) - MOST_TEXT:,} more characters"
