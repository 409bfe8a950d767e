import subprocess

from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.corpus.find import find_code
from tests.unit.pipelines.corpus.trees import names, reasons, tree

PATTERNS = st.sampled_from(
    "*.py !a.py a.py /a.py b/ b !b b/* b/** **/a.py b/c !b/c/ c/a.py *.o [ab].py ?.py \\!x.py # ! / \\ [z-a] b/**/a.py"
    " *  !*/ /b/c/ **/c/** d.py\\  a.py\\".split(" ")
)
FILES = ["a.py", "b/a.py", "b/c/a.py", "b/c/d.py", "c/a.py", "c/b/a.py", "d.py", "!x.py", "b/x.o.py", "c/c/c.py"]


@given(
    st.dictionaries(st.sampled_from(["", "b/", "b/c/", "c/"]), st.lists(PATTERNS, max_size=5), max_size=3),
    st.sampled_from(["\n", "\r\n"]),
)
@settings(max_examples=60, deadline=None)
def test_ignored_as_git_ignores(tmp_path_factory, rules, newline):
    root = tree(tmp_path_factory.mktemp("git") / "r", dict.fromkeys(FILES, "") | {"z.rs": ""})
    tree(root, {folder + ".gitignore": newline.join(lines).encode() for folder, lines in rules.items()})
    git = ["git", "-c", "core.excludesFile=/dev/null", "-c", "safe.directory=*"]
    subprocess.run([*git, "init", "-q", "."], cwd=root, check=True)
    listing = subprocess.run([*git, "ls-files", "-zo", "--exclude-standard"], cwd=root, capture_output=True, check=True)
    expected = sorted(n for n in listing.stdout.decode().split("\0") if n.endswith((".py", ".rs")))
    try:
        found = sorted(name.removeprefix("r/") for name in names(find_code([root])))
    except ValueError:
        found = []
    assert found == expected, rules


def test_an_ignored_folder_is_listed_with_the_file_that_says_so(tmp_path):
    root = tree(tmp_path / "r", {"a.py": "", "s/build/x.py": "", "s/b.py": "", "s/keep.py": ""})
    tree(root, {"s/.gitignore": b"\xef\xbb\xbfbuild/\n!keep.py\n*.py"})
    found = find_code([root])
    assert names(found) == ["r/a.py"]
    assert {p: r for p, r in reasons(found).items() if r.startswith("ignored")} == {
        "r/s/b.py": "ignored: by s/.gitignore",
        "r/s/build/": "ignored: by s/.gitignore",
        "r/s/keep.py": "ignored: by s/.gitignore",
    }
