"""The oracle and the keyword search on every kind of task, through the real REPL.

    python tests/ceiling.py [--tokens 10000000] [--n 1] [--kinds niah,hop] [--policy keyword]

One line a question: score; tokens of the root's transcript (with --tokenizer DIR those of that
checkpoint, else a quarter of its characters); nodes; depth; seconds to make the question, for the
tree and to score; the most memory that this process and all below it had at once, where pages that
several share count for each. With the oracle it fails if a question scores under 0.99, the
transcript has 4,000 tokens, or it takes a minute or 4 GiB.
"""
import argparse
import asyncio
import os
import random
import resource
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tasks  # noqa: E402
from repl import Limits  # noqa: E402
from rlm import RLMConfig, rollout  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402
from tree import Completion, Node  # noqa: E402


def resident() -> int:
    """Bytes in memory of this process and all below it; pages they share count once a process."""
    kin, total = {os.getpid()}, 0
    parents = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(pid)] = int(stat[1]), int(stat[21]) * os.sysconf("SC_PAGE_SIZE")
    for pid in sorted(parents):  # a child's id is above its parent's, but for a wrap-around
        if parents[pid][0] in kin or pid in kin:
            kin.add(pid)
            total += parents[pid][1]
    return total


class Peak(threading.Thread):
    """The largest `resident` while it runs, looked at ten times a second."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.over = 0, threading.Event()

    def run(self):
        while not self.over.wait(0.1):
            self.most = max(self.most, resident())


def play(task: tasks.Task, script, tokenizer, config: RLMConfig) -> Node:
    async def policy(node, max_tokens, key):
        text = script(task, node, 0)
        ids = tokenizer.encode(text) if tokenizer else ()
        assert len(ids) <= max_tokens, f"a message of {len(ids)} tokens, {max_tokens} allowed"
        return Completion(text, tuple(ids))

    return asyncio.run(rollout(task, policy, tokenizer, config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--n", type=int, default=1, help="questions of a kind")
    parser.add_argument("--kinds", default=",".join(tasks.KINDS))
    parser.add_argument("--policy", default="oracle", choices=("oracle", "keyword"))
    parser.add_argument("--tokenizer", help="checkpoint directory")
    parser.add_argument("--sandbox", default="auto")
    args = parser.parse_args()
    script = tasks.oracle if args.policy == "oracle" else tasks.keyword_script
    tokenizer = Tokenizer.from_pretrained(args.tokenizer) if args.tokenizer else None
    config = RLMConfig(limits=Limits(sandbox=args.sandbox))
    print("kind          tokens  score  transcript  nodes  depth  made s  tree s  score s  MiB")
    failed = False
    for kind in args.kinds.split(","):
        for i in range(args.n):
            start = time.monotonic()
            tokens = min(args.tokens, tasks.SHORTER.get(kind, args.tokens))
            task = tasks.make_task(kind, random.Random(f"ceiling {i}"), tokens=tokens)
            made = time.monotonic()
            peak = Peak()
            peak.start()
            root = play(task, script, tokenizer, config)
            ran = time.monotonic()
            score = tasks.reward(task, root.answer)
            end = time.monotonic()
            peak.over.set()
            peak.join()
            transcript = len(root.ids) or sum(len(turn.text) for turn in root.turns) / 4
            nodes = list(root.walk())
            print(f"{kind:10} {tokens:9,} {score:6.3f} {transcript:11.0f} {len(nodes):6} "
                  f"{max(n.depth for n in nodes):6} {made - start:7.1f} {ran - made:7.1f} "
                  f"{end - ran:8.1f} {peak.most >> 20:5,}", flush=True)
            wrong = root.end != "final" or any(n.errors for n in nodes)
            if wrong:
                print(root.end, [n.turns[-1].text[-2000:] for n in nodes if n.errors][:1])
            if args.policy == "oracle":
                failed |= (score < 0.99 or transcript >= 4000 or end - start >= 60
                           or peak.most >= 4 << 30 or wrong)
            del task, root, nodes
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{most:,} MiB at most in this process alone")
    if failed:
        sys.exit("not met")


if __name__ == "__main__":
    main()
