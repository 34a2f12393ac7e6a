"""Text and chat messages to token ids and back: byte-level BPE, run by tiktoken.

The files of a checkpoint are engine/vocabulary.py's. The ids are those of the reference
implementation, the package tokenizers. For toy models it can train a small vocabulary of
Qwen's kind.

A conversation is append-only: `open(...)`, a turn, `observe(...)`, a turn,
and so on. Its ids are these pieces joined. No piece is ever rendered again.

A thinking model thinks before it replies unless the prompt holds an empty thought. Here
each of its replies begins with one. The ids equal those of the official template, except
for thinking models: their template drops the thoughts before all replies but the last, so
it is not append-only.

Left out: Jinja, tool calls, default system prompts, pre-tokenizers that PATTERNS does not
have, and bytes without a token. In SmolLM2's vocabulary these are six control characters
and the first bytes of planes 4 to 11 of Unicode, which are empty so far. `encode` drops
such a byte, so `decode` does not give it back.
"""
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import tiktoken

from engine.vocabulary import NORMALIZER, PATTERNS, read_files, write_files
from util import reading

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ENDOFTEXT, IM_START, IM_END = MARKERS
NO_THINKING = "<think>\n\n</think>\n\n"  # what a thinking model is given for its thoughts

CHATML = ("{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n'"
          " + message.content + '<|im_end|>\\n' }}{%- endfor %}"
          "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}")

# tiktoken panics on a million blanks in a row, so runs of blanks are cut long before that.
RUN = 1 << 16
LONG_RUN = re.compile(r"(?<!\s)(\s{%d,})" % RUN)

# The files spell each byte as one printable character, as GPT-2's do: the printable ones
# of Latin-1 stand for themselves, the others are numbered from 256. BYTES has them in the
# order in which a trained vocabulary numbers them.
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN = sorted({*range(256)} - {*PRINTED})
BYTES = {chr(b): b for b in PRINTED} | {chr(256 + i): b for i, b in enumerate(HIDDEN)}


