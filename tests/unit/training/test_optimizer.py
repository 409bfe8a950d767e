import pytest
import torch

from workers.training.config import TrainingConfig
from workers.training.optimizer import build_optimizer, learning_rate, local_gradients, scale_, squared_norm


def test_warm_up_and_decay():
    config = TrainingConfig(steps=110, warmup_steps=10, learning_rate=1.0, final_ratio=0.1, decay="linear")
    assert [learning_rate(config, s) for s in (1, 5, 10)] == [0.1, 0.5, 1.0]
    assert learning_rate(config, 60) == pytest.approx(0.55)
    assert learning_rate(config, 110) == pytest.approx(0.1)
    assert learning_rate(TrainingConfig(steps=110, warmup_steps=10, learning_rate=1.0, decay="cosine"), 60) == pytest.approx(0.55)
    assert learning_rate(TrainingConfig(steps=5, warmup_steps=0, learning_rate=1.0, decay="constant"), 1) == 1.0


def test_the_norm_and_its_scaling():
    model = torch.nn.Linear(3, 4)
    model(torch.randn(5, 3)).square().sum().backward()
    gradients = local_gradients(model)
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert squared_norm(gradients) == pytest.approx(expected**2, rel=1e-6)
    scale_(gradients, 0.5)
    assert squared_norm(gradients) == pytest.approx(expected**2 / 4, rel=1e-6)


def test_matrices_decay_and_vectors_do_not():
    optimizer = build_optimizer(torch.nn.Linear(3, 4), TrainingConfig(weight_decay=0.3))
    assert [(g["weight_decay"], [tuple(p.shape) for p in g["params"]]) for g in optimizer.param_groups] == [(0.3, [(4, 3)]), (0.0, [(4,)])]


def test_state_that_exists_from_the_start_changes_no_step():
    results = []
    for prepared in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 4)
        optimizer = build_optimizer(model, TrainingConfig(learning_rate=0.1))
        if not prepared:
            optimizer.state.clear()
        for _ in range(3):
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.weight.detach().clone())
    assert torch.equal(*results)
