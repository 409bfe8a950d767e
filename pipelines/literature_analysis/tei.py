"""TEI XML as GROBID writes it (`<TEI>` with teiHeader and text)."""

from __future__ import annotations

import re

from pipelines.literature_analysis import tree
from pipelines.literature_analysis.jats import spdx
from pipelines.literature_analysis.paper import Draft, Paper, one_line
from pipelines.literature_analysis.references import Reference, doi_name, reference

_BLOCKS = "p figure figDesc head table list item formula note quote".split()
_ID = "{http://www.w3.org/XML/1998/namespace}id"
_SCHEMES = {"doi": "doi", "arxiv": "arxiv", "pmid": "pmid", "pmcid": "pmcid"}


def read_tei(root) -> Paper:
    """A paper in TEI, by its root element. Raises Unreadable."""
    header = tree.find(root, "teiHeader")
    draft = Draft("tei")
    draft.references([_reference(entry) for entry in tree.find_all(root, "listBibl", "biblStruct")])
    for found in tree.find_all(header, "sourceDesc", "idno"):
        draft.identifiers |= _identifier(found)
    date = tree.find(header, "publicationStmt", "date")
    draft.year = _year(date)
    licence = tree.find(header, "availability")
    if licence is not None:
        words = [value for element in licence.iter("*") for value in element.attrib.values()]
        draft.licence = spdx(" ".join([*words, tree.text_of(licence)]))
    title = tree.find(header, "titleStmt", "title")
    draft.title(tree.text_of(title) if title is not None else "")
    walk = tree.Walk(draft, ("div",), "head", _BLOCKS, ("listBibl", "graphic"), _keys)
    abstract = tree.find(header, "abstract")
    if abstract is not None and tree.text_of(abstract):
        walk.section(abstract, 1, "Abstract")
    for part in root.iterfind("{*}text/*"):
        walk.section(part, 1)
    draft.write_references()
    return draft.finish()


def _keys(element) -> list[str] | None:
    if tree.local(element) != "ref" or element.get("type") != "bibr":
        return None
    return [target.removeprefix("#") for target in (element.get("target") or "").split()]


def _identifier(idno) -> dict[str, str]:
    scheme, text = _SCHEMES.get((idno.get("type") or "").lower()), tree.text_of(idno)
    if scheme is None or not text:
        return {}
    text = re.sub(r"^arxiv:|v\d+$|\[[^\[\]]*\]$", "", text, flags=re.I).strip() if scheme == "arxiv" else text
    return {scheme: doi_name(text) if scheme == "doi" else text}


def _year(date) -> int | None:
    if date is None:
        return None
    found = re.search(r"\b\d{4}\b", date.get("when") or tree.text_of(date))
    return int(found[0]) if found else None


def _reference(entry) -> Reference:
    raw = next((n for n in tree.find_all(entry, "note") if n.get("type") == "raw_reference"), None)
    titles = [tree.text_of(title) for title in tree.find_all(entry, "title")]
    year = _year(tree.find(entry, "date"))
    if raw is not None:
        text = tree.text_of(raw)
    else:
        authors = [tree.text_of(author, " ") for author in tree.find_all(entry, "author")]
        where = [tree.text_of(part) or (part.get("from") or "") for part in tree.find_all(entry, "biblScope")]
        numbers = [tree.text_of(idno) for idno in tree.find_all(entry, "idno")]
        text = one_line(". ".join(filter(None, [", ".join(authors), *titles, ", ".join(where), str(year or ""), *numbers])))
    identifiers = {}
    for idno in tree.find_all(entry, "idno"):
        identifiers |= _identifier(idno)
    known = {"title": titles[0] if titles else None, "year": year}
    return reference(entry.get(_ID) or "", text, identifiers=identifiers, **known)
