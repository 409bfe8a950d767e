"""The prompt ends in the text before the cursor, holds no more than its budget, and the nearest files stand last."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.code_completion.fim import template
from pipelines.code_completion.prompt import Cursor, Form, build_prompt, parse_cursor, text_around
from pipelines.corpus.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
END = BYTES.end_of_text


@pytest.fixture
def repo(tmp_path):
    """near.py and cursor.py in one folder, others at growing distance; one file that is not source code."""
    root = tmp_path / "repo"
    for name, text in {
        "pkg/sub/cursor.py": "def f():\n    return 1\n",
        "pkg/sub/near.py": "NEAR = 1\n",
        "pkg/middle.py": "MIDDLE = 1\n",
        "far.py": "FAR = 1\n",
        "other/deep/farthest.py": "FARTHEST = 1\n",
        "notes.bin": "not source\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def prompt_at(repo, at: str, budget: int = 10_000):
    return build_prompt(repo, parse_cursor(at, repo), BYTES, budget)


@pytest.mark.parametrize(
    "at", ["", "pkg", "pkg/sub/cursor.py", "pkg/sub/cursor.py:1", "pkg/sub/cursor.py:1:", "pkg/sub/cursor.py:0:1", "pkg/sub/cursor.py:1:0",
           "pkg/sub/cursor.py:-1:1", "pkg/sub/cursor.py:one:1", ":1:1", "pkg/sub/cursor.py:1:1.5", "pkg/sub/cursor.py:²:1"]
)  # fmt: skip
def test_what_is_no_place_is_refused_with_an_example(repo, at):
    with pytest.raises(ValueError, match="is not FILE:LINE:COL, as in src/parser.py:120:9"):
        parse_cursor(at, repo)


@pytest.mark.parametrize("name", ["nowhere.py", "pkg", "pkg/sub/cursor.py/x"])
def test_a_file_that_is_not_there(repo, name):
    with pytest.raises(ValueError, match=f"--at names '{name}', but .* is not a file"):
        parse_cursor(f"{name}:1:1", repo)


def test_a_file_name_with_colons(repo):
    (repo / "a:3:4.py").write_text("x = 1\n")
    assert parse_cursor("a:3:4.py:1:2", repo) == Cursor(repo / "a:3:4.py", 1, 2)
    assert prompt_at(repo, "a:3:4.py:1:2").ids[-2:] == [END, ord("x")]


def test_files_that_gitignore_excludes_are_shown_where_asked(repo):
    (repo / ".gitignore").write_text("far.py\n")
    cursor = parse_cursor("pkg/sub/cursor.py:1:1", repo)
    shown = {gitignore: build_prompt(repo, cursor, BYTES, 10_000, gitignore=gitignore).files for gitignore in (True, False)}
    assert "far.py" not in shown[True] and "other/deep/farthest.py" in shown[True]
    assert "far.py" in shown[False]


def test_an_absolute_path_is_taken_as_it_is(repo):
    assert parse_cursor(f"{repo}/far.py:1:1", repo).file == repo / "far.py"
    assert prompt_at(repo, f"{repo}/far.py:1:4").files[-1] == "far.py"


@pytest.mark.parametrize(
    "line, column, before", [(1, 1, ""), (1, 5, "def "), (1, 9, "def f():"), (2, 1, "def f():\n"), (2, 13, "def f():\n    return 1"), (3, 1, "def f():\n    return 1\n")]
)  # fmt: skip
def test_the_text_before_and_behind_the_cursor(repo, line, column, before):
    text = (repo / "pkg/sub/cursor.py").read_text()
    assert text_around(Cursor(repo / "pkg/sub/cursor.py", line, column)) == (before, text.removeprefix(before), "\n")


@pytest.mark.parametrize(
    "line, column, said", [(4, 1, "has 3 lines; there is no line 4"), (1, 10, "line 1 of .* has 8 characters; the last column is 9"), (3, 2, "has 0 characters; the last column is 1")]
)  # fmt: skip
def test_a_place_that_the_file_does_not_have(repo, line, column, said):
    with pytest.raises(ValueError, match=said):
        text_around(Cursor(repo / "pkg/sub/cursor.py", line, column))


@pytest.mark.parametrize(
    "data, line, column, before",
    [
        ("naïve = '⭢👩‍🚀'\n".encode(), 1, 6, "naïve"),
        ("naïve = '⭢x'\n".encode(), 1, 11, "naïve = '⭢"),
        (b"\xef\xbb\xbfab\n", 1, 2, "a"),
        ("ab\n".encode("utf-16"), 1, 2, "a"),
        (b"# -*- coding: latin-1 -*-\nx = '\xe9a'\n", 2, 7, "# -*- coding: latin-1 -*-\nx = 'é"),
        (b"a\x0cb\n", 1, 4, "a\x0cb"),
        (b"a\x0bb\xc2\x85c\n", 1, 6, "a\x0bb\x85c"),
    ],
)  # fmt: skip
def test_columns_count_characters_and_lines_end_at_newlines_only(tmp_path, data, line, column, before):
    (tmp_path / "a.py").write_bytes(data)
    assert text_around(Cursor(tmp_path / "a.py", line, column))[0] == before


@pytest.mark.parametrize(
    "data, newline", [(b"a\r\nb\r\nc", "\r\n"), (b"a\nb\nc", "\n"), (b"a\r\nb\nc\n", "\n"), (b"a\r\nb\r\nc\n", "\r\n"), (b"", "\n"), (b"a", "\n")]
)  # fmt: skip
def test_the_line_end_is_that_of_most_lines(tmp_path, data, newline):  # C4
    (tmp_path / "a.py").write_bytes(data)
    assert text_around(Cursor(tmp_path / "a.py", 1, 1))[2] == newline


def test_the_carriage_return_is_no_column_and_stays_in_the_text(tmp_path):
    (tmp_path / "a.py").write_bytes(b"ab\r\ncd\r\n")
    assert text_around(Cursor(tmp_path / "a.py", 2, 3))[0] == "ab\r\ncd"
    with pytest.raises(ValueError, match="the last column is 3"):
        text_around(Cursor(tmp_path / "a.py", 1, 4))


@pytest.mark.parametrize("data", [b"\x00\x01", b"\xff\xfe\x00", b"\x80abc"], ids=repr)
def test_a_file_that_is_not_text(tmp_path, data):
    (tmp_path / "a.py").write_bytes(data)
    with pytest.raises(ValueError, match="cannot be read as text"):
        prompt_at(tmp_path, "a.py:1:1")


def test_the_nearest_files_stand_last_and_only_source_code_comes_along(repo):
    prompt = prompt_at(repo, "pkg/sub/cursor.py:2:5")
    assert prompt.files == ["other/deep/farthest.py", "far.py", "pkg/middle.py", "pkg/sub/near.py", "pkg/sub/cursor.py"]
    documents = BYTES.decode(prompt.ids).split("<|endoftext|>")
    assert documents == ["", "FARTHEST = 1\n", "FAR = 1\n", "MIDDLE = 1\n", "NEAR = 1\n", "def f():\n    "]


def test_files_come_whole_or_not_at_all(repo):
    whole = len(prompt_at(repo, "pkg/sub/cursor.py:2:5").ids)
    prompt = prompt_at(repo, "pkg/sub/cursor.py:2:5", whole - 1)
    assert "other/deep/farthest.py" not in prompt.files and len(prompt.files) == 4
    (repo / "pkg/sub/near.py").write_text("x" * 5000)  # too large: a farther one takes its place
    assert prompt_at(repo, "pkg/sub/cursor.py:2:5", whole).files[-2:] == ["pkg/middle.py", "pkg/sub/cursor.py"]


@given(budget=st.integers(1, 120), place=st.sampled_from(["1:1", "1:9", "2:5", "2:13", "3:1"]))
def test_a_prompt_keeps_to_its_budget_and_ends_in_the_text_before_the_cursor(tmp_path_factory, budget, place):
    repo = tmp_path_factory.getbasetemp() / "budget"
    repo.mkdir(exist_ok=True)
    (repo / "a.py").write_text("def f():\n    return 1\n")
    (repo / "b.py").write_text("NEAR = 'ä'\n" * 3)
    (repo / "c.py").write_text("C\n")
    cursor = parse_cursor(f"a.py:{place}", repo)
    prompt = build_prompt(repo, cursor, BYTES, budget)
    text = [END, *BYTES.encode(text_around(cursor)[0]).tolist()]
    assert 0 < len(prompt.ids) <= budget
    assert prompt.ids[-len(text) :] == text[-budget:]
    assert prompt.files[-1] == "a.py" and prompt.ids.count(END) <= len(prompt.files)
    assert all(type(token) is int for token in prompt.ids)


def test_an_empty_file_alone_and_the_start_of_a_file(tmp_path):
    (tmp_path / "empty.py").touch()
    assert prompt_at(tmp_path, "empty.py:1:1") == prompt_at(tmp_path, "empty.py:1:1", 1)
    assert prompt_at(tmp_path, "empty.py:1:1").ids == [END]
    with pytest.raises(ValueError, match="the last column is 1"):
        prompt_at(tmp_path, "empty.py:1:2")


def test_a_file_that_is_not_source_code_alone_in_its_folder(tmp_path):
    (tmp_path / "notes.unknown").write_text("abc")
    prompt = prompt_at(tmp_path, "notes.unknown:1:4")
    assert prompt.ids == [END, *b"abc"] and prompt.files == ["notes.unknown"]


def test_unreadable_neighbours_are_left_out(repo):
    (repo / "pkg/sub/near.py").write_bytes(b"\x00\x01")
    (repo / "pkg/sub/void.py").touch()
    files = prompt_at(repo, "pkg/sub/cursor.py:1:1").files
    assert files[-2:] == ["pkg/middle.py", "pkg/sub/cursor.py"] and "pkg/sub/void.py" not in files


def test_a_repository_behind_a_symbolic_link(repo, tmp_path):
    os.symlink(repo, tmp_path / "link")
    assert prompt_at(tmp_path / "link", "pkg/sub/cursor.py:2:5") == prompt_at(repo, "pkg/sub/cursor.py:2:5")
    os.symlink(repo / "far.py", repo / "pkg/linked.py")
    files = prompt_at(repo, "pkg/linked.py:1:4").files
    assert files.count("far.py") == 1 and files[-1] == "far.py"  # its target does not come along a second time


def test_a_relative_repository(repo, monkeypatch):
    monkeypatch.chdir(repo / "pkg")
    assert prompt_at(Path("sub"), "cursor.py:2:5").files == ["near.py", "cursor.py"]


def test_control_tokens_in_the_text_stay_text(tmp_path):  # C8
    (tmp_path / "a.py").write_text("<|endoftext|>x")
    assert prompt_at(tmp_path, "a.py:1:14").ids == [END, *b"<|endoftext|>"]


def told(repo, at: str, budget: int = 10_000, unit: str = "collection", infill: bool = True) -> str:
    form = Form(unit, template(BYTES) if infill else None)
    prompt = build_prompt(repo, parse_cursor(at, repo), BYTES, budget, form)
    assert 0 < len(prompt.ids) <= budget
    return BYTES.decode(prompt.ids)


def test_a_run_on_repositories_is_asked_in_its_own_form(repo):
    text = told(repo, "pkg/sub/cursor.py:2:5", infill=False)
    assert text.startswith("<|endoftext|><|repo_name|>repo<|file_sep|>other/deep/farthest.py\nFARTHEST = 1\n<|file_sep|>far.py\n")
    assert text.endswith("<|file_sep|>pkg/sub/cursor.py\ndef f():\n    ")


def test_a_run_that_fills_in_the_middle_is_told_what_stands_behind_the_cursor(repo):
    text = told(repo, "pkg/sub/cursor.py:2:5")
    assert text.endswith("<|file_sep|>pkg/sub/cursor.py\n<|fim_prefix|>def f():\n    <|fim_suffix|>return 1\n<|fim_middle|>")
    text = told(repo, "pkg/sub/cursor.py:2:5", unit="row")
    assert text.endswith("<|endoftext|><|fim_prefix|>def f():\n    <|fim_suffix|>return 1\n<|fim_middle|>")
    assert told(repo, "pkg/sub/cursor.py:2:13", unit="row").endswith("def f():\n    return 1")  # nothing but a line end behind it


def test_a_long_file_keeps_its_name_and_three_fourths_for_what_is_before(tmp_path):
    (tmp_path / "a.py").write_text("b" * 1000 + "\n" + "a" * 1000)
    text = told(tmp_path, "a.py:2:1", 400)
    head, prefix, suffix = text.replace("<|fim_middle|>", "").replace("<|fim_suffix|>", "<|fim_prefix|>").split("<|fim_prefix|>")
    assert head == f"<|endoftext|><|repo_name|>{tmp_path.name}<|file_sep|>a.py\n"
    # In tokens: 3 of the head are control tokens, and 3 fill in the middle.
    room = 400 - (len(tmp_path.name) + len("a.py\n") + 3) - 3
    assert len(suffix) == room // 4 and len(prefix) == room - room // 4 and prefix.endswith("b\n")


@given(budget=st.integers(1, 200), unit=st.sampled_from(["row", "collection"]), infill=st.booleans(), column=st.integers(1, 13))
def test_every_form_keeps_to_its_budget(tmp_path_factory, budget, unit, infill, column):
    repo = tmp_path_factory.getbasetemp() / "forms"
    repo.mkdir(exist_ok=True)
    (repo / "a.py").write_text("import b\n    return 1\nx = 2\n")
    (repo / "b.py").write_text("NEAR = 'ä'\n" * 3)
    told(repo, f"a.py:2:{column}", budget, unit, infill)
