"""evidence: the sentences that answer a question, in many papers.

Gold is {paper id: [sentences]}. The score is the micro F1 over characters that was used for
alphaXiv/multi-paper-synthetic. An echo of the whole context scores 2p/(1+p), with p the
gold share of its characters. Generated papers have sentences about made-up terms; the
question asks for those about one term.
"""
import re

from tasks import Task
from tasks.in_repl import TOOLS, block, script, sentences_with, word_of
from tasks.text import (ADJECTIVES, NOUNS, POOL, characters, field, how_many,
                        make_sentence, make_term, pick, strings_in)

STRATEGY = """\
The context is a dict {paper id: text}. Return the sentences that answer the question, \
verbatim, as a list of strings; they are scored by the characters they share with the \
gold sentences, so leave out everything else.
1. List the papers, and search them for the words of the question and for synonyms, to \
find the few that matter. Reading all of them yourself would not fit into your window.
2. Give each promising paper to a child: rlm_query_batched(question, [context[i] for i in \
ids]). A child sees one paper as its context (a str), searches it, reads the passages, \
and returns the exact sentences as a list of strings copied from the text, or [] if there \
are none.
3. Drop strings that are errors, join the lists, and call FINAL with them."""

TOKENS = 4_970  # 34 papers
PAPERS = (4, 120)  # of a question of the usual length
SENTENCES = (4, 10)  # of a paper
PAPER_CHARS = 66 * 7 + 122.6  # on average
RELEVANT = (1, 5)  # papers with one or two sentences about the term
MANY = 2_000  # papers; above that, sentences repeat


def make(rng, tokens=None, heldout=False):
    papers = how_many(rng, *PAPERS)
    if tokens is not None:
        papers = round(characters(tokens, TOKENS) / PAPER_CHARS)
    term = make_term(rng, heldout)
    drawn = [make_term(rng, heldout) for _ in range(2 * papers)]
    others = [t for t in drawn if t != term]
    chosen = set(rng.sample(range(papers), min(papers, rng.randint(*RELEVANT))))

    pool = []
    if papers > MANY:  # 65,000 papers of new sentences would take many seconds
        pool = [make_sentence(rng, rng.choice(others)) for _ in range(10 * POOL)]

    def sentence(about):
        return rng.choice(pool) if pool else make_sentence(rng, about)

    context, gold = {}, {}
    for number in range(papers):
        own = rng.sample(others, 2)
        size = rng.randint(*SENTENCES)
        body = [sentence(rng.choice(own)) for _ in range(size)]
        if number in chosen:
            for at in rng.sample(range(size), rng.randint(1, 2)):
                body[at] = make_sentence(rng, term)
                gold.setdefault(f"p{number}", []).append(body[at])
        title = f"{rng.choice(ADJECTIVES).title()} {rng.choice(NOUNS)}s of {own[0]}"
        abstract = sentence(own[1])
        context[f"p{number}"] = paper_text(title, abstract, " ".join(body))
    return f'Quote all on "{term}".', context, gold


def paper_text(title: str, abstract: str, text: str) -> str:
    return f"### PAPER: {title}\n<abstract>{abstract}</abstract>\n{text}"


def read(row):
    """`question`, `papers` = [{paperId, title, abstract, text}], `evidence` = [{paperId,
    selections: [{text}]}]: alphaXiv/multi-paper-synthetic.

    A selection may have other blanks and line breaks than its paper. The gold is what the
    paper has, since that is what an answer can quote."""
    question = field(row, "question", str)
    context, gold, words = {}, {}, ""
    for i, paper in enumerate(field(row, "papers", list)):
        where = f"papers[{i}]: "
        name, *parts = (field(paper, key, str, where)
                        for key in ("paperId", "title", "abstract", "text"))
        if name in context:
            raise ValueError(f"{where}field 'paperId' repeats {name!r}")
        context[name] = paper_text(*parts)
        words += "".join(parts)
    if not words.strip():
        raise ValueError("field 'papers' is empty: the context would be empty")

    for i, entry in enumerate(field(row, "evidence", list)):
        where = f"evidence[{i}]: "
        name = field(entry, "paperId", str, where)
        if name not in context:
            raise ValueError(f"{where}field 'paperId' is {name!r}, which 'papers' lacks")
        for selection in field(entry, "selections", list, where):
            text = field(selection, "text", str, where + "selections: ").strip()
            pattern = r"\s+".join(map(re.escape, text.split()))  # both know \u2028, \u00a0
            found = re.findall(pattern, context[name]) if text else []
            if not found:
                raise ValueError(f"{where}field 'text' does not occur in paper {name!r}: "
                                 f"{text[:60]!r}")
            gold.setdefault(name, []).extend(dict.fromkeys(found))
    if not gold:
        raise ValueError("field 'evidence' is empty: nothing could score")
    return question, context, gold


