"""What the plan says of a batch is what a rank receives."""

from types import SimpleNamespace

import torch

from pipelines.config import load_config
from pipelines.plan import make_shape
from pipelines.plan.memory import peak
from tests.distributed.training_cases import window
from workers.mesh import MeshSpec
from workers.training.batch import receive


def test_a_batch_is_as_large_as_the_plan_says():
    settings = ("model.vocab_size=64", "training.context=256", "training.micro_batch=2", "training.batch=2")
    planned = [item.bytes for item in peak(make_shape(load_config(None, settings), None, "cpu")).items if item.kind == "batch"]
    mesh = SimpleNamespace(spec=MeshSpec(), is_leader=True, device=torch.device("cpu"))
    batch = receive([window(number, 256) for number in range(2)], mesh, 256)
    assert planned == [sum(x.nbytes for x in vars(batch).values() if isinstance(x, torch.Tensor))]
