"""A vocabulary in the files of the Hugging Face hub: tokenizer.json and what is beside it.

tokenizer.json says in steps how text is cut into words. Here each way has a name, and other
steps are refused. Its last step, which adds special tokens around a text (post_processor),
does not matter: tokenizer.py adds its own. Left out: ways to cut text that PATTERNS does
not have.
"""
import json
from pathlib import Path
from typing import Any

from util import read_json, write_json, write_text

QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# Qwen3.5 joins combining marks with letters, not with signs.
MARKS = QWEN.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
# Each digit alone, then GPT-2's pattern for what is between digits, in one expression:
# blanks before a digit are the end of such a part.
DIGITS = (r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+"
          r"|\s+(?=\p{N})|\s+(?!\S)|\s+")
PATTERNS = {"qwen": QWEN, "marks": MARKS, "digits": DIGITS}

OFFSETS = {"trim_offsets": True}  # offsets into the text do not matter here
# With use_regex, GPT-2's pattern cuts.
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True, **OFFSETS}
NORMALIZER = {"qwen": {"type": "NFC"}, "marks": {"type": "NFC"}, "digits": None}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
STEPS = {  # how each cuts text, in tokenizer.json
    "qwen": [SPLIT | {"pattern": {"Regex": QWEN}}, BYTE_LEVEL | {"use_regex": False}],
    "marks": [SPLIT | {"pattern": {"Regex": MARKS}}, BYTE_LEVEL | {"use_regex": False}],
    "digits": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL],
}


def read_files(dir: Path) -> dict[str, Any]:
    """The arguments of Tokenizer, from the files of a checkpoint.

    Raises OSError, or ValueError: one line that names the file and the fault."""
    path = dir / "tokenizer.json"
    has_pair = not path.exists() and (dir / "merges.txt").exists()
    data = _read_pair(dir) if has_pair else read_json(path)
    found = data.get("pre_tokenizer") or {}
    steps = [step | OFFSETS for step in found.get("pretokenizers", [found])]
    normalizer = data.get("normalizer")
    cuts = [cut for cut, known in STEPS.items() if normalizer == NORMALIZER[cut]
            and steps == [step | OFFSETS for step in known]]
    if not cuts:
        raise ValueError(f"{path}: not supported: normalizer {normalizer!r:.200} with "
                         f"pre_tokenizer {found!r:.300}")
    # Older files spell a merge as "a b", newer ones as ["a", "b"].
    merges = [tuple(m.split(" ") if type(m) is str else m) for m in data["model"]["merges"]]

    config = _read_if_there(dir / "tokenizer_config.json")
    template = dir / "chat_template.jinja"  # where newer checkpoints keep it
    if template.exists():
        config["chat_template"] = template.read_text(encoding="utf-8")
    added = {str(token.pop("id")): token for token in data["added_tokens"]}
    config["added_tokens_decoder"] = added | config.get("added_tokens_decoder", {})

    ends = []
    for name in ("config.json", "generation_config.json"):
        raw = _read_if_there(dir / name)
        given = (raw.get("text_config") or raw).get("eos_token_id")
        ends += given if isinstance(given, list) else [given]
    ends = [int(end) for end in ends if end is not None]
    return {"vocab": data["model"]["vocab"], "merges": merges, "config": config,
            "source": str(path), "cut": cuts[0], "ends": ends}


def _read_pair(dir: Path) -> dict[str, Any]:
    """The older vocab.json and merges.txt of a Qwen, in the form of tokenizer.json."""
    lines = (dir / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    return {"model": {"vocab": read_json(dir / "vocab.json"), "merges": merges},
            "normalizer": NORMALIZER["qwen"], "added_tokens": [],
            "pre_tokenizer": {"pretokenizers": STEPS["qwen"]}}


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def write_files(dir: Path, tokenizer) -> None:
    """What `read_files` and transformers read."""
    dir.mkdir(parents=True, exist_ok=True)
    decoder = tokenizer.config["added_tokens_decoder"]
    # transformers gives an added token its id in the file only if `vocab` has it, too.
    vocab = tokenizer.vocab | {token["content"]: int(i) for i, token in decoder.items()}
    write_text(dir / "tokenizer.json", json.dumps({
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": int(i)} | token for i, token in decoder.items()],
        "normalizer": NORMALIZER[tokenizer.cut],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": STEPS[tokenizer.cut]},
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": vocab,
                  "merges": [" ".join(pair) for pair in tokenizer.merges]},
    }, ensure_ascii=False))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(dir / "tokenizer_config.json", tokenizer.config | kind)
    write_json(dir / "generation_config.json", {"eos_token_id": list(tokenizer.stop_ids)})
