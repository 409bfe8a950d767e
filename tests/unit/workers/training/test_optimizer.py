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


def test_warm_up_stable_decay():
    config = TrainingConfig(steps=100, warmup_steps=10, learning_rate=1.0, final_ratio=0.1, decay="wsd", decay_ratio=0.2)
    rates = [learning_rate(config, step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[9:80] == pytest.approx([1.0] * 71)
    assert rates[84] == pytest.approx(1 - 0.9 * 0.5)  # a quarter of the way down: 1 − √¼
    assert rates[99] == pytest.approx(0.1) and learning_rate(config, 120) == rates[99]
    assert all(a > b for a, b in zip(rates[79:], rates[80:]))


def test_the_stable_part_does_not_know_where_a_run_ends():
    """So a checkpoint of it is the start of any longer run."""
    short, long = (TrainingConfig(steps=steps, warmup_steps=5, decay="wsd") for steps in (50, 500))
    assert [learning_rate(short, step) for step in range(1, 46)] == [learning_rate(long, step) for step in range(1, 46)]


@pytest.mark.parametrize("ratio, last", [(0.0, 1.0), (1.0, 0.1)])
def test_a_decay_of_nothing_and_of_everything(ratio, last):
    config = TrainingConfig(steps=20, warmup_steps=5, learning_rate=1.0, decay="wsd", decay_ratio=ratio)
    assert learning_rate(config, 5) == 1.0 and learning_rate(config, 20) == pytest.approx(last)


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
