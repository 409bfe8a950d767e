"""JATS XML, the form of PubMed Central and most publishers (`<article>` with front, body and back)."""

from __future__ import annotations

import re

from pipelines.literature_analysis import tree
from pipelines.literature_analysis.paper import Draft, Paper
from pipelines.literature_analysis.references import Reference, doi_name, reference

_SECTIONS = ("sec", "app", "ack", "glossary", "notes", "fn-group", "bio", "boxed-text")
_NAMES = {"ack": "Acknowledgements", "fn-group": "Footnotes", "glossary": "Glossary", "app": "Appendix"}
_BLOCKS = "p title disp-quote disp-formula fig table-wrap caption list list-item def-item table-wrap-foot fn verse-group statement".split()
_DROPPED = ("ref-list", "object-id", "graphic", "media")
_CREATIVE = re.compile(r"creativecommons\.org/(?:licenses/([a-z-]+)/(\d\.\d)|publicdomain/zero/(\d\.\d))")


def read_jats(root) -> Paper:
    """A paper in JATS, by its root element. Raises Unreadable."""
    meta = tree.find(root, "article-meta")
    draft = Draft("jats")
    references = [_reference(entry) for entry in tree.find_all(root, "ref")]
    draft.references(references)
    _identify(draft, meta)
    title = tree.find(meta, "article-title")
    draft.title(tree.text_of(title) if title is not None else "")
    walk = tree.Walk(draft, _SECTIONS, "title", _BLOCKS, _DROPPED, _keys)
    for abstract in tree.find_all(meta, "abstract"):
        walk.section(abstract, 1, "Abstract")
    for part in root:
        if tree.local(part) in ("sub-article", "response"):  # of a reviewer, say
            heading = tree.find(part, "article-title")
            draft.heading(tree.text_of(heading) if heading is not None else "Sub-article", 1)
            for below in part:
                _write(walk, below, 2)
        else:
            _write(walk, part, 1)
    heading = tree.find(root, "ref-list", "title")
    draft.write_references(tree.text_of(heading) if heading is not None else "References")
    return draft.finish()


def _write(walk: tree.Walk, part, level: int) -> None:
    if tree.local(part) == "body":
        walk.section(part, level)
    elif tree.local(part) in ("back", "floats-group"):
        for element in part:
            name = tree.local(element)
            if name in _SECTIONS:
                walk.section(element, level, _NAMES.get(name))
            else:
                walk.element(element, level)


def _keys(element) -> list[str] | None:
    if tree.local(element) != "xref" or element.get("ref-type") != "bibr":
        return None
    return (element.get("rid") or "").split()


def _identify(draft: Draft, meta) -> None:
    for found in tree.find_all(meta, "article-id"):
        scheme, text = found.get("pub-id-type"), tree.text_of(found)
        if scheme in ("pmc", "pmcid", "pmcaid"):
            draft.identifiers["pmcid"] = text if text.startswith("PMC") else f"PMC{text}"
        elif scheme in ("doi", "pmid", "arxiv"):
            draft.identifiers[scheme] = doi_name(text) if scheme == "doi" else text
    years = [tree.text_of(year) for date in ("pub-date", "copyright-year") for year in tree.find_all(meta, date, "year")]
    draft.year = min((int(year) for year in years if re.fullmatch(r"\d{4}", year)), default=None)
    licence = tree.find(meta, "license")
    if licence is not None:
        addresses = [value for element in licence.iter("*") for value in element.attrib.values()]
        draft.licence = spdx(" ".join([*addresses, tree.text_of(licence)]))


def spdx(words: str) -> str | None:
    """The SPDX identifier of the Creative Commons licence whose address stands in `words`, or None."""
    if not (found := _CREATIVE.search(words)):
        return None
    return f"CC0-{found[3]}" if found[3] else f"CC-{found[1].upper()}-{found[2]}"


def _reference(entry) -> Reference:
    cited = next((e for e in entry if tree.local(e).endswith("citation")), entry)
    # element-citation has no punctuation of its own between its parts
    parted = tree.local(cited) in ("element-citation", "nlm-citation") and not (cited.text or "").strip()
    text = ", ".join(filter(None, (_part(part) for part in cited))) if parted else tree.text_of(cited)
    identifiers = {}
    for found in tree.find_all(cited, "pub-id"):
        scheme, name = found.get("pub-id-type"), tree.text_of(found)
        if scheme in ("doi", "pmid", "arxiv"):
            identifiers[scheme] = doi_name(name) if scheme == "doi" else name
    title, year = tree.find(cited, "article-title"), tree.find(cited, "year")
    known = {}
    if title is not None:
        known["title"] = tree.text_of(title)
    if year is not None and (digits := re.match(r"\d{4}", tree.text_of(year))):
        known["year"] = int(digits[0])
    return reference(entry.get("id") or "", text, identifiers=identifiers, **known)


def _part(part) -> str:
    if tree.local(part) == "person-group":
        return ", ".join(tree.text_of(name, " ") for name in part)
    return tree.text_of(part, " " if tree.local(part) == "name" else "")
