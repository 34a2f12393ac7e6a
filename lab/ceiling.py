"""The oracle, or the keyword search, on every kind of task, through the real REPL.

    python -m lab.ceiling [--tokens 10000000] [--n 1] [--kinds niah,hop] [--policy keyword]

One line per question: the score; tokens of the root's transcript (with --tokenizer DIR
those of that checkpoint, else a quarter of its characters); nodes; seconds to make the
question, for the tree and to score; the most memory that this process and all below it had
at once, where pages that several share count for each. With the oracle it fails if a
question scores under 0.99, the transcript has 4,000 tokens, or it takes a minute or 4 GiB.
"""
import argparse
import asyncio
import os
import random
import sys
import threading
import time
from pathlib import Path

import tasks
from repl import Limits
from rlm import RLMConfig, rollout
from tokenizer import Tokenizer

KINDS = [name for name in tasks.NAMES if name != "deep"]  # those whose length can be chosen


def resident() -> int:
    """Bytes in memory of this process and all below it."""
    processes = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        processes[int(pid)] = int(fields[1]), int(fields[21])  # its parent, its pages
    family, pages = {os.getpid()}, 0
    for pid in sorted(processes):  # a child's id is above its parent's, nearly always
        parent, own = processes[pid]
        if pid in family or parent in family:
            family.add(pid)
            pages += own
    return pages * os.sysconf("SC_PAGE_SIZE")


class Peak(threading.Thread):
    """The largest `resident` in the with block, looked at ten times per second."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.over = 0, threading.Event()

    def run(self):
        while not self.over.wait(0.1):
            self.most = max(self.most, resident())

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.join()


def measure(kind: str, number: int, args, tokenizer) -> bool:
    """Prints the line of one question; returns whether it meets the limits."""
    most = getattr(tasks.load(kind), "MOST", args.tokens)
    tokens = min(args.tokens, most)
    times = [time.monotonic()]
    task = tasks.make(kind, random.Random(f"ceiling {number}"), tokens)
    times.append(time.monotonic())
    script = {"oracle": tasks.oracle, "keyword": tasks.keyword}[args.policy]
    config = RLMConfig(limits=Limits(sandbox=args.sandbox))
    with Peak() as peak:
        policy = tasks.scripted(script, task, tokenizer)
        root = asyncio.run(rollout(task, policy, tokenizer, config))
        times.append(time.monotonic())
        score = tasks.reward(task, root.answer)
        times.append(time.monotonic())

    nodes = list(root.walk())
    transcript = len(root.ids) or sum(len(turn.text) for turn in root.turns) // 4
    made, ran, scored = (b - a for a, b in zip(times, times[1:]))
    print(f"{kind:10} {tokens:10,} {score:6.3f} {transcript:11,} {len(nodes):6} "
          f"{made:7.1f} {ran:7.1f} {scored:8.1f} {peak.most >> 20:6,}", flush=True)
    wrong = root.end != "final" or any(node.errors for node in nodes)
    if wrong:
        print(root.end, *(node.turns[-1].text[-2000:] for node in nodes if node.errors))
    slow = times[-1] - times[0] >= 60 or peak.most >= 4 << 30
    return score >= 0.99 and transcript < 4000 and not slow and not wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--n", type=int, default=1, help="questions per kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--policy", default="oracle", choices=("oracle", "keyword"))
    parser.add_argument("--tokenizer", help="checkpoint directory")
    parser.add_argument("--sandbox", default="auto")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_pretrained(args.tokenizer) if args.tokenizer else None
    print("kind           tokens  score  transcript  nodes  made s  tree s  score s    MiB")
    met = [measure(kind, number, args, tokenizer)
           for kind in args.kinds.split(",") for number in range(args.n)]
    if args.policy == "oracle" and not all(met):
        sys.exit("not met")


if __name__ == "__main__":
    main()
