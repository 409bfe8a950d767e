import io
import os
import tarfile
import zipfile

import pytest

from pipelines.literature_analysis import find
from pipelines.literature_analysis.find import find_papers, sibling
from tests.unit.pipelines.literature_analysis import papers


def tree(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_papers_and_everything_else_listed(tmp_path):
    root = tree(
        tmp_path / "set",
        {"a.pdf": "x", "b/main.tex": papers.LATEX, "b/method.tex": papers.METHOD, "b/refs.bib": "", "b/fig/f.png": "", "b/main.pdf": "x", "README.md": "",
         "c.csv": "", ".git/x.md": "", "store/.ingest.json": "", "store/x.txt": "", "d.NXML": "x"},
    )  # fmt: skip
    os.symlink(root / "a.pdf", root / "link.pdf")
    files, skipped = find_papers([root])
    assert [file.name for file in files] == ["set/a.pdf", "set/b/main.pdf", "set/b/main.tex", "set/d.NXML"]
    assert {entry.path: entry.reason for entry in skipped} == {
        "set/.git/": "excluded folder: hidden",
        "set/README.md": "not a paper: by its name",
        "set/b/method.tex": "part of a paper: set/b/main.tex",
        "set/b/refs.bib": "part of a paper: set/b/main.tex",
        "set/b/fig/f.png": "part of a paper: set/b/main.tex",
        "set/c.csv": "not a paper: .csv",
        "set/link.pdf": f"symbolic link: not followed, to {root / 'a.pdf'}",
    }
    main = files[2]
    assert main.size == sum((root / "b" / name).stat().st_size for name in ("main.tex", "method.tex", "refs.bib", "fig/f.png"))
    os.utime(root / "b/method.tex", ns=(0, 2**62))  # a paper has changed when a part of it has
    assert find_papers([root])[0][2].mtime_ns == 2**62


def test_a_figure_is_no_paper(tmp_path):
    root = tree(tmp_path / "p", {"main.tex": papers.LATEX + "\\includegraphics{plot}", "plot.pdf": "x"})
    files, skipped = find_papers([root])
    assert [file.name for file in files] == ["p/main.tex"] and skipped[0].reason == "part of a paper: p/main.tex"


def test_the_time_is_linear_in_papers(tmp_path):
    """Many main files in one folder, and a folder for each of many: each file is read a few times at most."""
    tree(tmp_path / "p", {f"{kind}{n}.{kind}": papers.LATEX for n in range(40) for kind in ("tex", "pdf")})
    tree(tmp_path / "p", {f"d{n}/{name}": papers.LATEX for n in range(20) for name in ("main.tex", "printed.pdf", "slides.pdf")})
    read = []
    files, skipped = find._sorted_out(
        find._walk(tmp_path / "p")[0], "p", lambda below: read.append(below) or (tmp_path / "p" / below).read_text()
    )
    assert len(files) == 40 + 40 + 3 * 20 and not skipped and len(read) <= 3 * 60


def test_wrong_inputs(tmp_path):
    tree(tmp_path, {"a/x.py": "", "b/a/x.txt": ""})
    for paths, message in [
        ([tmp_path / "no"], "no such file or folder"),
        ([tmp_path / "a"], r"no paper in .*/a: 1 entries seen \(1 not a paper\)"),
        ([tmp_path / "a", tmp_path / "b/a"], "have one name"),
    ]:
        with pytest.raises(ValueError, match=message):
            find_papers(paths)
    assert find_papers([tmp_path / "a/x.py"])[0][0].name == "x.py"


def test_siblings_are_inside_the_folder(tmp_path):
    tree(tmp_path, {"p/main.tex": "", "p/s/a.tex": "inside", "evil.tex": "outside"})
    os.symlink(tmp_path / "evil.tex", tmp_path / "p/link.tex")
    read = sibling(find_papers([tmp_path / "p/main.tex"])[0][0])
    assert read("s/a.tex") == b"inside"
    assert [read(name) for name in ("../evil.tex", str(tmp_path / "evil.tex"), "link.tex", "s", "no", "a\0b", "x" * 5000)] == [None] * 7


def packed(path, files):
    """An archive of these files, by its extension."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    else:
        with tarfile.open(path, "w:gz") as archive:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content.encode()))
    return path


@pytest.mark.parametrize("ending", [".tar.gz", ".zip"])
def test_archives(tmp_path, ending):  # C12
    inside = {
        "p/main.tex": papers.LATEX,
        "p/method.tex": papers.METHOD,
        "p/refs.bib": papers.BIB,
        "q.md": "# Q",
        "../evil.md": "x",
        "/abs.md": "x",
        "z.csv": "",
    }
    root = tmp_path / "set"
    root.mkdir()
    path = packed(root / f"two{ending}", inside)
    (root / f"broken{ending}").write_bytes(b"PK\x03\x04 no")
    files, skipped = find_papers([root])
    assert [file.name for file in files] == ["set/two/p/main.tex", "set/two/q.md"]
    reasons = {entry.path: entry.kind for entry in skipped}
    assert reasons.pop(f"set/broken{ending}") and len(reasons) == 5
    assert reasons["set/two/p/method.tex"] == "part of a paper" and reasons["set/two/z.csv"] == "not a paper"
    read = sibling(files[0])
    assert read("method.tex") == papers.METHOD.encode() and read("./refs.bib") == papers.BIB.encode()
    assert read("../q.md") is None and read("no") is None
    assert [file.name for file in find_papers([path])[0]] == ["two/p/main.tex", "two/q.md"]
