import pytest

from tests.distributed.world import World


@pytest.fixture(scope="session")
def world():
    world = World()
    yield world
    world.close()