class Tokenizer:
    """Byte-level BPE.

    `vocab` maps tokens, spelled as in the files, to ids; `merges` are pairs of tokens;
    `config` is tokenizer_config.json; `cut` names one of PATTERNS; `ends` are more ids that
    end a turn. Raises ValueError: one line, beginning with `source`.

    vocab_size: the highest id + 1 (a model may have more rows than that: padding).
    end_of_turn, stop_ids: <|im_end|>; and all ids with which the checkpoint ends a turn.
    """

    def __init__(self, vocab: dict[str, int], merges: list[tuple[str, str]], config: dict,
                 source: str = "tokenizer", cut: str = "qwen", ends: Sequence[int] = ()):
        decoder = config.get("added_tokens_decoder", {})
        added = {entry["content"]: int(i) for i, entry in decoder.items()}
        template = config.get("chat_template") or CHATML
        if not {IM_START, IM_END} <= set(added) or IM_START not in template:
            raise ValueError(f"{source}: not ChatML: {IM_START} and {IM_END} are not among "
                             "the added tokens, or not in the chat_template")
        # Some files list the added tokens twice.
        vocab = {token: i for token, i in vocab.items() if token not in added}
        _check_order(vocab, merges, source)
        self.vocab, self.merges, self.config, self.special = vocab, merges, config, added
        self.cut = cut
        self.vocab_size = max([*vocab.values(), *added.values()]) + 1

        ranks = {bytes(BYTES[c] for c in token): i for token, i in vocab.items()}
        # tiktoken needs all bytes. Those without a token get ids that no text keeps.
        missing = [bytes([b]) for b in BYTES.values() if bytes([b]) not in ranks]
        stand_ins = {byte: self.vocab_size + i for i, byte in enumerate(missing)}
        # All added tokens, also those that are not flagged special (<think>), as in HF.
        self._bpe = tiktoken.Encoding(
            name=source, pat_str=PATTERNS[cut], mergeable_ranks=ranks | stand_ins,
            special_tokens=added)
        self._bytes = {i: token for token, i in ranks.items()}
        self._bytes |= {i: token.encode() for token, i in added.items()}
        longest_first = sorted(added, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

        self.backticks = frozenset(i for i, token in self._bytes.items() if b"`" in token)
        self.end_of_turn = added[IM_END]
        marks = [added[m] for m in (IM_END, ENDOFTEXT) if m in added]
        self.stop_ids = tuple(dict.fromkeys([*marks, *ends]))
        thinks = "<think>" in added and "enable_thinking" in template
        reply = f"{IM_START}assistant\n" + (NO_THINKING if thinks else "")
        self._reply = self.encode(reply, allow_special=True)

    @classmethod
    def from_pretrained(cls, dir: str | Path) -> "Tokenizer":
        """Read a checkpoint directory. config.json and generation_config.json may name more
        ids that end a turn. Raises OSError, or ValueError: one line that names the file and
        the fault."""
        with reading(dir):
            return cls(**read_files(Path(dir)))

    def save(self, dir: str | Path) -> None:
        """Write what `from_pretrained` and transformers read."""
        write_files(Path(dir), self)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn a small vocabulary; the markers are its last ids.

        It is smaller than `vocab_size` if the texts have too few pairs to merge."""
        tokens, merges = _learn_merges(texts, vocab_size - len(MARKERS))
        flags = {"special": True, "lstrip": False, "rstrip": False, "normalized": False}
        ids = range(len(tokens), len(tokens) + len(MARKERS))
        added = {str(i): {"content": m, **flags} for i, m in zip(ids, MARKERS)}
        config = {"added_tokens_decoder": added, "chat_template": CHATML,
                  "eos_token": IM_END, "pad_token": ENDOFTEXT,
                  "clean_up_tokenization_spaces": False}
        return cls({token: i for i, token in enumerate(tokens)}, merges, config)

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """The ids of a text; a lone surrogate is encoded as U+FFFD. Text that spells a
        special token stays text unless `allow_special`."""
        ids = []
        if allow_special:
            # Split first: normalising would join a marker's ">" with a combining stroke.
            for part in self._split.split(text):
                ids += [self.special[part]] if part in self.special else self.encode(part)
            return ids

        # Through UTF-16: surrogate pairs become their character, lone surrogates U+FFFD.
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if NORMALIZER[self.cut]:
            text = unicodedata.normalize("NFC", text)
        for part in LONG_RUN.split(text):
            step = RUN if part.isspace() else max(1, len(part))
            for i in range(0, len(part), step):
                ids += self._bpe.encode_ordinary(part[i:i + step])
        return [i for i in ids if i < self.vocab_size]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens spelled out. It takes whatever a model samples:
        broken UTF-8 and ids outside the vocabulary (padding rows) become U+FFFD."""
        unknown = "\N{REPLACEMENT CHARACTER}".encode()
        return b"".join(self._bytes.get(i, unknown) for i in ids).decode("utf-8", "replace")

    def open(self, system: str, user: str, example: Sequence[str] = ()) -> list[int]:
        """A chat up to where the assistant's first message begins; `system` may be empty.

        `example` is a conversation before: texts of user, assistant, ..., assistant."""
        users, replies = [*example[::2], user], example[1::2]
        ids = self._message("system", system) if system else []
        ids += self._message("user", users[0]) + self._reply
        for reply, text in zip(replies, users[1:]):
            written = self.message(reply)
            ids += written + self.observe(text, closed=written[-1] == self.end_of_turn)
        return ids

    def observe(self, text: str, closed: bool) -> list[int]:
        """What follows a sampled turn: the user says `text`, the assistant is to reply.

        `closed` says whether the sampled ids ended with <|im_end|>. A turn that was cut, or
        that ended with <|endoftext|>, did not; it is closed here."""
        head = [] if closed else [self.end_of_turn]
        return head + self.encode("\n") + self._message("user", text) + self._reply

    def message(self, text: str) -> list[int]:
        """A message that the policy is to write. It ends with its block, else the turn."""
        ids = self.encode(text)
        return ids if text.endswith("\n```") else [*ids, self.end_of_turn]

    def encode_messages(self, messages: list, example: Sequence[str] = ()) -> list:
        """The messages (tree.Message) of a conversation that was saved as text, with this
        tokenizer's ids. Those of the assistant count as sampled."""
        encoded, system, opened, closed = [], "", False, True
        for message in messages:
            ids, logprobs = [], None
            if message.role == "assistant":
                ids = self.message(message.text)
                closed = ids[-1] == self.end_of_turn
                logprobs = (0.0,) * len(ids)
            elif message.role == "system":
                system = message.text  # its ids are kept with the user's
            elif opened:
                ids = self.observe(message.text, closed)
            else:
                ids, opened = self.open(system, message.text, example), True
            encoded.append(replace(message, ids=tuple(ids), logprobs=logprobs))
        return encoded

    def _message(self, role: str, text: str) -> list[int]:
        # Encoded together: line breaks that open the text may merge with the one before.
        inside = self.encode(f"{role}\n{text}")
        return [self.special[IM_START], *inside, self.end_of_turn, *self.encode("\n")]


def _check_order(vocab: dict, merges: list, source: str) -> None:
    """tiktoken knows no merges: it joins the pair whose result has the lowest id. That is
    the same only if each token is a byte or a merge's result, in the merges' order."""
    made = [a + b for a, b in merges]
    order = [vocab.get(token, -1) for token in made]
    if set(vocab) - set(BYTES) != set(made) or order != sorted(order):
        raise ValueError(f"{source}: ids are not ranks (bytes, then one id per merge)")


def _learn_merges(texts: Iterable[str], size: int) -> tuple[list[str], list]:
    """The tokens in the order of their ids, and the merges. For toys only: slow.

    Each merge joins the pair that is most frequent inside the words that the pattern cuts.
    Ties go to the lower ids, so the order of the texts does not matter."""
    import regex  # comes with tiktoken; the standard library's re has no \p{L}

    cut, counts = regex.compile(PATTERNS["qwen"]), Counter()
    for text in texts:
        counts.update(cut.findall(unicodedata.normalize("NFC", text)))
    byte_id = {b: i for i, b in enumerate(BYTES.values())}
    words = [([byte_id[b] for b in word.encode("utf-8", "replace")], n)
             for word, n in counts.items()]
    tokens, merges = list(BYTES), []
    while len(tokens) < size:
        pairs = Counter()
        for word, n in words:
            for pair in zip(word, word[1:]):
                pairs[pair] += n
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append((tokens[best[0]], tokens[best[1]]))
        tokens.append("".join(merges[-1]))
        for word, _ in words:
            for i in range(len(word) - 1):  # joins shorten the word, then the last slices
                if tuple(word[i:i + 2]) == best:
                    word[i:i + 2] = [len(tokens) - 1]
    return tokens, merges
