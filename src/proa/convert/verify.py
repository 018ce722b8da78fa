"""Reads back what `proa convert` wrote and compares it with its source."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from proa.convert.experts import Conversion
from proa.convert.requantize import requantize
from proa.core.errors import CheckpointError
from proa.weights.converted_experts import ConvertedExperts
from proa.weights.progress import LoadProgress, LoadStatus

__all__ = ["verify"]

_SAMPLED_EXPERTS = 3  # of each layer: the first, the last, and one between that differs from layer to layer


def verify(conversion: Conversion, progress: Callable[[LoadStatus], None] | None = None) -> int:
    """Checks every tensor's shape, format and checksum, and converts a sample again; returns its number of linears.

    CheckpointError naming the first linear that is not what converting it gives.
    """
    layout = conversion.layout
    converted = ConvertedExperts.open(conversion.output, conversion.checkpoint, layout)
    count = layout.shape.num_experts
    linear_bytes = converted.stored_bytes // (len(layout.prefixes) * 3 * count)
    report = LoadProgress(progress)
    report.start(converted.stored_bytes, "verifying")
    sampled = 0

    def check(layer: int, expert: int, again: bool) -> int:
        for name, shape in layout.expert(layer, expert):
            found = converted.linear(name, shape)
            if again:
                expected, _ = requantize(conversion.source.linear(name, shape), converted.origin.format, name)
                if not all(_same(getattr(found, part), getattr(expected, part)) for part in ("data", "scales", "bias")):
                    got = "others, with the checksum they were written with"
                    raise CheckpointError(f"{conversion.output}: {name}", "the bytes converting it gives", got)
            report.add(linear_bytes)
        return 3 if again else 0

    with ThreadPoolExecutor(conversion.num_threads, "proa-verify") as pool:
        for layer in layout.prefixes:
            sample = {0, count - 1, layer * 7 % count}
            assert len(sample) <= _SAMPLED_EXPERTS
            layers, experts = [layer] * count, range(count)
            sampled += sum(pool.map(check, layers, experts, [expert in sample for expert in experts]))
            for name, _ in layout.linears(layer):
                converted.packed(name)
    report.finish()
    return sampled


def _same(found: np.ndarray | None, expected: np.ndarray | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return found.tobytes() == expected.tobytes()
