"""Text and chat messages to token ids and back: Qwen's byte-level BPE, run by tiktoken.

It reads and writes the Hugging Face files (vocab.json, merges.txt, tokenizer_config.json;
a lone tokenizer.json is read too) and gives the ids that transformers gives. For toy models
it can train a small vocabulary of the same kind. Left out: Jinja, tool calls, default
system prompts, and every pre-tokenizer but Qwen's.

A conversation is append-only: `open(...)`, a sampled turn, `observe(...)`, a sampled turn,
and so on. Its ids are these pieces joined; no piece is ever rendered again.

What is put before a reply depends on the model's chat template:
- for a model that never thinks, nothing;
- for a model that always thinks, the <think> that opens its thoughts;
- for a hybrid model, which can do either, empty thoughts, or nothing with `thinking=True`.

The ids equal those of the official template wherever that is append-only itself. For a
hybrid model it is not in these chats:
- system, user, reply, user: it drops the thoughts before the first reply, empty or not.
  Here a turn stays as it was sampled.
- user, reply, user, reply: it puts empty thoughts before the last reply only, and may open
  another reply right after it. Here they come before every reply or none, and none follows.
"""
import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import tiktoken

from runtime.files import read_json, write_json, write_text

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
           r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ENDOFTEXT, IM_START, IM_END = MARKERS
NO_THINKING = "<think>\n\n</think>\n\n"  # the empty thoughts of a hybrid model

CHATML = ("{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n'"
          " + message.content + '<|im_end|>\\n' }}{%- endfor %}"
          "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}")

SUPPORTED = ("Qwen2Tokenizer", "Qwen2TokenizerFast",
             "PreTrainedTokenizerFast", "TokenizersBackend")  # these two name no format

# tiktoken panics on a million blanks in a row, so runs of blanks are cut long before that.
RUN = 1 << 16
LONG_RUN = re.compile(r"(?<!\s)(\s{%d,})" % RUN)

# The files spell each byte as one printable character, as GPT-2's do: the printable ones
# of Latin-1 stand for themselves, the others are numbered from 256. In the order of ids.
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN = sorted({*range(256)} - {*PRINTED})
BYTES = {chr(b): b for b in PRINTED} | {chr(256 + i): b for i, b in enumerate(HIDDEN)}


