"""Small files that are there whole or not at all. Standard library only."""
import json
import os
from pathlib import Path
from typing import Any


def write_text(path: str, text: str) -> None:
    """Write aside, then rename: a reader sees the old file or the new one, never a part."""
    aside = f"{path}.tmp"
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(aside, path)


def write_json(path: str, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2))


def readable(size: float) -> str:
    """A number of bytes for people: 1000 bytes, 41.2 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.1f}".removesuffix(".0") + f" {unit}"
        size /= 1024


def read_json(path: str) -> Any:
    """Raises OSError, or ValueError that names the file."""
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error})") from None


def read_texts(paths: list[str]) -> str | dict[str, str]:
    """One file: its text. Several files: {path: text}. Raises OSError."""
    texts = {path: Path(path).read_text("utf-8", "replace") for path in paths}
    return texts if len(texts) > 1 else texts[paths[0]]
