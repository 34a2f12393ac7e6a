"""Many calls of a coroutine, a bounded number at a time, under a progress bar."""
import asyncio
import time
from collections.abc import Callable
from typing import Any


EVERY_SECONDS = 30.0  # between lines of progress, where nobody sees a bar


async def side_by_side(one: Callable, items: list[tuple], at_once: int, label: str) -> list:
    """`await one(*item)` for all items, in order, up to `at_once` at a time. Without a
    label there is no bar. Where stderr is no terminal, lines take its place."""
    from tqdm import tqdm  # here: one question needs no bar

    gate, done = asyncio.Semaphore(at_once), []
    said = time.monotonic()

    async def gated(item: tuple) -> Any:
        nonlocal said
        async with gate:
            result = await one(*item)
        bar.update()
        done.append(item)
        if label and bar.disable and time.monotonic() - said > EVERY_SECONDS:
            said = time.monotonic()
            print(f"{label}: {len(done)} of {len(items)}")
        return result

    hidden = None if label else True  # None: shown in a terminal
    with tqdm(total=len(items), desc=label, leave=False, disable=hidden) as bar:
        return await asyncio.gather(*map(gated, items))
