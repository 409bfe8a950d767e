"""XML read without trust, and the walk from its body to a draft that JATS and TEI have in common.

No DTD is loaded, no file or network address opened, no entity of the file's own expanded: a reference to one makes the
file unreadable (C10's sibling, the "billion laughs"). libxml2's bounds on depth and text length stay on. The entities
that HTML and the JATS DTD name (`&alpha;`) are the characters they stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html.entities import html5

from lxml import etree

from pipelines.corpus.decode import Unreadable
from pipelines.literature_analysis.paper import Draft, one_line


def parse(data: bytes) -> etree._Element:
    """The root element. Raises Unreadable."""
    parser = etree.XMLParser(
        resolve_entities=False,
        no_network=True,
        load_dtd=False,
        huge_tree=False,
        remove_comments=True,
        remove_pis=True,
    )
    try:
        return etree.fromstring(data, parser)
    except etree.XMLSyntaxError as error:
        raise Unreadable(f"not well-formed: {one_line(str(error.msg))}") from error


def local(element) -> str:
    """An element's name without its namespace; "" for an entity."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def entity(element) -> str:
    """The character that an entity stands for."""
    if (text := html5.get(f"{element.name};")) is None:
        raise Unreadable(f"entity: &{element.name}; is of the file's own making and is not expanded")
    return text


def text_of(element, parting: str = "") -> str:
    """All text inside an element, in one line; `parting` stands between the texts of different elements."""
    return one_line(parting.join(part for part in _texts(element) if part))


def find(element, *names: str):
    """The first descendant on a path of local names, or None."""
    return next(find_all(element, *names), None)


def find_all(element, *names: str) -> Iterator:
    """Descendants on a path of local names, in document order; the names need not follow each other directly."""
    if element is None:
        return
    for found in element.iter(f"{{*}}{names[0]}"):
        if found is element:
            continue
        if len(names) == 1:
            yield found
        else:
            yield from find_all(found, *names[1:])


def _texts(element) -> Iterator[str]:
    if not isinstance(element.tag, str):
        yield entity(element)
        return
    yield element.text or ""
    for child in element:
        yield from _texts(child)
        yield child.tail or ""


class Walk:
    """Writes the content of elements into a draft: sections, paragraphs, table rows, citation markers, and else words.

    `heading` names the element of a section's title; `keys` says which references an element cites, None where it is
    no marker; `dropped` are elements whose text is no part of the paper's or is written elsewhere.
    """

    def __init__(self, draft: Draft, sections, heading: str, blocks, dropped, keys: Callable):
        self.draft, self.sections, self.heading = draft, frozenset(sections), heading
        self.blocks, self.dropped, self.keys = frozenset(blocks), frozenset(dropped), keys

    def section(self, element, level: int, name: str | None = None) -> None:
        """A section: its own title, or else `name`, and what is in it. One without either goes on with the text."""
        title = next((child for child in element if local(child) == self.heading), None)
        heading = text_of(title) if title is not None else name or ""
        number = title.get("n") if title is not None else None
        self.draft.heading(f"{number} {heading}" if number and heading else heading, level)
        for child in element:
            if child is not title:
                self.element(child, level + 1 if heading else level)
                self.draft.words(child.tail or "")
        self.draft.paragraph()

    def element(self, element, level: int) -> None:
        name = local(element)
        if not name:
            self.draft.add(entity(element))
        elif name in self.dropped:
            return
        elif name in self.sections:
            self.section(element, level)
        elif (keys := self.keys(element)) is not None:
            self.draft.cite(text_of(element), keys)
        elif name in ("tr", "row"):
            self.draft.add(" | ".join(text_of(cell) for cell in element) + "\n")
        elif name in ("alternatives", "disp-formula", "inline-formula") and (tex := find(element, "tex-math")) is not None:
            self.draft.words(f" {text_of(tex)} ")
        else:
            block = name in self.blocks
            if block:
                self.draft.paragraph()
            self.draft.words(element.text or "")
            for child in element:
                self.element(child, level)
                self.draft.words(child.tail or "")
            if block:
                self.draft.paragraph()
