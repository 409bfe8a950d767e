import json
import time
from types import SimpleNamespace

import pytest
import torch

from workers.attention.transport import Traffic
from workers.training.meter import JsonLines, Meter, peak_memory

CPU = torch.device("cpu")


def a_meter():
    return Meter(SimpleNamespace(traffic=Traffic(), device_type="cpu"))


def test_a_step_is_sampled_from_its_start():
    meter = a_meter()
    with meter.loading():
        time.sleep(0.02)
    with meter.loading():
        time.sleep(0.02)
    with meter._mesh.traffic.waiting(CPU):
        time.sleep(0.01)
    with meter._mesh.traffic.computing(CPU):
        time.sleep(0.03)
    meter._mesh.traffic.scores += 7
    sample = meter.sample()
    assert 0.04 <= sample.loading and 0.01 <= sample.exposed < 0.03 <= sample.computing
    assert sample.scores == 7 and sample.memory > 1 << 20
    assert sample.loading + sample.exposed + sample.computing <= sample.seconds
    meter.start()
    again = meter.sample()
    assert again.loading == again.exposed == again.computing == again.scores == 0 and again.seconds < sample.seconds


def test_time_in_a_loader_that_fails_counts_and_the_error_goes_on():
    meter = a_meter()
    with pytest.raises(StopIteration), meter.loading():
        time.sleep(0.01)
        raise StopIteration
    assert meter.sample().loading >= 0.01


def test_peak_memory_is_in_bytes_and_grows_with_what_is_held():
    before = peak_memory("cpu")
    held = bytearray(before + (64 << 20))
    assert 1 << 24 < before < len(held) <= peak_memory("cpu") + (1 << 20)


@pytest.fixture
def lines(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3, 4):
        lines.append({"step": step, "loss": 1 / step})
    return lines


def steps(lines) -> list[int]:
    return [json.loads(line)["step"] for line in lines.path.read_text().splitlines()]


def test_steps_after_the_checkpoint_are_dropped_and_taken_again(lines):
    lines.cut(2)
    assert steps(lines) == [1, 2]
    lines.append({"step": 3, "loss": 0.0})
    assert steps(lines) == [1, 2, 3]
    assert not lines.path.with_suffix(".tmp").exists()


@pytest.mark.parametrize("cut, left", [(-1, []), (0, []), (4, [1, 2, 3, 4]), (99, [1, 2, 3, 4])])
def test_cuts_at_the_ends(lines, cut, left):
    lines.cut(cut)
    assert steps(lines) == left


def test_half_a_line_of_a_killed_writer_goes_away(lines):
    with open(lines.path, "a") as file:
        file.write('{"step": 5, "lo')
    lines.cut(4)
    assert steps(lines) == [1, 2, 3, 4]


def test_a_file_that_is_not_there_is_not_made(tmp_path):
    JsonLines(tmp_path / "none.jsonl").cut(3)
    assert list(tmp_path.iterdir()) == []
