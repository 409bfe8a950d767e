"""Questions about a shelf: the sections that tell most, and the model's answer with those in its context.

1. Every paper is processed in windows over the cluster, which gives a representation of each of its sections.
2. The sections nearest to a question are scored by relevance (see ``relevance``), in windows over the cluster again.
3. The best go into a prompt, the best of all last, right before the question; the model writes on.

The answer is what the model says, which a small one cannot do well; the sources are what it was given, with their relevance.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipelines.corpus import TokenStore
from pipelines.corpus.ingest import in_process, ingest
from pipelines.corpus.remote import is_remote
from pipelines.corpus.store import MANIFEST
from pipelines.corpus.tokenizer import FILE_NAME
from pipelines.evaluation.evaluate import blind, of_model
from pipelines.evaluation.pieces import DocumentPieces
from pipelines.literature_analysis.kind import Papers
from pipelines.literature_analysis.relevance import QuestionPieces, Section, losses_of_questions, nearest, sections_of
from pipelines.models.source import Source, open_source

MARKS = ("<|document|>", "<|section|>")


@dataclass(frozen=True)
class Asked:
    """Questions whose every input has been checked; ``sources`` sections answer each, of ``candidates`` that are scored."""

    source: Source
    store: TokenStore
    papers: DocumentPieces
    questions: list[str]
    encoded: list[np.ndarray]
    context: int
    sources: int
    candidates: int
    new_tokens: int


@dataclass(frozen=True)
class Cited:
    """A section in an answer's context. ``relevance``: nats a token of the question that it saves; above 0 it helps."""

    paper: str
    title: str
    section: str
    relevance: float
    tokens: int


@dataclass(frozen=True)
class Answer:
    question: str
    answer: str
    sources: list[Cited]
    sections: int
    scored: int
    prompt_tokens: int


@contextlib.contextmanager
def open_shelf(path: Path, shelf: str | Path, what: str = "--shelf"):
    """The token store at ``shelf``, or one made of the papers in that folder with the model's tokenizer, which goes again."""
    if is_remote(shelf) or (Path(shelf) / MANIFEST).is_file():
        yield TokenStore.open(shelf)
        return
    if not Path(shelf).is_dir():
        raise ValueError(f"{what} {shelf} is neither a token store nor a folder of papers")
    tokenizer = open_source(path).folder / FILE_NAME
    with tempfile.TemporaryDirectory(prefix="ringspan-shelf-") as folder:
        ingest(Papers(shelves="none"), [shelf], Path(folder) / "store", str(tokenizer), run=in_process)
        yield TokenStore.open(Path(folder) / "store")