MAX_SPANS = 2_000  # distinct strings in an answer; marking more could take minutes
SHORTEST = 12  # characters of a string that counts; a shorter one has to be gold itself


def score(task, answer):
    """Micro F1 over characters: every occurrence of every returned string is marked in
    every paper. Precision and recall are taken over the union of the marked characters, so
    repeating a span gains nothing. Strings found nowhere score exactly 0, and so do short
    ones: the letters of the alphabet would mark everything without reading anything."""
    gold_spans = {span for spans in task.answer.values() for span in spans}
    spans = {span for span in strings_in(answer)
             if len(span) >= SHORTEST or span in gold_spans}
    if not spans or len(spans) > MAX_SPANS:
        return 0.0
    both = returned = gold = 0
    for paper, text in task.context.items():
        marked = mark(text, spans)
        wanted = mark(text, task.answer.get(paper, ()))
        both += (int.from_bytes(marked) & int.from_bytes(wanted)).bit_count()
        returned += marked.count(1)
        gold += wanted.count(1)
    return 2 * both / (returned + gold) if both else 0.0


def part_score(task, part, answer):
    """For a child that was given one paper: its F1 there. If nothing is to be found in the
    paper, an empty answer scores 1."""
    name = next((name for name, text in task.context.items() if text == part), None)
    if name is None:
        return None
    gold = task.answer.get(name)
    if not gold:
        return float(answer is not None and not strings_in(answer))
    return score(Task("", "evidence", "", {name: part}, {name: gold}), answer)


def mark(text: str, spans) -> bytearray:
    """One byte per character of `text`: 1 where any span occurs, also where two overlap.

    Linear, also on periodic texts: occurrences that overlap by more than half follow each
    other at the span's period, so only one period has to be compared anew."""
    marked = bytearray(len(text))
    for span in filter(None, spans):
        period = span.find(span[:(len(span) + 1) // 2], 1)
        if period < 0 or span[period:] != span[:-period]:
            period = len(span)  # or no less than half of it
        at, again = text.find(span), span[-period:]
        while at >= 0:
            end = at + len(span)
            while text.startswith(again, end):
                end += period
            marked[at:end] = b"\x01" * (end - at)
            at = text.find(span, end - period + 1)
    return marked


# Shares of good and bad strategies. Right are filter with exact, and search, which needs no
# children: which is which is for the reinforcement to find out.
ROOT_SCRIPTS = {"filter": 0.25, "all": 0.15, "one": 0.15, "search": 0.15, "alone": 0.15,
                "forget": 0.15}
CHILD_SCRIPTS = {"exact": 0.3, "whole": 0.35, "first": 0.35}
LOOK_FIRST = 0.25  # share of scripts that print something first and act in the next turn


def demonstrate(task, node, rng):
    """A script of `strategy_code`, perhaps after a first turn that only prints."""
    scripts = CHILD_SCRIPTS if node.depth else ROOT_SCRIPTS
    name = pick(scripts, rng)
    look = rng.random() < LOOK_FIRST
    if look and all(turn.role != "assistant" for turn in node.turns):
        return block("print(context[:40])" if node.depth else "print(len(context))")
    return strategy_code(task, name)


def strategy_code(task, name: str) -> str:
    word = word_of(task)
    hits = f'ps = [p for p in context.values() if "{word}" in p]\n'
    ask = f"""'Quote "{word}".'"""
    return block({
        # a root: children get the papers with the word, or all, or one; it searches itself
        "filter": hits + f"FINAL(rlm_query_batched({ask}, ps))",
        "all": f"FINAL(rlm_query_batched({ask}, list(context.values())))",
        "one": hits + f"FINAL(rlm_query({ask}, ps[0]))",
        "search": hits + f'FINAL([search(p, "{word}", 0) for p in ps])',
        "alone": hits + "FINAL(ps)",
        "forget": hits + "print(len(ps))",
        # a child: the sentences with the word, the paper, its first sentence
        "exact": f'FINAL(search(context, "{word}", 0))',
        "whole": "FINAL(context)",
        "first": 'FINAL(context.split("\\n")[-1].split(". ")[0])',
    }[name])


def oracle(task, node):
    return strategy_code(task, "exact" if node.depth else "filter")


def keyword(task, node):
    return script(sentences_with, word_of(task))
