"""What a run will need, before it is started: parameters, memory, traffic, FLOPs, time, and the longest context that fits.

``shape`` has the sizes of one rank; ``parameters``, ``block`` and ``memory`` count bytes, ``traffic`` what is sent, ``duration``
seconds; ``search`` turns the switches; ``simulate`` runs a mesh's attention without the mesh; ``text`` says it.
"""

from pipelines.plan.plan import Plan, make_plan, make_shape

__all__ = ["Plan", "make_plan", "make_shape"]
