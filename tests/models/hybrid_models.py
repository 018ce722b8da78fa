"""Models whose trunk is a GPU's in plain torch on the CPU and whose experts are on "both": the driver is a fake, the
GPU's experts are computed by the CPU's kernels from the arena that a GPU would read."""

from __future__ import annotations

from tests.kernels.hybrid_cases import forward_from_arena

from proa.models import load_model
from proa.moe.hybrid_layers import Hybrid
from proa.native import _C
from proa.weights.checkpoint import Checkpoint


class NativeCompute:
    """An `ExpertCompute` that reads the arena with the CPU's kernels. One for each format and size."""

    def __init__(self, experts, pool, top_k, max_tokens):
        layer = experts.layer
        gate_up, down = layer.formats
        shape = (layer.num_experts, experts.hidden, experts.intermediate, gate_up)
        self._layer = _C.ExpertLayer(
            _C.ExpertWorkspace(pool, max_tokens), *shape, max_top_k=top_k, activations="trunk", down_format=down
        )
        self._sizes = layer.linear_bytes

    def __call__(self, x, topk, arena, table, out, accumulate):
        forward_from_arena(self._layer, self._sizes, x, topk, arena, table, out, accumulate)


def load_hybrid(monkeypatch, path, device, driver, plan, *, max_tokens=64, **options):
    """The model at `path` with its experts where `plan` has them. `device`: a GpuDevice on the CPU."""
    made = {}

    def create(experts, workspace, top_k):
        return Hybrid(workspace, workspace.expert_plan, driver, top_k, experts.hidden)

    def grouped(self, experts):
        if "compute" not in made:
            made["compute"] = NativeCompute(experts, device.runtime.pool, self._top_k, max_tokens)
        return made["compute"]

    monkeypatch.setattr(Hybrid, "create", create)
    monkeypatch.setattr(Hybrid, "_grouped", grouped)
    return load_model(
        Checkpoint.open(path),
        device.runtime,
        device=device,
        attention="torch",
        expert_plan=plan,
        max_tokens=max_tokens,
        max_positions=256,
        **options,
    )
