import numpy as np
import pytest

from pipelines.corpus.ingest import find, in_process, ingest
from pipelines.corpus.kind import END, Document, Place, Special
from pipelines.corpus.sources import SourceFile
from pipelines.corpus.store import TokenStore
from pipelines.literature_analysis.kind import Papers
from tests.unit.pipelines.literature_analysis import papers
from tests.unit.pipelines.literature_analysis.test_find import packed, tree

PRINTED = ["Rings of Gödel: A Small Study", "", "Ann Author", "Abstract", "We show that RingNet is 50% better.", "Introduction",
           "Models attend [1, missing] over rings [see 2, p. 3] with x y", "a = b", "Method", "The method is bold “quoted”", "References",
           "[1] Ashish Vaswani, Noam Shazeer. Attention is All You Need. NeurIPS 30. 2017.", "[2] J. Smith. On Örings. 1999."]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tree(
        tmp_path_factory.mktemp("papers") / "set",
        {"a/main.tex": papers.LATEX, "a/method.tex": papers.METHOD, "a/refs.bib": papers.BIB, "b.nxml": papers.JATS, "c.xml": papers.TEI,
         "d.md": papers.MARKDOWN, "e.rst": papers.RST, "f.txt": papers.PLAIN, "g.xml": papers.SENTENCES, "h.txt": papers.LABELLED, "empty.txt": "",
         "doe.md": "# Mouse rings are round\n\nBy Doe. <|endoftext|>\n", "k.json": "{}"},
    )  # fmt: skip
    (root / "main.pdf").write_bytes(papers.pdf([papers.column(72, 90, PRINTED[:1], 18) + papers.column(72, 120, PRINTED[1:])]))
    (root / "scan.pdf").write_bytes(papers.pdf([[]]))
    packed(
        root / "more.tar.gz",
        {"x/main.tex": papers.LATEX.replace('G\\"odel', "Other Things"), "x/method.tex": "Other words entirely about fish. " * 40},
    )
    return root


def made(folder, out, **options) -> TokenStore:
    ingest(Papers(**options), [folder], out, run=in_process)
    return TokenStore.open(out)


def test_a_store_of_papers(folder, tmp_path):  # C1, C10, C11
    store = made(folder, tmp_path / "store", shelves="none")
    assert store.unit == "row" and [store.paths(i) for i in range(len(store))] == [
        "set/a/main.tex", "set/b.nxml", "set/c.xml", "set/d.md", "set/doe.md", "set/e.rst", "set/empty.txt", "set/f.txt", "set/g.xml", "set/h.txt",
        "set/more/x/main.tex",
    ]  # fmt: skip
    reasons = {row["path"]: row["reason"] for row in store.skipped}
    assert reasons["set/main.pdf"] == "duplicate: the same paper as set/a/main.tex"
    assert reasons["set/scan.pdf"].startswith("no text: ") and reasons["set/k.json"].startswith("not a paper: ")
    counts = store.manifest["counts"]
    assert (
        counts["papers"] == 11
        and counts["format latex"] == 2
        and counts["references"]
        and counts["citations"] > counts["citations resolved"] > 0
    )
    end, document, section = (store.tokenizer.special[name] for name in ("<|endoftext|>", "<|document|>", "<|section|>"))
    for i in range(len(store)):
        text, details, ids = store.text(i), store.details(i), store[i]
        assert text.encode() == store.source(i) and store.encoding(i) == "utf-8"
        for part in details["sections"]:
            assert text[part["start"] : part["stop"]] == part["heading"]
        if not text:
            assert len(ids) == 0
            continue
        assert ids[0] == document and ids[-1] == end and np.count_nonzero(ids == end) == 1
        assert np.count_nonzero(ids == section) == len(details["sections"])
        plain = ids[~np.isin(ids, [end, document, section])]
        assert store.tokenizer.decode(plain) == text
    assert store.licence(1) == "CC-BY-4.0" and "RingNet" in store.text(0) and "The \\unknown[a]{method}" in store.text(0)


def test_shelves_and_the_same_bytes_again(folder, tmp_path):  # C13
    store = made(folder, tmp_path / "store", shelves="citation", shelf_papers=4)
    assert store.unit == "collection"
    shelf = next(
        i for i in range(len(store.documents) - 1) if any(store.paths(r) == "set/doe.md" for r in range(*store.documents[i : i + 2]))
    )
    assert {store.paths(row) for row in range(*store.documents[shelf : shelf + 2])} >= {"set/d.md", "set/doe.md", "set/f.txt"}
    end = store.tokenizer.special["<|endoftext|>"]
    for start, stop in zip(store.documents, store.documents[1:]):
        ids = np.concatenate([store[row] for row in range(start, stop)])
        assert len(ids) == 0 or (ids[-1] == end and np.count_nonzero(ids == end) == 1)
        assert len({store.collection(row) for row in range(start, stop)}) == 1
    again = made(folder, tmp_path / "again", shelves="citation", shelf_papers=4)
    assert again.fingerprint == store.fingerprint


def test_what_is_held_out_has_shelves_of_its_own(folder, tmp_path):
    store = made(folder, tmp_path / "store", held_out=("set/d*",))
    assert store.manifest["held_out"] == ["set/d*"]
    held = {store.paths(i) for i in range(len(store)) if store.collection(i).startswith("held-out")}
    assert held == {"set/d.md", "set/doe.md"}


def test_parts():
    details = {"sections": [{"heading": "H", "level": 1, "start": 2, "stop": 3}]}
    document = Document("T\nH\nx\n", b"", "utf-8", None, details)
    file = SourceFile("", "p", 0, 0)
    first = [Special("<|document|>"), "T\n", Special("<|section|>"), "H\nx\n"]
    kind = Papers()
    assert kind.parts(Place(file, "p", "s", True, False), document) == first
    assert kind.parts(Place(file, "p", "s", False, True), document) == [*first, END]
    assert Papers("none").parts(Place(file, "p", "s", False, False), document) == [*first, END]
    empty = Document("", b"", "utf-8", None, {"sections": []})
    assert kind.parts(Place(file, "p", "s", True, True), empty) == []
    assert kind.parts(Place(file, "p", "s", False, True), empty) == [Special("<|document|>"), "", END]


def test_wrong_options(folder):
    for options, message in [
        ({"shelves": "x"}, "--shelves"),
        ({"shelf_papers": 0}, "--shelf-papers"),
        ({"shelf_bytes": 0}, "--shelf-bytes"),
    ]:
        with pytest.raises(ValueError, match=message):
            Papers(**options)
    with pytest.raises(ValueError, match="--hold-out 'no' matches none of"):
        find(Papers(held_out=("no",)), [folder])