class Tokenizer:
    """Byte-level BPE with Qwen's pattern.

    `vocab` maps tokens, spelled as in the files, to ids; `merges` are pairs of tokens;
    `config` is tokenizer_config.json. Raises ValueError: one line, beginning with `source`.

    vocab_size: the highest id + 1 (a model may have more rows than that: padding).
    end_of_turn, stop_ids: <|im_end|>; and all ids with which the checkpoint ends a turn.
    """

    def __init__(self, vocab: dict[str, int], merges: list[tuple[str, str]], config: dict,
                 source: str = "tokenizer", thinking: bool = False):
        added = _added_tokens(config, source)
        # Some files list the added tokens twice.
        vocab = {token: i for token, i in vocab.items() if token not in added}
        _check_ids(vocab, merges, added, source)
        self.vocab, self.merges, self.config, self.special = vocab, merges, config, added

        # All added tokens: the reference matches those not flagged special (<think>), too.
        ranks = {bytes(BYTES[c] for c in token): i for token, i in vocab.items()}
        self._bpe = tiktoken.Encoding(
            name=source, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=added)
        self._bytes = {i: token for token, i in ranks.items()}
        self._bytes |= {i: token.encode() for token, i in added.items()}
        longest_first = sorted(added, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

        self.vocab_size = max([*vocab.values(), *added.values()]) + 1
        self.stop_ids = (added[IM_END], added[ENDOFTEXT])
        self.end_of_turn = added[IM_END]

        template = str(config.get("chat_template"))
        reply = f"{IM_START}assistant\n"
        opens_thought = reply.replace("\n", "\\n") + "<think>"  # as a template spells it
        if "<think>" in added and "enable_thinking" in template:
            reply += "" if thinking else NO_THINKING
        elif "<think>" in added and opens_thought in template:
            reply += "<think>\n"
        self._reply = self.encode(reply, allow_special=True)
        self.opens_thought = reply.endswith("<think>\n")  # a reply then only has its end

    @classmethod
    def from_pretrained(cls, dir: str | Path, thinking: bool = False) -> "Tokenizer":
        """Read a checkpoint directory: vocab.json and merges.txt, else tokenizer.json; and
        from config.json and generation_config.json, if they exist, which ids end a turn.

        Raises FileNotFoundError or ValueError: one line that names the file and the fault.
        """
        dir = Path(dir)
        if not dir.is_dir():
            raise FileNotFoundError(f"{dir}: no such directory")
        vocab_file, merges_file = dir / "vocab.json", dir / "merges.txt"
        config_file, fast_file = dir / "tokenizer_config.json", dir / "tokenizer.json"
        two_files = vocab_file.exists() and merges_file.exists()
        fast = fast_file.exists()
        if not two_files and not fast:
            files = "vocab.json and merges.txt, or tokenizer.json"
            raise FileNotFoundError(f"{dir}: needs {files}")

        config = _read_object(config_file) if config_file.exists() or not fast else {}
        kind = config.get("tokenizer_class") or "Qwen2Tokenizer"
        if kind not in SUPPORTED:
            raise ValueError(f"{config_file}: {kind} is not supported, only Qwen2Tokenizer")
        template_file = dir / "chat_template.jinja"  # where newer checkpoints keep it
        if template_file.exists():
            config["chat_template"] = template_file.read_text(encoding="utf-8")

        if not two_files or (fast and "added_tokens_decoder" not in config):
            vocab, merges, added = _read_fast(fast_file)
            config["added_tokens_decoder"] = added | config.get("added_tokens_decoder", {})
        if two_files:
            vocab, merges = _read_object(vocab_file), _read_merges(merges_file)
        source = vocab_file if two_files else fast_file
        tokenizer = cls(vocab, merges, config, str(source), thinking)
        tokenizer._read_model_files(dir, source)
        return tokenizer

    def _read_model_files(self, dir: Path, source: Path) -> None:
        """Which ids end a turn; and check that the model has a row for each id."""
        for path in (dir / "config.json", dir / "generation_config.json"):
            raw = _read_object(path) if path.exists() else {}
            rows = raw.get("vocab_size", self.vocab_size)
            if type(rows) is not int or rows < self.vocab_size:
                highest = self.vocab_size - 1
                raise ValueError(f"{source} and tokenizer_config.json have ids up to "
                                 f"{highest}, {path} has vocab_size {rows!r:.40}")

            ends = raw.get("eos_token_id")
            if not isinstance(ends, list):
                ends = [] if ends is None else [ends]
            if any(type(i) is not int or i < 0 for i in ends):
                raise ValueError(
                    f"{path}: eos_token_id is {ends!r:.80}, not an id or a list of ids")
            self.stop_ids = tuple(dict.fromkeys((*self.stop_ids, *ends)))

    def save(self, dir: str | Path) -> None:
        """Write what `from_pretrained` and transformers read."""
        dir = Path(dir)
        dir.mkdir(parents=True, exist_ok=True)
        merges = "".join(f"{a} {b}\n" for a, b in self.merges)
        config = self.config | {"tokenizer_class": "Qwen2Tokenizer"}
        write_text(dir / "vocab.json", json.dumps(self.vocab, ensure_ascii=False))
        write_text(dir / "merges.txt", "#version: 0.2\n" + merges)
        write_json(dir / "generation_config.json", {"eos_token_id": list(self.stop_ids)})
        write_json(dir / "tokenizer_config.json", config)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn a small vocabulary; the markers are its last ids.

        It is smaller than `vocab_size` if the texts have too few pairs to merge. Raises
        ValueError if `vocab_size` has no room for the 256 bytes and the 3 markers."""
        if vocab_size < 256 + len(MARKERS):
            raise ValueError(f"vocab_size {vocab_size} is below {256 + len(MARKERS)}")
        tokens, merges = _learn_merges(texts, vocab_size - len(MARKERS))
        flags = {"special": True, "lstrip": False, "rstrip": False, "normalized": False}
        ids = range(len(tokens), len(tokens) + len(MARKERS))
        added = {str(i): {"content": m, **flags} for i, m in zip(ids, MARKERS)}
        config = {
            "added_tokens_decoder": added, "tokenizer_class": "Qwen2Tokenizer",
            "bos_token": None, "eos_token": IM_END, "pad_token": ENDOFTEXT,
            "unk_token": None, "add_prefix_space": False, "errors": "replace",
            "clean_up_tokenization_spaces": False, "chat_template": CHATML,
        }
        return cls({token: i for i, token in enumerate(tokens)}, merges, config)

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """The ids of NFC-normalised text; a lone surrogate is encoded as U+FFFD. Text that
        spells a special token stays text unless `allow_special`."""
        ids = []
        if allow_special:
            # Split first: normalising would join a marker's ">" with a combining stroke.
            for part in self._split.split(text):
                ids += [self.special[part]] if part in self.special else self.encode(part)
            return ids

        for part in LONG_RUN.split(_normalise(text)):
            step = RUN if part.isspace() else max(1, len(part))
            for i in range(0, len(part), step):
                ids += self._bpe.encode_ordinary(part[i:i + step])
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens spelled out. It takes whatever a model samples:
        broken UTF-8 and ids outside the vocabulary (padding rows) become U+FFFD."""
        unknown = "\N{REPLACEMENT CHARACTER}".encode()
        return b"".join(self._bytes.get(i, unknown) for i in ids).decode("utf-8", "replace")

    def open(self, system: str, user: str) -> list[int]:
        """A chat up to where the assistant's first turn begins; `system` may be empty."""
        head = self._message("system", system) if system else []
        return head + self._message("user", user) + self._reply

    def observe(self, text: str, closed: bool) -> list[int]:
        """What follows a sampled turn: the user says `text`, the assistant is to reply.

        `closed` says whether the sampled ids ended with <|im_end|>. A turn that was cut, or
        that ended with <|endoftext|>, did not; it is closed here.
        """
        head = [] if closed else [self.end_of_turn]
        return head + self.encode("\n") + self._message("user", text) + self._reply

    def encode_turns(self, turns: list) -> list:
        """The turns (tree.Turn) of a conversation that was saved as text, with the ids of a
        rollout with this tokenizer. Those of the assistant count as sampled."""
        encoded, system, opened = [], "", False
        for turn in turns:
            ids, logprobs = [], None
            if turn.role == "assistant":
                text = turn.text
                if self.opens_thought and "</think>" not in text:
                    text = "</think>\n\n" + text  # else it would be taken for a thought
                ids = [*self.encode(text), self.end_of_turn]
                logprobs = (0.0,) * len(ids)
            elif turn.role == "system":
                system = turn.text  # its ids are kept with the user's turn
            elif opened:
                ids = self.observe(turn.text, closed=True)
            else:
                ids, opened = self.open(system, turn.text), True
            encoded.append(replace(turn, ids=tuple(ids), logprobs=logprobs))
        return encoded

    def _message(self, role: str, text: str) -> list[int]:
        # Encoded together: line breaks that open the text may merge with the one before.
        inside = self.encode(f"{role}\n{text}")
        return [self.special[IM_START], *inside, self.end_of_turn, *self.encode("\n")]


def _added_tokens(config: dict, source: str) -> dict[str, int]:
    try:
        decoder = config["added_tokens_decoder"]
        added = {entry["content"]: int(i) for i, entry in decoder.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{source}: added_tokens_decoder in tokenizer_config.json is "
                         "missing or malformed") from None
    missing = [marker for marker in MARKERS if marker not in added]
    if missing:
        raise ValueError(f"{source}: no {', '.join(missing)} among the added tokens "
                         "in tokenizer_config.json")
    return added


def _check_ids(vocab: dict, merges: list, added: dict, source: str) -> None:
    """tiktoken knows no merges: it joins the pair whose result has the lowest id. That is
    the same only if each token is a byte or one merge's result, in the merges' order."""
    ids = [*vocab.values(), *added.values()]
    if any(type(i) is not int or i < 0 for i in ids) or len(set(ids)) < len(ids):
        raise ValueError(f"{source}: ids are not distinct non-negative integers")

    for part in [*BYTES, *(token for a, b in merges for token in (a, b, a + b))]:
        if part not in vocab:
            raise ValueError(f"{source}: {part!r} is a byte or in a merge, but has no id")

    order = [vocab[a + b] for a, b in merges]
    if len(vocab) != 256 + len(merges) or any(a >= b for a, b in zip(order, order[1:])):
        raise ValueError(f"{source}: ids are not ranks (256 bytes, then one id per merge)")


def _normalise(text: str) -> str:
    # Through UTF-16: surrogate pairs become their character, lone surrogates U+FFFD.
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return unicodedata.normalize("NFC", text)


def _learn_merges(texts: Iterable[str], size: int) -> tuple[list[str], list]:
    """The tokens in the order of their ids, and the merges. For toys only: slow.

    Each merge joins the pair that is most frequent inside the words that the pattern cuts.
    Ties go to the lower ids, so the order of the texts does not matter."""
    import regex  # comes with tiktoken; the standard library's re has no \p{L}

    cut, counts = regex.compile(PATTERN), Counter()
    for text in texts:
        counts.update(cut.findall(_normalise(text)))
    byte_id = {b: i for i, b in enumerate(BYTES.values())}
    words = [([byte_id[b] for b in word.encode()], n) for word, n in counts.items()]

    pair_counts, words_with = Counter(), defaultdict(set)

    def count(index: int, sign: int) -> None:
        word, times = words[index]
        for pair in zip(word, word[1:]):
            words_with[pair].add(index)
            pair_counts[pair] += sign * times
            if not pair_counts[pair]:
                del pair_counts[pair]

    for index in range(len(words)):
        count(index, 1)
    tokens, merges = list(BYTES), []
    while pair_counts and len(tokens) < size:
        best = min(pair_counts, key=lambda pair: (-pair_counts[pair], pair))
        merges.append((tokens[best[0]], tokens[best[1]]))
        tokens.append("".join(merges[-1]))

        for index in words_with.pop(best):
            count(index, -1)
            word = words[index][0]
            for i in range(len(word) - 1):  # joins shorten the word, then the last slices
                if tuple(word[i:i + 2]) == best:
                    word[i:i + 2] = [len(tokens) - 1]
            count(index, 1)
    return tokens, merges


def _read_object(path: Path) -> dict:
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


def _read_fast(path: Path) -> tuple[dict, list[tuple[str, str]], dict]:
    """Returns vocab, merges and added_tokens_decoder of a tokenizer.json."""
    data = _read_object(path)
    try:
        model, cutter = data["model"], data.get("pre_tokenizer") or {}
        kind = model.get("type", "BPE")
        vocab = dict(model["vocab"]) if kind == "BPE" else {}
        # Older files spell a merge as "a b", newer ones as ["a", "b"].
        merges = model.get("merges", [])
        merges = [tuple(m.split(" ") if type(m) is str else m) for m in merges]
        added = {str(token.pop("id")): token for token in data["added_tokens"]}
        steps = cutter.get("pretokenizers", [cutter])
        cuts = [s["pattern"].get("Regex") for s in steps if s.get("type") == "Split"]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{path}: no readable model and added_tokens in it") from None

    if kind != "BPE" or any(len(m) != 2 for m in merges):
        raise ValueError(f"{path}: {kind} is not supported, only BPE with pairs as merges")
    if cutter and cuts != [PATTERN]:
        raise ValueError(f"{path}: its pre_tokenizer does not cut by Qwen's pattern")
    return vocab, merges, added
