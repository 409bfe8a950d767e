"""The mesh: which rank does what, and which process groups it talks through.

Axes, outermost first: ``dp`` (data) × ``ring`` × ``ulysses`` (together the context axis, ``cp``) × ``tp`` (tensor).
Tensor ranks are neighbours, so that a node holds whole tensor groups; then ulysses ranks; a ring is what crosses nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from workers.attention.transport import Ring, Traffic

LAYOUTS = ("zigzag", "contiguous", "striped")


@dataclass(frozen=True)
class MeshSpec:
    """The sizes of the mesh. ``dp=-1`` takes the workers that the other axes leave.

    ``layout`` says which tokens of a sequence a context rank holds (see ``workers.attention.layout``).
    """

    dp: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    layout: str = "zigzag"

    def __post_init__(self):
        for axis in ("ring", "ulysses", "tp"):
            if getattr(self, axis) < 1:
                raise ValueError(f"mesh.{axis} is {getattr(self, axis)}; it must be at least 1")
        if self.dp < 1 and self.dp != -1:
            raise ValueError(f"mesh.dp is {self.dp}; it must be at least 1, or -1 for the workers that are left")
        if self.layout not in LAYOUTS:
            raise ValueError(f"attention.layout is {self.layout!r}; it must be one of {', '.join(LAYOUTS)}")

    @property
    def cp(self) -> int:
        """Ranks that share one sequence."""
        return self.ring * self.ulysses

    @property
    def ranks_per_group(self) -> int:
        """Ranks of one data-parallel group: they work on the same sequences."""
        return self.cp * self.tp

    @property
    def world(self) -> int:
        """Ranks of the whole mesh; ``dp`` must be resolved."""
        assert self.dp > 0, "resolve() the mesh before asking for its size"
        return self.dp * self.ranks_per_group

    def resolve(self, workers: int | None = None) -> "MeshSpec":
        """This mesh with ``dp`` settled for ``workers`` ranks (``None``: as many as the mesh says).

        Raises ValueError when the product of the axes is not the number of workers.
        """
        if self.dp == -1:
            workers = self.ranks_per_group if workers is None else workers
            if workers < 1 or workers % self.ranks_per_group:
                raise ValueError(
                    f"{workers} workers cannot be split into groups of ring × ulysses × tp = "
                    f"{self.ring} × {self.ulysses} × {self.tp} = {self.ranks_per_group}; "
                    f"use a multiple of {self.ranks_per_group} workers"
                )
            return replace(self, dp=workers // self.ranks_per_group)
        if workers is not None and workers != self.world:
            raise ValueError(
                f"the mesh dp × ring × ulysses × tp = {self.dp} × {self.ring} × {self.ulysses} × {self.tp} needs "
                f"{self.world} workers, not {workers}; change the mesh, or set cluster.workers to {self.world} or null"
            )
        return self

    def check_model(self, model) -> None:
        """Raise ValueError when the heads or the feed-forward size of ``model`` (a ModelConfig) do not divide over the mesh."""
        if model.heads % (self.tp * self.ulysses):
            raise ValueError(
                f"{model.heads} query heads do not divide by tp × ulysses = {self.tp} × {self.ulysses}; "
                f"choose a mesh whose tp × ulysses divides {math.gcd(model.heads, model.kv_heads)}"
            )
        per_rank = model.kv_heads // self.tp
        if model.kv_heads % self.tp or (per_rank % self.ulysses and self.ulysses % per_rank):
            # Fewer KV heads than ulysses ranks are repeated (``ulysses.replicate``), but only whole.
            raise ValueError(
                f"{model.kv_heads} KV heads do not divide by tp × ulysses = {self.tp} × {self.ulysses}; "
                f"choose a mesh whose tp × ulysses divides {math.gcd(model.heads, model.kv_heads)}"
            )
        if model.ffn_dim % self.tp:
            raise ValueError(f"model.ffn_dim = {model.ffn_dim} does not divide by mesh.tp = {self.tp}")

    @property
    def length_multiple(self) -> int:
        """A sequence is padded to a multiple of this many tokens.

        Zigzag needs two chunks a ring rank; sequence-parallel norms split what a context rank holds over tp.
        """
        return 2 * self.ring * self.ulysses * self.tp

    def padded(self, length: int) -> int:
        """``length`` rounded up to what the mesh divides."""
        return -(-length // self.length_multiple) * self.length_multiple

    def build(self, device_type: str) -> "Mesh":
        """The mesh of this process; ``torch.distributed`` must be initialised with ``world`` ranks."""
        spec = self.resolve(dist.get_world_size())
        sizes = (spec.dp, spec.ring, spec.ulysses, spec.tp)
        return Mesh(spec, init_device_mesh(device_type, sizes, mesh_dim_names=("dp", "ring", "ulysses", "tp")))


def split_context(cp: int, heads: int, kv_heads: int, tp: int = 1, ranks_per_node: int = 8) -> tuple[int, int]:
    """(ring, ulysses) for ``cp`` ranks that share a sequence.

    Ulysses is the cheaper exchange where links are fast, and stops at a node and at the KV heads of a tensor rank (beyond
    them heads would be sent twice): it gets the largest divisor of ``cp`` that fits both, the ring gets the rest.
    """
    shared = math.gcd(heads, kv_heads)
    fits = [u for u in range(1, cp + 1) if cp % u == 0 and shared % (tp * u) == 0 and tp * u <= max(ranks_per_node, tp)]
    ulysses = max(fits, default=1)
    return cp // ulysses, ulysses


class Mesh:
    """A built mesh: this rank's coordinates, and the groups named by what they are for.

    - ``ring_transport``, ``ulysses_group``: hops and all-to-alls of attention, counted in ``traffic``;
    - ``tp``: the axis of tensor parallelism, a one-dimensional DeviceMesh;
    - ``fsdp``: ``dp × ring × ulysses`` flattened: weights, gradients and optimizer state are sharded over it;
    - ``group``: the ranks of this data-parallel group, which read the same sequences. Its first rank is the leader.
    """

    def __init__(self, spec: MeshSpec, device_mesh: DeviceMesh):
        self.spec = spec
        self.device_mesh = device_mesh
        self.device_type = device_mesh.device_type
        self.tp = device_mesh["tp"]
        self.fsdp = device_mesh["dp", "ring", "ulysses"]._flatten("fsdp")
        self.traffic = Traffic()
        self.ring_transport = Ring(device_mesh["ring"].get_group(), self.traffic)
        self.ulysses_group = device_mesh["ulysses"].get_group()
        self.dp_rank, self.ring_rank, self.ulysses_rank, self.tp_rank = device_mesh.get_coordinate()
        # A group of its own: the leader scatters batches on it while attention hops run on the ring group.
        self.group = device_mesh["ring", "ulysses", "tp"]._flatten("group").get_group()
        self.leader = dist.get_process_group_ranks(self.group)[0]

    @property
    def ring(self) -> int:
        return self.spec.ring

    @property
    def ulysses(self) -> int:
        return self.spec.ulysses

    @property
    def layout(self) -> str:
        return self.spec.layout

    @property
    def cp_rank(self) -> int:
        return self.ring_rank * self.spec.ulysses + self.ulysses_rank

    @property
    def is_leader(self) -> bool:
        return dist.get_rank() == self.leader

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        return torch.device(self.device_type, torch.cuda.current_device()) if self.device_type == "cuda" else torch.device("cpu")
