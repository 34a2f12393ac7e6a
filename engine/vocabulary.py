"""A vocabulary in the Hugging Face files: tokenizer.json, or vocab.json and merges.txt.

The latter do not say how text is cut. They are read for the one class of tokenizer that has
only one way, Qwen2Tokenizer. The step of tokenizer.json that adds special tokens around a
text (post_processor) does not matter: tokenizer.py adds its own. Left out: ways to cut text
that PATTERNS does not have.
"""
import json
from pathlib import Path
from typing import Any

from util import read_json, write_json, write_text

# How text is cut into words before it is encoded. The files say it in steps. Here each way
# has a name, and other steps are refused.
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

OFFSETS = {"trim_offsets": True}  # into the text: they do not matter here
# use_regex: cut by GPT-2's pattern.
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
    fast, config_file = dir / "tokenizer.json", dir / "tokenizer_config.json"
    template_file = dir / "chat_template.jinja"  # where newer checkpoints keep it
    config = {}
    if config_file.exists() or not fast.exists():
        config = read_json(config_file)
    if template_file.exists():
        config["chat_template"] = template_file.read_text(encoding="utf-8")
    if fast.exists():
        vocab, merges, cut, added = _read_fast(fast)
        config["added_tokens_decoder"] = added | config.get("added_tokens_decoder", {})
        return {"vocab": vocab, "merges": merges, "cut": cut, "config": config,
                "source": str(fast)}

    kind = config.get("tokenizer_class", "Qwen2Tokenizer")
    if kind not in ("Qwen2Tokenizer", "Qwen2TokenizerFast"):
        raise ValueError(f"{config_file}: {kind} needs a tokenizer.json")
    lines = (dir / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [tuple(line.split(" ")) for line in lines
              if line and not line.startswith("#version")]
    return {"vocab": read_json(dir / "vocab.json"), "merges": merges, "cut": "qwen",
            "config": config, "source": str(dir / "vocab.json")}


def _read_fast(path: Path) -> tuple[dict, list, str, dict]:
    """Vocabulary, merges, name of the cut, added tokens by id."""
    data = read_json(path)
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
    added = {str(token.pop("id")): token for token in data["added_tokens"]}
    return data["model"]["vocab"], merges, cuts[0], added


def write_files(dir: Path, vocab: dict[str, int], merges: list[tuple[str, str]],
                config: dict, cut: str) -> None:
    """What `read_files` and transformers read; `config` is tokenizer_config.json."""
    if cut == "qwen":
        kind = "Qwen2Tokenizer"
        lines = "".join(f"{a} {b}\n" for a, b in merges)
        write_text(dir / "vocab.json", json.dumps(vocab, ensure_ascii=False))
        write_text(dir / "merges.txt", "#version: 0.2\n" + lines)
    else:
        kind = "PreTrainedTokenizerFast"
        decoder = config["added_tokens_decoder"]
        # The reference gives an added token the id that the file says only if it is here.
        everything = vocab | {token["content"]: int(i) for i, token in decoder.items()}
        fast = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": int(i)} | token for i, token in decoder.items()],
            "normalizer": NORMALIZER[cut],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": STEPS[cut]},
            "post_processor": None,
            "decoder": BYTE_LEVEL,
            "model": {"type": "BPE", "vocab": everything,
                      "merges": [" ".join(pair) for pair in merges]},
        }
        write_text(dir / "tokenizer.json", json.dumps(fast, ensure_ascii=False))
    write_json(dir / "tokenizer_config.json", config | {"tokenizer_class": kind})
