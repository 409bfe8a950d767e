"""What rotary positions cost in accuracy, up to ten million tokens: the model's table beside naive arithmetic.

The exact angle is position × frequency modulo a turn in decimal arithmetic of 60 digits, from the float64 frequency. Two errors:
``angle``: the largest distance on the unit circle between a pair's (cos, sin) and the exact ones.
``drift``: how far a score q(i + p) · k(j + p) / (|q| |k|) is from the exact q(i) · k(j), which does not depend on p.
"""

from __future__ import annotations

from decimal import Decimal, localcontext

import torch

from workers.model.positions import RopeScaling, inverse_frequencies, rotary_table, rotate

POSITIONS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
HEAD_DIM, THETA, ORIGINAL = 128, 500_000.0, 8_192
FACTOR = POSITIONS[-1] / ORIGINAL
NEAR = (0, 1, 7, 510)  # of these many tokens before a position angles are taken; as distances, of scores too
HEADS = 16
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
SCALINGS: dict[str, dict | None] = {
    "none": None,
    "linear": {"factor": FACTOR},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": FACTOR},
    "llama3": {"factor": FACTOR, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {
        "factor": FACTOR, "short_factor": (1.0,) * (HEAD_DIM // 2),
        "long_factor": tuple(FACTOR ** (2 * pair / HEAD_DIM) for pair in range(HEAD_DIM // 2)),
    },
}  # fmt: skip
METHODS = ("model", "model, bfloat16 heads", "float32 angles", "bfloat16 positions")


def rows() -> list[dict]:
    """A row for each scaling, position and method: scaling, position, method, angle, drift."""
    return [
        {"scaling": name, "position": position, "method": method, **errors}
        for name in SCALINGS
        for position in POSITIONS
        for method, errors in _errors(name, position).items()
    ]


def _errors(name: str, position: int) -> dict[str, dict]:
    given = SCALINGS[name]
    scaling = RopeScaling(name, original_max_position_embeddings=ORIGINAL, **given) if given else None
    length = torch.tensor([[position + 1]])
    inverse_F = inverse_frequencies(HEAD_DIM, THETA, scaling, length).flatten()
    places_BS = torch.tensor([[position - near for near in NEAR]])
    exact_SF = exact_angles(places_BS[0].tolist(), inverse_F)
    tables = {
        "model": _model_table(places_BS, scaling, length),
        "float32 angles": _table(places_BS.float().unsqueeze(-1) * inverse_F.float()),
        "bfloat16 positions": _table((places_BS.bfloat16().unsqueeze(-1) * inverse_F.bfloat16()).float()),
    }
    tables["model, bfloat16 heads"] = tables["model"]
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, HEADS, HEAD_DIM, generator=generator)
    exact_HS = _exact_scores(q.flatten(0, 1), k.flatten(0, 1), inverse_F)
    found = {}
    for method in METHODS:
        cos, sin = tables[method]
        angle = torch.hypot(cos[0, :, 0].double() - exact_SF.cos(), sin[0, :, 0].double() - exact_SF.sin()).max()
        dtype = torch.bfloat16 if "heads" in method else torch.float32
        drift = (_scores(q.to(dtype), k.to(dtype), cos, sin) - exact_HS).abs().max()
        found[method] = {"angle": angle.item(), "drift": drift.item()}
    return found


def exact_angles(positions: list[int], inverse_F: torch.Tensor) -> torch.Tensor:
    """Angles within a turn, float64 [S, F]."""
    with localcontext() as context:
        context.prec = 60
        return torch.tensor(
            [[float(position * Decimal(x) % (2 * PI)) for x in inverse_F.tolist()] for position in positions], dtype=torch.float64
        )


def _model_table(places_BS: torch.Tensor, scaling: RopeScaling | None, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``rotary_table``, without what an attention scaling multiplies it by."""
    scale = scaling.attention_scaling if scaling is not None else 1.0
    cos, sin = rotary_table(places_BS, HEAD_DIM, THETA, scaling, length)
    return cos / scale, sin / scale


def _table(angles_BSF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return angles_BSF.cos().unsqueeze(2), angles_BSF.sin().unsqueeze(2)


def _scores(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """q at the position, k ``NEAR`` tokens before it: cosines, float64 [H, S], of the rounded and rotated vectors."""
    rotated_k = rotate(k.expand(1, len(NEAR), HEADS, HEAD_DIM), (cos, sin))
    rotated_q = rotate(q, (cos[:, :1], sin[:, :1]))
    scores_SH = (rotated_q.double() * rotated_k.double()).sum(-1)[0]
    return scores_SH.T / _norms(q[0, 0], k[0, 0])


def _exact_scores(q_HD: torch.Tensor, k_HD: torch.Tensor, inverse_F: torch.Tensor) -> torch.Tensor:
    """The same at position 0, by complex float64 numbers."""
    q_HF, k_HF = (torch.complex(*x.double().chunk(2, -1)) for x in (q_HD, k_HD))
    angles_SF = torch.tensor(NEAR, dtype=torch.float64).unsqueeze(-1) * inverse_F
    turned_HS = (q_HF * k_HF.conj()) @ torch.polar(torch.ones_like(angles_SF), angles_SF).T
    return turned_HS.real / _norms(q_HD, k_HD)


def _norms(q_HD: torch.Tensor, k_HD: torch.Tensor) -> torch.Tensor:
    return (q_HD.double().norm(dim=-1) * k_HD.double().norm(dim=-1)).unsqueeze(-1)


def worst(found: list[dict], method: str, error: str, position: int) -> float:
    """The largest error of a method at a position, over all scalings."""
    return max(row[error] for row in found if row["method"] == method and row["position"] == position)
