"""What an adapter's frozen weights are: a checkpoint that holds the adapter alone says which base it belongs to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

SAMPLES, SAMPLE_BYTES = 64, 4096  # of each file of weights: another training of the same shapes differs in every one


@dataclass(frozen=True)
class Base:
    """The weights of a model folder, with the fingerprint they had, or those that ``seed`` gives."""

    seed: int | None = None
    folder: str | None = None
    fingerprint: str | None = None

    @classmethod
    def of(cls, folder: Path | None, seed: int) -> Base:
        if folder is None:
            return cls(seed=seed)
        return cls(folder=str(Path(folder).resolve()), fingerprint=fingerprint(Path(folder)))

    def same_weights(self, other: Base) -> bool:
        """A folder may have moved."""
        return (self.seed, self.fingerprint) == (other.seed, other.fingerprint)

    def check(self) -> None:
        """Raise ValueError when the folder is gone or has changed since the adapter was trained."""
        if self.folder is None:
            return
        if not Path(self.folder).is_dir():
            raise ValueError(f"the adapter's base model {self.folder} is gone; put it back, its checkpoints hold the adapter alone")
        if fingerprint(Path(self.folder)) != self.fingerprint:
            raise ValueError(f"the adapter's base model {self.folder} is not what it was trained on; put back the folder as it was")

    def __str__(self) -> str:
        return f"the model {self.folder}" if self.folder else f"the weights of seed {self.seed}"


def fingerprint(folder: Path) -> str:
    """A hash of config.json and, for each file of weights, of its name, size, header and a sample of its values; reads little."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")  # of the header, JSON
            digest.update(file.read(length))
            for sample in range(SAMPLES):
                file.seek(8 + length + (size - 8 - length) * sample // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
