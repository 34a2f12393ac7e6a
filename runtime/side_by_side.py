"""Many calls of a coroutine, a bounded number at a time, under a progress bar."""
import asyncio
from collections.abc import Callable
from typing import Any


async def side_by_side(one: Callable, items: list[tuple], at_once: int, label: str) -> list:
    """`await one(*item)` for all items, in order, up to `at_once` at a time. Without a
    label there is no bar."""
    from tqdm import tqdm  # here: one question needs no bar

    gate = asyncio.Semaphore(at_once)

    async def gated(item: tuple) -> Any:
        async with gate:
            result = await one(*item)
        bar.update()
        return result

    hidden = None if label else True  # None: shown in a terminal
    with tqdm(total=len(items), desc=label, leave=False, disable=hidden) as bar:
        return await asyncio.gather(*map(gated, items))
