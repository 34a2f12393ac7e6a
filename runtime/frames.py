"""The frames that a REPL's client, server and worker exchange, and what may be in them.

A frame is a length of 4 bytes, a kind of 1 byte, and a payload of that length in JSON:

    kind  sender  meaning                  payload
    S     client  start                    {"context": ..., "tools": ..., "host": [...]}
    X     client  execute a block          {"code": ...}
    R     client  the answers to a query   [number, [answer, ...]]
    Q     worker  a query                  [number, kind, prompts, contexts]
    D     worker  done                     the fields of a `Result`
    T     server  time, before each D      seconds that the block ran

A worker runs code that nobody has checked, so the client does not trust its frames: they
have a largest size, and `read_result` and `read_query` refuse what no honest worker sends.
Left out: which frame of a worker may come when. The server decides (repl_server.py).
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import length_hint
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.sandbox import Limits

HEADER = struct.Struct("!Ic")  # length of the payload, kind
DEPTH = 100  # containers nested more deeply than this become text
# What the code finds in its namespace: two variables, and functions.
BUILTINS = ("context", "answer", "FINAL", "FINAL_VAR", "SHOW_VARS", "llm_query",
            "llm_query_batched", "rlm_query", "rlm_query_batched")
KINDS = ("llm", "rlm", "tool")  # of queries; a tool's is its name with its arguments


@dataclass(frozen=True)
class Result:
    """What came of one block."""

    stdout: str = ""  # stdout and stderr together, cut at the end
    error: str = ""  # a short traceback, or why the process died; "" if all went well
    final: Any = None  # the answer as a JSON value
    done: bool = False  # FINAL was called (its value may be None)
    draft: Any = None  # answer["content"], if the code has put something there
    died: str = ""  # "timeout", "crash" or "protocol": the process is gone
    # Wall clock of the block by the server, which is not delayed as the client may be.
    # Waiting for answers is not in it.
    seconds: float = field(default=0.0, compare=False)


class FrameTooLarge(ValueError):
    pass


def frame(kind: bytes, message: Any, largest_mb: int) -> bytes:
    payload = json.dumps(message).encode()  # ASCII, so that lone surrogates travel
    if len(payload) > largest_mb << 20:
        size = len(payload) >> 20
        raise FrameTooLarge(f"{size} MB in one message, the limit is {largest_mb}")
    return HEADER.pack(len(payload), kind) + payload


def take_frame(inbox: bytearray, largest_mb: int) -> tuple[bytes, bytes] | None:
    """Cut one frame off `inbox`: its kind, and all of it. None: it is not all there yet."""
    if len(inbox) < HEADER.size:
        return None
    length, kind = HEADER.unpack_from(inbox)
    if length > largest_mb << 20:
        raise FrameTooLarge(f"a frame of {length} bytes")
    length += HEADER.size
    if length > len(inbox):
        return None
    with memoryview(inbox) as view:  # a slice of `inbox` itself would be copied twice
        data = bytes(view[:length])
    del inbox[:length]
    return kind, data


def read_result(data: bytes, limits: Limits) -> Result:
    """A D frame as a Result.

    Raises ValueError, TypeError or RecursionError for what no honest worker sends.
    """
    # JSON takes up to 12 bytes per character. All the rest takes less than 1,000.
    if len(data) > 2 * limits.answer_chars + 12 * 2 * limits.output_chars + 1000:
        raise ValueError(f"a result of {len(data)} bytes")
    result = Result(**json.loads(data[HEADER.size :]))
    typed = isinstance(result.stdout, str) and isinstance(result.error, str)
    known = result.died in ("", "timeout", "crash", "protocol")
    if not typed or not known or not isinstance(result.done, bool):
        raise TypeError("a result that no worker sends")
    return replace(result, final=json_value(result.final), draft=json_value(result.draft))


def read_query(data: bytes) -> tuple[int, str, list[str], list | None]:
    """A Q frame as (number, kind, prompts, contexts). Raises like `read_result`."""
    number, kind, prompts, contexts = json.loads(data[HEADER.size :])
    texts = isinstance(prompts, list) and all(isinstance(text, str) for text in prompts)
    if type(number) is not int or kind not in KINDS or not texts or not prompts:
        raise TypeError("a query that no worker sends")
    if contexts is not None:
        if not isinstance(contexts, list) or len(contexts) != len(prompts):
            raise TypeError("a query whose contexts do not match its prompts")
        contexts = [json_value(context) for context in contexts]
    if kind == "tool":
        [(arguments, named)] = contexts  # raises for any other number
        if not isinstance(arguments, list) or not isinstance(named, dict):
            raise TypeError("a call of a tool that no worker sends")
    return number, kind, prompts, contexts


def json_value(value: Any, above: tuple[int, ...] = (),
               left: Iterator | None = None) -> Any:
    """`value` as JSON has it: a set, a range or an array becomes a list, a dataclass a
    dict, a number of numpy a number. What JSON cannot say, or is too deep, becomes its str.

    `left` is asked for one item per value; ValueError if it has none left. Raises TypeError
    for a generator, as to read it would use it up, and for what has no str."""
    # `above`: the ids of the containers around it. A cycle ends at its first repetition.
    if left is not None and next(left, None) is None:
        raise ValueError("it has too many items")
    if value is None or isinstance(value, (str, float, bool)):
        return value
    if isinstance(value, int) and value.bit_length() < 10_000:  # Python prints no larger
        return value
    if isinstance(value, Iterator):
        kind = type(value).__name__
        raise TypeError(f"a {kind} is not a value yet: make it a list, with list(...)")
    if len(above) < DEPTH and id(value) not in above:
        above = (*above, id(value))
        if hasattr(type(value), "tolist"):  # numpy's; its str leaves the middle out
            if left is not None and getattr(value, "size", 0) > length_hint(left):
                raise ValueError("it has too many items")
            return json_value(value.tolist(), above, left)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = dataclasses.fields(value)
            value = {field.name: getattr(value, field.name) for field in fields}
        if isinstance(value, Mapping):
            return {as_text(key): json_value(item, above, left)
                    for key, item in value.items()}
        if isinstance(value, (set, frozenset)):
            value = in_order(value)
        if isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
            return [json_value(item, above, left) for item in value]
    return as_text(value)


def in_order(values: Iterable) -> list:
    """A set as a list, in the same order every time."""
    values = list(values)
    if {type(value) for value in values} in ({str}, {int}, {float}):
        return sorted(values)
    return sorted(values, key=lambda value: json.dumps(json_value(value), sort_keys=True))


def as_text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:
        kind = type(value).__name__
        raise TypeError(f"a {kind} without a str is no value: {error}") from None
