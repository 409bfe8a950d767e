import torch

from workers.attention.tape import Tape, once


def test_a_replay_takes_what_was_recorded_and_computes_nothing():
    calls = []

    def double(x):
        calls.append("double")
        return x * 2, x + 1

    def outer(x):
        calls.append("outer")
        return once(double, x)[0]

    x = torch.ones(3, requires_grad=True)
    tape = Tape(pack=lambda t: t.tolist(), unpack=torch.tensor)
    plain = once(outer, x)
    with tape.recording():
        first, second, choice = once(outer, x), once(double, x), once(lambda: "a choice")
    del calls[:]
    with tape.replaying():
        again, pair, same = once(outer, x), once(double, x), once(lambda: "another")
    assert calls == [] and same == choice == "a choice"
    assert torch.equal(plain, first) and torch.equal(first, again) and not again.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(second, pair)) and isinstance(pair, tuple)
    once(outer, x)
    assert calls == ["outer", "double"]


def test_marks_stay_with_a_tensor():
    def marked():
        x = torch.ones(2)
        x.exact = True
        return x

    seen = []
    tape = Tape(pack=lambda t: seen.append(t.exact) or t)
    with tape.recording():
        once(marked)
    assert seen == [True]
