"""A byte-level BPE in Hugging Face's files: tokenizer.json, or vocab.json and merges.txt.

tokenizer.json says how text is normalised and cut into words, in steps. Here a cut has a
name, and steps that are none of these cuts are refused. vocab.json and merges.txt say
neither: they are read for the one class of tokenizer that has only one way, Qwen2Tokenizer.

Left out: dropout, byte fallback, affixes of words, and normalisers other than NFC. The
step that adds special tokens around a text (post_processor) does not matter, because
tokenizer.py adds its own.
"""
import json
from pathlib import Path
from typing import Any

from runtime.files import read_json, write_json, write_text

QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Each digit alone, then GPT-2's pattern for what is between digits, in one expression:
# blanks before a digit are the end of such a part.
DIGITS = (r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+"
          r"|\s+(?=\p{N})|\s+(?!\S)|\s+")

PATTERNS = {"qwen": QWEN, "llama3": LLAMA3, "gpt2": GPT2, "digits": DIGITS}

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
              "use_regex": True}  # use_regex: cut by GPT-2's pattern
EACH_DIGIT = {"type": "Digits", "individual_digits": True}


def split(pattern: str) -> list[dict]:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
            "invert": False}
    return [step, BYTE_LEVEL | {"use_regex": False}]


STEPS = {  # what each cut is in tokenizer.json
    "qwen": split(QWEN),
    "llama3": split(LLAMA3),
    "gpt2": [BYTE_LEVEL],
    "digits": [EACH_DIGIT, BYTE_LEVEL],
}


# --- reading ------------------------------------------------------------------------------

def read(dir: Path) -> dict[str, Any]:
    """The arguments of tokenizer.Tokenizer, from the files of a checkpoint.

    Raises FileNotFoundError or ValueError: one line that names the file and the fault."""
    vocab_file, merges_file = dir / "vocab.json", dir / "merges.txt"
    fast_file, config_file = dir / "tokenizer.json", dir / "tokenizer_config.json"
    fast = fast_file.exists()
    if not fast and not (vocab_file.exists() and merges_file.exists()):
        files = "tokenizer.json, or vocab.json and merges.txt"
        raise FileNotFoundError(f"{dir}: needs {files}")

    config = read_object(config_file) if config_file.exists() or not fast else {}
    template_file = dir / "chat_template.jinja"  # where newer checkpoints keep it
    if template_file.exists():
        config["chat_template"] = template_file.read_text(encoding="utf-8")
    if fast:
        files = _read_fast(fast_file)
        added = files.pop("added")
        config["added_tokens_decoder"] = added | config.get("added_tokens_decoder", {})
        return files | {"config": config, "source": str(fast_file)}

    kind = config.get("tokenizer_class") or "Qwen2Tokenizer"
    if kind not in ("Qwen2Tokenizer", "Qwen2TokenizerFast"):
        raise ValueError(f"{config_file}: {kind} is not supported without a "
                         "tokenizer.json, only Qwen2Tokenizer")
    return {"vocab": read_object(vocab_file), "merges": _read_merges(merges_file),
            "cut": "qwen", "nfc": True, "config": config, "source": str(vocab_file)}


def read_object(path: Path) -> dict:
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def _read_merges(path: Path) -> list[tuple[str, str]]:
    merges = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if line and not line.startswith("#version"):
            merges.append(tuple(line.split(" ")))
            if len(merges[-1]) != 2:
                raise ValueError(f"{path}: {line!r} is not a pair")
    return merges


def _read_fast(path: Path) -> dict[str, Any]:
    data = read_object(path)
    try:
        model = data["model"]
        kind = model.get("type", "BPE")
        vocab = dict(model["vocab"]) if kind == "BPE" else {}
        # Older files spell a merge as "a b", newer ones as ["a", "b"].
        merges = model.get("merges", [])
        merges = [tuple(m.split(" ") if type(m) is str else m) for m in merges]
        added = {str(token.pop("id")): token for token in data["added_tokens"]}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{path}: no readable model and added_tokens in it") from None

    if kind != "BPE" or any(len(m) != 2 for m in merges):
        raise ValueError(f"{path}: {kind} is not supported, only BPE with pairs as merges")
    for field in ("dropout", "continuing_subword_prefix", "end_of_word_suffix",
                  "byte_fallback"):
        if model.get(field):
            raise ValueError(f"{path}: {field} {model[field]!r:.40} is not supported")
    if model.get("unk_token") and sum(len(token) == 1 for token in vocab) < 256:
        raise ValueError(f"{path}: unk_token is not supported where bytes have no token")
    normalizer = data.get("normalizer")
    if normalizer not in (None, {"type": "NFC"}):
        raise ValueError(f"{path}: normalizer {normalizer!r:.200} is not supported, only "
                         "NFC or none")
    return {"vocab": vocab, "merges": merges, "added": added, "nfc": bool(normalizer),
            "cut": _cut(path, data.get("pre_tokenizer"))}


def _cut(path: Path, found: Any) -> str:
    steps = found.get("pretokenizers", [found]) if isinstance(found, dict) else [found]
    for name, known in STEPS.items():
        if list(map(_what_counts, steps)) == list(map(_what_counts, known)):
            return name
    raise ValueError(f"{path}: pre_tokenizer {found!r:.300} is not supported; supported "
                     f"are those of {', '.join(STEPS)}")


def _what_counts(step: Any) -> Any:
    """Without offsets into the text, and without the default that older files leave out."""
    if not isinstance(step, dict):
        return step
    return {field: value for field, value in step.items()
            if field != "trim_offsets" and (field, value) != ("use_regex", True)}


# --- writing ------------------------------------------------------------------------------

def write(dir: Path, vocab: dict[str, int], merges: list[tuple[str, str]], config: dict,
          cut: str, nfc: bool) -> None:
    """What `read` and transformers read. `config` is that of tokenizer_config.json."""
    kind = "PreTrainedTokenizerFast"
    if cut == "qwen" and nfc:
        kind = "Qwen2Tokenizer"
        lines = "".join(f"{a} {b}\n" for a, b in merges)
        write_text(dir / "vocab.json", json.dumps(vocab, ensure_ascii=False))
        write_text(dir / "merges.txt", "#version: 0.2\n" + lines)
    else:
        decoder = config["added_tokens_decoder"]
        # The reference gives an added token the id that the file says only if it is here.
        everything = vocab | {token["content"]: int(i) for i, token in decoder.items()}
        fast = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": int(i)} | token for i, token in decoder.items()],
            "normalizer": {"type": "NFC"} if nfc else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": STEPS[cut]},
            "post_processor": None,
            "decoder": BYTE_LEVEL,
            "model": {"type": "BPE", "vocab": everything,
                      "merges": [" ".join(pair) for pair in merges]},
        }
        write_text(dir / "tokenizer.json", json.dumps(fast, ensure_ascii=False))
    write_json(dir / "tokenizer_config.json", config | {"tokenizer_class": kind})
