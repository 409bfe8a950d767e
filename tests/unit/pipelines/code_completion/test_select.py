"""A budget is kept to the token, spent on what tells most, and read in the order of dependencies."""

import json

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.cli import main
from pipelines.code_completion.select import Files, select
from pipelines.corpus.find import find_code
from pipelines.corpus.tokenizer import ByteTokenizer
from tests.unit.pipelines.code_completion.test_fim import BPE

BYTES = ByteTokenizer()


@pytest.fixture
def repo(tmp_path):
    """A small C project: main.c uses what a.h, b.h and far/impl.c define; noise.c lies beside it."""
    root = tmp_path / "proj"
    for name, text in {
        "src/main.c": '#include "a.h"\n\nint main(void)\n{\n\tstruct thing t;\n\treturn far_away(&t) + CONSTANT;\n}\n',
        "src/noise.c": "int noise;\n",
        "include/a.h": "#include <b.h>\n#define CONSTANT 3\n",
        "include/b.h": "#include <c.h>\n"
        + "int filler;\n" * 400
        + "/* what it is */\nstruct thing {\n\tint x;\n};\n"
        + "int filler;\n" * 400,
        "include/c.h": "int c;\n",
        "far/impl.c": "int far_away(struct thing *t)\n{\n\treturn t->x;\n}\n",
        "far/use.c": "int other(struct thing *t) { return far_away(t); }\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_definitions_imports_and_neighbours_each_with_its_reason(repo):
    selection = select(repo, repo / "src/main.c", 6, 1200, BYTES)
    chosen = {c.path: (c.reason, c.lines) for c in selection.choices}
    assert chosen["src/main.c"] == ("the file itself", ())
    assert chosen["include/a.h"] == ("defines CONSTANT", ())
    assert chosen["include/b.h"] == ("defines thing", ((402, 405),))  # the definition and its comment, not 10 kB of filler
    assert chosen["far/impl.c"] == ("defines far_away", ())
    assert chosen["include/c.h"] == ("imported", ()) and chosen["src/noise.c"] == ("near", ())
    paths = [c.path for c in selection.choices]
    assert paths[-1] == "src/main.c" and paths.index("include/b.h") < paths.index("include/a.h")
    assert next(c.text for c in selection.choices if c.path == "include/b.h").startswith("/* what it is */\nstruct thing {\n")


def test_a_file_of_which_a_part_was_taken_comes_whole_where_there_is_room(repo):
    chosen = {c.path: c for c in select(repo, repo / "src/main.c", 6, 20_000, BYTES).choices}
    assert chosen["include/b.h"].lines == () and chosen["include/b.h"].reason == "defines thing"
    assert len(chosen) == 7


def test_a_file_longer_than_half_of_the_budget_gives_the_part_around_the_line(repo):
    (repo / "src/long.py").write_text("".join(f"line_{i} = {i}\n" for i in range(5000)))
    selection = select(repo, repo / "src/long.py", 2500, 2000, BYTES)
    own = selection.choices[-1]
    ((first, last),) = own.lines
    assert first < 2500 < last and 700 < own.tokens <= 1000 and (2500 - first) > 1.5 * (last - 2500)
    assert own.text == "".join(f"line_{i} = {i}\n" for i in range(first - 1, last))
    for line in (1, 5000):
        ((first, last),) = select(repo, repo / "src/long.py", line, 2000, BYTES).choices[-1].lines
        assert first <= line <= last and last - first > 40


@given(budget=st.integers(1, 3000), line=st.integers(1, 8), tokenizer=st.sampled_from([BYTES, BPE]))
@settings(max_examples=40, deadline=None)
def test_the_budget_is_never_exceeded_and_every_token_is_counted(tmp_path_factory, budget, line, tokenizer):
    root = tmp_path_factory.getbasetemp() / "budget" / "proj"
    root.mkdir(parents=True, exist_ok=True)
    (root / "a.py").write_text("import b\nfrom c import f\n\n\ndef g():\n    return f(b.x)\n# naïve\n")
    (root / "b.py").write_text("x = 1\n" * 50)
    (root / "c.py").write_text("import a\n\ndef f(x):\n    return '⭢'\n\n" + "y = 2\n" * 100)
    try:
        selection = select(root, root / "a.py", line, budget, tokenizer)
    except ValueError as error:
        assert f"--budget is {budget} tokens, which does not hold line {line}" in str(error) and budget < 60
        return
    ids = selection.ids(tokenizer)
    assert len(ids) == selection.tokens <= budget == selection.budget
    assert selection.choices[-1].path == "a.py"
    assert selection.ids(tokenizer) == select(root, root / "a.py", line, budget, tokenizer).ids(tokenizer)
    parts = tokenizer.decode(ids).split("<|file_sep|>")
    assert parts[0] == "<|repo_name|>proj" and [p.partition("\n")[0] for p in parts[1:]] == [c.path for c in selection.choices]


def test_circles_of_imports_end(tmp_path):  # C14
    for i in range(50):
        (tmp_path / f"m{i:02}.py").write_text(f"import m{(i + 1) % 50:02}\nimport m{i:02}\n")
    selection = select(tmp_path, tmp_path / "m07.py", 1, 10_000, BYTES)
    assert len(selection.choices) == 50 and selection.choices[-1].path == "m07.py"
    files = Files(tmp_path, tmp_path / "m07.py", find_code([tmp_path])[0])
    assert list(files.imports())[:2] == ["m08.py", "m09.py"]


def test_what_is_no_text_gone_or_generated_is_passed_over(repo):
    (repo / "src/zero.c").write_bytes(b"\x00\x01")
    (repo / "src/generated.c").write_text("/* @generated */\nint far_away(void)\n{\n}\n")
    paths = [c.path for c in select(repo, repo / "src/main.c", 6, 20_000, BYTES).choices]
    assert "src/zero.c" not in paths and "src/generated.c" not in paths and len(paths) >= 6


def test_a_repository_that_ignores_itself_is_told_of_not_passed_over(repo):
    (repo / ".gitignore").write_text("/*\n")
    with pytest.raises(ValueError, match="no source file in .*; --no-gitignore takes what"):
        select(repo, repo / "src/main.c", 6, 1200, BYTES)
    assert len(select(repo, repo / "src/main.c", 6, 20_000, BYTES, gitignore=False).choices) == 7


def test_wrong_places_are_refused_in_one_line(repo):
    for at, said in (
        ("src/main.c", "--at 'src/main.c' is not FILE:LINE, as in"), ("src/main.c:0", "is not FILE:LINE"), ("none.c:1", "is not a file"),
        ("src/main.c:99", "has 8 lines; there is no line 99"),
    ):  # fmt: skip
        result = CliRunner().invoke(main, ["select", str(repo), "--at", at, "--budget", "500"])
        assert result.exit_code == 2 and said in result.output and result.output.count("\n") == 1
    result = CliRunner().invoke(main, ["select", str(repo), "--at", "src/main.c:6", "--budget", "5"])
    assert result.exit_code == 2 and "--budget is 5 tokens, which does not hold line 6" in result.output


def test_the_command_prints_a_table_one_json_object_and_the_text(repo, tmp_path):
    command = ["select", str(repo), "--at", "src/main.c:6", "--budget", "1200", "--out", str(tmp_path / "text")]
    shown = CliRunner().invoke(main, command)
    assert shown.exit_code == 0 and "defines CONSTANT" in shown.stdout and "of 1,200 tokens" in shown.stdout
    value = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout.splitlines()[-1])
    assert value["tokens"] <= value["budget"] == 1200 and value["files"][-1]["path"] == "src/main.c"
    assert sum(file["tokens"] for file in value["files"]) + 1 + len("proj") == value["tokens"]
    assert (tmp_path / "text").read_text().startswith("<|repo_name|>proj<|file_sep|>")