def prepare(
    path: Path,
    shelf: TokenStore,
    questions: list[str],
    *,
    sources: int = 4,
    candidates: int = 256,
    new_tokens: int = 64,
    context: int | None = None,
) -> Asked:
    """Raises ValueError, one line, for input that is wrong, before anything is started."""
    source = open_source(path)
    if source.model.top_blocks is not None:
        raise ValueError(
            f"{source.folder} was trained with model.top_blocks, whose choice needs whole blocks of queries: it cannot generate yet"
        )
    context = source.context if context is None else context
    if context > source.context:
        raise ValueError(f"--context {context} is more than the {source.context} tokens that the model was trained at")
    for name, value in (("--sources", sources), ("--candidates", candidates)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    questions = [question.strip() for question in questions if question.strip()]
    if not questions:
        raise ValueError("there is no question; ask one with --question, or one a line in the file of --questions")
    store = of_model(source, shelf)
    encoded = [store.tokenizer.encode(f"\nQuestion: {question}\n") for question in questions]
    QuestionPieces(store, encoded, [(number, None) for number in range(len(questions))], context)
    left = context - 1 - max(map(len, encoded)) - len(store.tokenizer.encode(ANSWER))
    if not 0 < new_tokens <= left // 2:
        raise ValueError(
            f"--max-tokens is {new_tokens}; it must be at least 1 and at most half of the {left} tokens that the question leaves of {context}"
        )
    rows = np.flatnonzero(store.lengths > 0)
    if not len(rows):
        raise ValueError(f"{store.folder} has no paper with a token; name another --shelf")
    marks = tuple(store.tokenizer.special[mark] for mark in MARKS)
    papers = DocumentPieces(store, rows, context, unit="row", marks=marks, blind=blind(source.model))
    return Asked(source, store, papers, questions, encoded, context, sources, candidates, new_tokens)


ANSWER = "Answer:"


def analyze(asked: Asked, process) -> list[Answer]:
    """``process(pieces)`` gives the results of all pieces in order, as ``cluster.process.process_pieces`` does.

    Memory: a vector a section of the shelf, and the model.
    """
    from workers.inference.generate import load_decoder
    from workers.inference.process import process as run_piece
    from workers.inference.process import summaries

    model, store, papers = load_decoder(asked.source.weights), asked.store, asked.papers
    alone = QuestionPieces(store, asked.encoded, [(number, None) for number in range(len(asked.questions))], asked.context)
    by_themselves = [run_piece(model, alone.read(number)) for number in range(len(alone))]
    vectors = [result.sums[0] / result.counts[0] for result in by_themselves]
    near = nearest(summaries(process(papers)), vectors, asked.candidates)
    row_of = papers.documents.tolist()
    sections = {document: sections_of(papers.edges(document), row_of[document], int(store.lengths[row_of[document]]))
                for document in sorted({document for pairs in near for document, _ in pairs})}  # fmt: skip
    pairs = [(number, sections[document][segment]) for number, found in enumerate(near) for document, segment in found]
    with_section = losses_of_questions(process(QuestionPieces(store, asked.encoded, pairs, asked.context)), len(pairs))
    count = sum(len(papers.edges(document)) for document in range(len(papers.documents)))
    answers = []
    for number, question in enumerate(asked.questions):
        own = [index for index, (of, _) in enumerate(pairs) if of == number]
        alone_loss = float(by_themselves[number].losses.astype(np.float64).sum())
        gain = {index: (alone_loss - with_section[index]) / len(asked.encoded[number]) for index in own}
        best = sorted(own, key=lambda index: -gain[index])[: asked.sources]
        prompt, parts, cited = _prompt(asked, number, [(pairs[index][1], gain[index]) for index in best])
        answers.append(Answer(question, _write(asked, model, prompt, parts), cited, count, len(own), len(prompt)))
    return answers


def _prompt(asked: Asked, number: int, best: list[tuple[Section, float]]) -> tuple[list[int], list[int], list[Cited]]:
    """The best sections behind their papers' titles, cut at their ends where they would not all fit, then the question.

    A section is a part of its own, as a paper is on a shelf; the question belongs to the best one's."""
    store, tokenizer = asked.store, asked.store.tokenizer
    asking = [*asked.encoded[number].tolist(), *tokenizer.encode(ANSWER).tolist()]
    share = (asked.context - asked.new_tokens - 1 - len(asking)) // len(best)
    blocks, cited = [], []
    for section, gain in best:
        title, heading = name_of(store, section)
        head = [tokenizer.special[MARKS[0]], *tokenizer.encode(f"{title}\n").tolist()][: share // 2] if section.number else []
        block = head + store[section.row][section.start : section.stop][: share - len(head)].tolist()
        blocks.append(block)
        cited.append(Cited(store.paths(section.row), title, heading, gain, len(block)))
    blocks = [[tokenizer.end_of_text, *blocks[-1]], *blocks[-2::-1]]
    blocks[-1] += asking
    return [token for block in blocks for token in block], [part for part, block in enumerate(blocks) for _ in block], cited


def name_of(store: TokenStore, section: Section) -> tuple[str, str]:
    """The paper's title, and the section's heading ("" for what stands before the first)."""
    line = lambda start, stop: store.tokenizer.decode(store[section.row][start:stop], skip_special=True).strip().partition("\n")[0]
    details = store.details(section.row) or {}
    title = details.get("title") or line(0, 256) or store.paths(section.row)
    return title, line(section.start, min(section.stop, section.start + 256)) if section.number else ""


def _write(asked: Asked, model, prompt: list[int], parts: list[int]) -> str:
    from workers.inference.generate import generate

    tokenizer = asked.store.tokenizer
    stop = asked.source.stop.union(tokenizer.special.values())
    ids = list(generate(model, prompt, asked.new_tokens, stop=stop, vocabulary=tokenizer.vocab_size, parts=parts))
    return tokenizer.decode(ids).rstrip("\ufffd").strip()


def as_text(answers: list[Answer]) -> str:
    """Each question with its answer and, numbered, what the answer was written from."""
    blocks = []
    for answer in answers:
        lines = [answer.question, "", answer.answer or "(the model wrote nothing)", "",
                 f"Sources, {answer.scored:,} of {answer.sections:,} sections scored; relevance in nats a token of the question:"]  # fmt: skip
        for number, source in enumerate(answer.sources, 1):
            place = f"{source.title}{f', {source.section}' if source.section else ''}"
            lines.append(f"[{number}] {place} ({source.paper})  {source.relevance:+.3f}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
