"""Shelves: papers that belong together, as one long document, the older before the newer.

By *citation*, papers that cite each other: a shelf grows from the most connected paper that is left by the paper with
the most links into the shelf. By *similarity*, a shelf is a paper and those nearest to it in words. By *folder*, a
folder's papers. Every paper stands on exactly one shelf, which holds at most so many papers and so many bytes of text
(a larger paper has one to itself). The order of the input has no say, nor has chance.

The work is linear in links and, for similarity, in papers times words: only papers that share one of a paper's rarest
words are compared with it, and of a word that many papers have, the nearest by name.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from pipelines.literature_analysis.references import normal
from pipelines.literature_analysis.similarity import Vectors

WAYS = ("citation", "similarity", "folder", "none")
_RAREST, _MOST_SHARING = 16, 64
_SHORTEST_TITLE = 4  # words, from which a title in a reference's text is taken to be that paper's


@dataclass(frozen=True)
class Member:
    """What shelving asks of a paper. `cites`: for every reference its identifiers and its text in normal form."""

    name: str
    year: int | None
    bytes: int
    title: str
    identifiers: dict[str, str]
    terms: list[list[int]]
    cites: list[tuple[dict[str, str], str]] = field(default_factory=list)


def shelved(papers: list[Member], way: str, most_papers: int, most_bytes: int | None) -> list[list[int]]:
    """Indices of the papers of every shelf, in reading order; the shelves by the name of their first paper."""
    room = _Room(papers, most_papers, most_bytes)
    if way == "citation":
        shelves, alone = _by_citation(papers, room)
        shelves += _by_similarity(papers, alone, room)
    elif way == "similarity":
        shelves = _by_similarity(papers, range(len(papers)), room)
    else:
        shelves = _by_folder(papers, room)
    ordered = [sorted(shelf, key=lambda i: _age(papers[i])) for shelf in shelves]
    return sorted(ordered, key=lambda shelf: papers[shelf[0]].name)


def links(papers: list[Member]) -> list[set[int]]:
    """For every paper those it cites or is cited by, of the papers given: by identifier, or else by title."""
    by_identifier = {pair: i for i, paper in reversed(list(enumerate(papers))) for pair in paper.identifiers.items()}
    by_title: dict[tuple[str, ...], list[tuple[tuple[str, ...], int]]] = defaultdict(list)
    for i, paper in enumerate(papers):
        words = tuple(normal(paper.title).split())
        if len(words) >= _SHORTEST_TITLE:
            by_title[words[:_SHORTEST_TITLE]].append((words, i))
    linked: list[set[int]] = [set() for _ in papers]
    for i, paper in enumerate(papers):
        for identifiers, text in paper.cites:
            cited = next((by_identifier[pair] for pair in sorted(identifiers.items()) if pair in by_identifier), None)
            if cited is None:
                cited = _titled(text.split(), by_title)
            if cited is not None and cited != i:
                linked[i].add(cited)
                linked[cited].add(i)
    return linked


def _titled(words: list[str], by_title) -> int | None:
    """The paper whose title stands among the words, the longest of several."""
    found = [
        (len(title), -i)
        for at in range(len(words) - _SHORTEST_TITLE + 1)
        for title, i in by_title.get(tuple(words[at : at + _SHORTEST_TITLE]), ())
        if tuple(words[at : at + len(title)]) == title
    ]
    return -max(found)[1] if found else None


class _Room:
    """How full the shelf at hand is."""

    def __init__(self, papers: list[Member], most_papers: int, most_bytes: int | None):
        self._papers, self._most_papers, self._most_bytes = papers, most_papers, most_bytes
        self.clear()

    def clear(self) -> None:
        self._held = self._bytes = 0

    def take(self, i: int) -> bool:
        """Puts a paper on the shelf if it fits; an empty shelf takes any."""
        size = self._papers[i].bytes
        full = self._held >= self._most_papers or (self._most_bytes is not None and self._bytes + size > self._most_bytes)
        if self._held and full:
            return False
        self._held += 1
        self._bytes += size
        return True

    @property
    def full(self) -> bool:
        return self._held >= self._most_papers


def _age(paper: Member) -> tuple[int, str]:
    return (paper.year if paper.year is not None else 9999, paper.name)


def _by_citation(papers: list[Member], room: _Room) -> tuple[list[list[int]], list[int]]:
    """The shelves, and the papers that no other here cites or is cited by, or whose neighbours all stand elsewhere."""
    linked = links(papers)
    left = {i for i in range(len(papers)) if linked[i]}
    seeds = sorted(left, key=lambda i: (-len(linked[i]), papers[i].name))
    shelves, alone = [], [i for i in range(len(papers)) if not linked[i]]
    for seed in seeds:
        if seed not in left:
            continue
        room.clear()
        room.take(seed)
        left.remove(seed)
        shelf = [seed]
        ties: Counter[int] = Counter()
        nearest: list[tuple[int, str, int]] = []
        newest = seed
        while not room.full:
            for other in linked[newest] & left:
                ties[other] += 1
                heapq.heappush(nearest, (-ties[other], papers[other].name, other))
            newest = None
            while nearest and newest is None:
                count, _, i = heapq.heappop(nearest)
                if i in left and -count == ties[i] and room.take(i):
                    newest = i
            if newest is None:
                break
            left.remove(newest)
            shelf.append(newest)
        if len(shelf) > 1:
            shelves.append(shelf)
        else:
            alone.append(seed)
    return shelves, alone


def _by_similarity(papers: list[Member], members: Iterable[int], room: _Room) -> list[list[int]]:
    members = sorted(members, key=lambda i: papers[i].name)
    vectors = Vectors(papers[i].terms for i in members)
    sharing: dict[int, list[int]] = defaultdict(list)  # word → those that have it among their rarest, the first name last
    rarest = [sorted(vector, key=lambda term: (-vector[term], term))[:_RAREST] for vector in vectors.of]
    for at in reversed(range(len(members))):
        for word in rarest[at]:
            sharing[word].append(at)
    left = set(range(len(members)))
    shelves = []
    for seed in range(len(members)):
        if seed not in left:
            continue
        left.remove(seed)
        room.clear()
        room.take(members[seed])
        shelf = [seed]
        near: set[int] = set()
        for word in rarest[seed]:
            near.update(_first(sharing[word], left))
        for at in sorted(near, key=lambda at: (-vectors.cosine(seed, at), at)):
            if room.full:
                break
            if room.take(members[at]):
                left.remove(at)
                shelf.append(at)
        shelves.append([members[at] for at in shelf])
    return shelves


def _first(waiting: list[int], left: set[int]) -> list[int]:
    """The first of those waiting, from the list's end, that are left. Those that aren't are dropped for good."""
    found: list[int] = []
    while waiting and len(found) < _MOST_SHARING:
        if (at := waiting.pop()) in left:
            found.append(at)
    waiting.extend(reversed(found))
    return found


def _by_folder(papers: list[Member], room: _Room) -> list[list[int]]:
    folders: dict[str, list[int]] = defaultdict(list)
    for i, paper in enumerate(papers):
        folders[paper.name.rpartition("/")[0]].append(i)
    shelves = []
    for name in sorted(folders):
        room.clear()
        shelf: list[int] = []
        for i in sorted(folders[name], key=lambda i: _age(papers[i])):
            if not room.take(i):
                shelves.append(shelf)
                shelf = []
                room.clear()
                room.take(i)
            shelf.append(i)
        shelves.append(shelf)
    return shelves
