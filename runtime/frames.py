"""The frames that a REPL's client, server and worker exchange, and what may be in them.

A frame is a length of 4 bytes, a kind of 1 byte, and a payload of that length in JSON:

    kind  sender  meaning                  payload
    S     client  start                    {"context": ..., "tools": ...}
    X     client  execute a block          {"code": ...}
    R     client  the answers to a query   [answer, ...]
    Q     worker  a query                  [kind, prompts, contexts]
    D     worker  done                     the fields of a `Result`

A worker runs code that nobody has checked, so the client does not trust its frames: they
have a largest size, and `read_result` and `read_query` refuse what no honest worker sends.

Left out: which frame may come when. The server decides that (repl_server.py).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from runtime.sandbox import Limits

HEADER = struct.Struct("!Ic")  # length of the payload, kind
DEPTH = 100  # containers nested more deeply than this become text


@dataclass(frozen=True)
class Result:
    """What came of one block."""

    stdout: str = ""  # stdout and stderr together, cut at the end
    error: str = ""  # a short traceback, or why the process died; "" if all went well
    final: Any = None  # the answer as a JSON value
    done: bool = False  # FINAL was called (its value may be None)
    died: str = ""  # "timeout", "crash" or "protocol": the process is gone


class FrameTooLarge(ValueError):
    pass


def frame(kind: bytes, message: Any, largest_mb: int) -> bytes:
    payload = json.dumps(message).encode()  # ASCII, so that lone surrogates travel
    if len(payload) > largest_mb << 20:
        size = len(payload) >> 20
        raise FrameTooLarge(f"{size} MB in one message, the limit is {largest_mb}")
    return HEADER.pack(len(payload), kind) + payload


def read_frame(file: BinaryIO) -> tuple[bytes, Any] | None:
    """Kind and message of the next frame, from a blocking file. None: it was closed."""
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    length, kind = HEADER.unpack(header)
    return kind, json.loads(file.read(length))


def take_header(inbox: bytearray, largest_mb: int) -> tuple[int, bytes]:
    """Length, header included, and kind of the frame that `inbox` begins with.

    (0, b"") if there is not even a header yet.
    """
    if len(inbox) < HEADER.size:
        return 0, b""
    length, kind = HEADER.unpack_from(inbox)
    if length > largest_mb << 20:
        raise FrameTooLarge(f"a frame of {length} bytes")
    return HEADER.size + length, kind


def take_frame(inbox: bytearray, largest_mb: int) -> tuple[bytes, bytes] | None:
    """Cut one frame off the front of `inbox`: its kind, and all of it.

    None if it is not there in full yet.
    """
    length, kind = take_header(inbox, largest_mb)
    if not 0 < length <= len(inbox):
        return None
    with memoryview(inbox) as view:  # a slice of `inbox` itself would be copied twice
        data = bytes(view[:length])
    del inbox[:length]
    return kind, data


# --- what the client accepts -------------------------------------------------------------


def read_result(data: bytes, limits: Limits) -> Result:
    """A D frame as a Result.

    Raises ValueError, TypeError or RecursionError for what no honest worker sends.
    """
    # JSON takes up to 12 bytes per character. All the rest takes less than 1,000.
    if len(data) > limits.answer_chars + 12 * 2 * limits.output_chars + 1000:
        raise ValueError(f"a result of {len(data)} bytes")
    result = Result(**json.loads(data[HEADER.size :]))
    strings = (result.stdout, result.error, result.died)
    if not all(isinstance(s, str) for s in strings) or not isinstance(result.done, bool):
        raise TypeError("a result with fields of the wrong type")
    if result.died not in ("", "timeout", "crash", "protocol") or too_deep(result.final):
        raise ValueError("a result that no worker sends")
    return result


def read_query(data: bytes) -> tuple[str, list[str], list | None]:
    """A Q frame as (kind, prompts, contexts). Raises like `read_result`."""
    kind, prompts, contexts = json.loads(data[HEADER.size :])
    if kind not in ("llm", "rlm") or not isinstance(prompts, list):
        raise TypeError("a query with fields of the wrong type")
    if not prompts or not all(isinstance(p, str) for p in prompts):
        raise TypeError("a query without prompts, or with some that are no strings")
    if contexts is not None:
        if not isinstance(contexts, list) or len(contexts) != len(prompts):
            raise TypeError("a query whose contexts do not match its prompts")
        if too_deep(contexts, DEPTH + 1):
            raise ValueError("a query with contexts that no worker sends")
    return kind, prompts, contexts


def too_deep(value: Any, depth: int = DEPTH) -> bool:
    """Whether containers are nested more than `depth` deep."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return depth == 0 or any(too_deep(item, depth - 1) for item in value)


# --- what a worker sends ------------------------------------------------------------------


def json_value(value: Any, above: tuple[int, ...] = ()) -> Any:
    """`value` with str() in place of all that JSON does not have.

    `above` holds the ids of the containers around it: a cycle ends at its first repetition.
    """
    if value is None or isinstance(value, (str, float, bool)):
        return value
    if isinstance(value, int) and value.bit_length() < 10_000:  # Python prints no larger
        return value
    if len(above) < DEPTH and id(value) not in above:
        above = (*above, id(value))
        if isinstance(value, (list, tuple)):
            return [json_value(item, above) for item in value]
        if isinstance(value, dict):
            return {as_text(key): json_value(item, above) for key, item in value.items()}
    return as_text(value)


def as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return str(value)
    except Exception:
        return "<unprintable>"
