"""More notes to sort than in training, a quarter of all notes each time.

    python -m lab.work OUT.json INHERITED,... ROOTS_ONLY,...      directories of models

Trees may have one node more than there are notes, and so no budget binds.
"""
import asyncio
import random
import statistics
import sys
from dataclasses import replace

import runtime.threads  # before torch: it says how torch's threads wait

import rlm
import tasks
from eval import answer
from runtime.files import write_json
from runtime.repl_server import trees_at_once
from runtime.side_by_side import side_by_side
from tasks import notes

WORK = (3, 8, 16, 32, 64)
QUESTIONS = 64


def measured(model: rlm.RLM, method: str, work: int) -> dict:
    notes.HERE = (work, work)
    tokens = round(4 * work * notes.NOTE_TOKENS)
    asked = [tasks.make(notes, random.Random(f"work {work} {i}"), tokens, heldout=True)
             for i in range(QUESTIONS)]
    config = replace(model.config, max_nodes=work + 1)
    records = {}

    async def one(i, task):
        records[i], _ = await answer(
            method, task, model.policy, model.tokenizer, config, (work, i))

    at_once = min(64, trees_at_once(config.max_nodes))
    asyncio.run(side_by_side(one, [*enumerate(asked)], at_once, f"{method} {work}"))
    rows = list(records.values())
    assert not any(row["failed"] for row in rows)
    mean = {name: round(statistics.fmean(row[name] for row in rows), 4)
            for name in ("score", "nodes", "out", "in")}
    ends = {end: sum(row["end"] == end for row in rows) for end in {r["end"] for r in rows}}
    return {"work": work, "heldout_final": mean["score"], **mean, "ends": ends}


def main():
    out, inherited, roots_only = sys.argv[1:]
    found = {"inheritance": [], "roots only": [], "direct": []}
    for name, paths, method in (("inheritance", inherited, "rlm1"),
                                ("roots only", roots_only, "rlm1"),
                                ("direct", inherited, "direct")):
        for path in paths.split(","):
            model = rlm.RLM(path, batch=64)
            for work in WORK:
                row = measured(model, method, work)
                found[name].append(row)
                print(name, path, row, flush=True)
    write_json(out, found)


if __name__ == "__main__":
    main()
