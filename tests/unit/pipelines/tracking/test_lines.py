"""The lines of a run folder are read exactly, each step once, and become keys that MLflow accepts."""

import json
import math
import os
from collections import Counter

import pytest

from pipelines.tracking.lines import Tail, clean_key, flatten, read_rows, step_points
from tests.unit.pipelines.tracking.run_folder import a_row


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_rows_are_read_up_to_a_line_that_is_still_being_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(a_row(1), a_row(2, loss=math.nan)) + '{"step": 3, "lo')
    rows = read_rows(path)
    assert [row["step"] for row in rows] == [1, 2] and math.isnan(rows[1]["loss"])
    path.write_text("")
    assert read_rows(path) == []


@pytest.mark.parametrize("damage", ['{"step": 2, "lo\n', "\n", "[1]\n", "3\n"])
def test_any_other_damage_is_named_with_its_line(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(a_row(1)) + damage + lines(a_row(3)))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_rows(path)


def test_a_tail_gives_each_step_once_whatever_happens_to_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)

    def new() -> list[int]:
        return [row["step"] for row in tail.rows()]

    assert new() == []  # not there yet
    path.write_text(lines(a_row(1), a_row(2)) + '{"step": 3')
    assert new() == [1, 2]
    with path.open("a") as file:
        file.write(', "loss": 1.0}\n')
    assert new() == [3] and new() == []
    (tmp_path / "new").write_text(lines(a_row(1)))
    os.replace(tmp_path / "new", path)
    assert new() == []
    with path.open("a") as file:
        file.write(lines(a_row(2), a_row(3), a_row(4)))
    assert new() == [4]
    path.write_text(lines(*(a_row(step) for step in range(1, 4))))  # the same file, cut back in place
    assert new() == []
    path.write_text(lines(*(a_row(step) for step in range(1, 7))))
    assert next(tail.rows())["step"] == 5  # a reader may stop early and go on later
    assert new() == [6]


def test_keys():
    assert clean_key("../a//b/./c%\n") == "a/b/c__" and clean_key("//") == "_" and len(clean_key("k" * 400)) == 250
    assert flatten({"a": {"b": [1, 2]}, "c": {}}) == {"a.b": "[1, 2]", "c": "{}"}
    assert len(flatten({"x" * 300: 1, "x" * 301: 2})) == 2
    assert Counter(key for key, _, _ in step_points(a_row(1))).most_common(1)[0][1] == 1
    assert step_points(a_row(1))[-1] == ("loss", 4.0, 1)  # last: a request cut short never hides a missing rest
