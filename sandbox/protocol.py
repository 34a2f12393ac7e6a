"""The messages between a REPL's client, server and worker, as frames.

A frame is a length of 4 bytes, a kind of 1 byte, and a payload of that length in JSON:

    client:  S {"context": ..., ...}             start; the first block comes at once
             X {"code": ...}                     execute a block
             R [answer, ...]                     the answers to a query
    worker:  S error                             it has started, or why it has not
             Q [kind, prompts, contexts]         a query
             D {"stdout": ..., ...}              done: the fields of a `Result`
    server:  T seconds                           before each D, how long the block ran; with
                                                 the first block, also the start
             F {"error": ..., ...}               in place of a D: it did not start

The client does not trust the frames of a worker: `read_result` and `read_query` check them.
The server passes on no S. It is sent before any code runs, and F comes from the server
alone: so no code can pretend that the machine failed.
"""
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sandbox.isolation import Limits

HEADER = struct.Struct("!Ic")  # length of the payload, kind
CAUSES = ("timeout", "crash", "protocol")
DEPTH = 100  # containers nested more deeply than this become text


@dataclass(frozen=True)
class Result:
    """The result of one block."""

    stdout: str = ""  # with stderr; cut at limits.output_chars
    error: str = ""  # a short traceback, or why the process died; else ""
    final: Any = None  # the answer as a JSON value
    done: bool = False  # FINAL was called (its value may be None)
    draft: Any = None  # answer["content"], if the code has put something there
    died: str = ""  # one of CAUSES, or memory: the process is gone
    # Processor time, or a tenth of the wall clock if that is more. Waiting for answers is
    # not counted.
    seconds: float = field(default=0.0, compare=False)


def frame(kind: bytes, message: Any, largest_mb: int) -> bytes:
    """A message in bytes. Raises ValueError if it is too large."""
    payload = json.dumps(message).encode()  # ASCII, so that lone surrogates travel
    if len(payload) > largest_mb << 20:
        raise ValueError(f"a message of {len(payload)} bytes, the limit is {largest_mb} MB")
    return HEADER.pack(len(payload), kind) + payload


def take_frame(inbox: bytearray, largest_mb: int) -> tuple[bytes, bytes] | None:
    """Take one frame from `inbox`: its kind, and the whole frame. None: not complete yet.
    Raises ValueError if it is too large."""
    if len(inbox) < HEADER.size:
        return None
    length, kind = HEADER.unpack_from(inbox)
    if length > largest_mb << 20:
        raise ValueError(f"a frame of {length} bytes")
    length += HEADER.size
    if length > len(inbox):
        return None
    data = bytes(inbox[:length])
    del inbox[:length]
    return kind, data


def read_result(data: bytes, limits: Limits) -> Result:
    """A D frame as a Result. Raises ValueError, TypeError or RecursionError if forged."""
    # JSON takes up to 12 bytes per character. The rest of a result takes less than 1,000.
    if len(data) > 2 * limits.answer_chars + 12 * 2 * limits.output_chars + 1000:
        raise ValueError(f"a result of {len(data)} bytes")
    result = Result(**json.loads(data[HEADER.size :]))
    types = [*map(type, (result.stdout, result.error, result.done))]
    if types != [str, str, bool] or result.died not in ("", *CAUSES):
        raise TypeError("a forged result")
    return replace(result, final=json_value(result.final), draft=json_value(result.draft))


def read_query(data: bytes) -> dict[str, Any]:
    """A Q frame as the arguments of `on_query`. Raises like `read_result`."""
    kind, prompts, contexts = json.loads(data[HEADER.size :])
    known = kind in ("llm", "rlm") and isinstance(prompts, list) and prompts
    if not known or not all(isinstance(text, str) for text in prompts):
        raise TypeError("a forged query")
    if contexts is not None:
        pairs = zip(prompts, contexts, strict=True)
        contexts = [json_value(context) for _, context in pairs]
    return {"kind": kind, "prompts": prompts, "contexts": contexts}


def json_value(value: Any, above: tuple[int, ...] = ()) -> Any:
    """`value` in the types of JSON. A set, a range or an array becomes a list, a number of
    numpy a number. What has no such type, or is too deep, becomes text. `above` are the ids
    of the containers around it: a cycle ends at its first repetition. Raises TypeError for
    a generator, because reading it would use it up."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Iterator):
        kind = type(value).__name__
        raise TypeError(f"a {kind} is not a value yet: make it a list, with list(...)")
    if len(above) < DEPTH and id(value) not in above:
        above = (*above, id(value))
        if hasattr(type(value), "tolist"):  # numpy's; its str leaves the middle out
            return json_value(value.tolist(), above)
        if isinstance(value, Mapping):
            return {str(key): json_value(item, above) for key, item in value.items()}
        if isinstance(value, (set, frozenset)):
            value = sorted(value, key=repr)  # the same order in each process
        if isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
            return [json_value(item, above) for item in value]
    return str(value)
