"""A rank that fails or dies costs its own case, and no other."""

import os

import pytest

from tests.world import CaseFailed


def double(number: int) -> int:
    return 2 * number


def fail_on(number: int) -> int:
    raise ArithmeticError(f"of {number}")


def die(number: int):
    os._exit(number)


def test_a_rank_that_fails_or_dies_costs_its_own_case(world):
    assert world.run(double, ranks=2, number=4) == [8, 8]
    with pytest.raises(CaseFailed, match="ArithmeticError: of 5"):
        world.run(fail_on, ranks=2, number=5)
    with pytest.raises(CaseFailed, match="rank 0 of 2 died in die with exit code 6"):
        world.run(die, ranks=2, number=6)
    assert world.run(double, ranks=2, number=7) == [14, 14]
