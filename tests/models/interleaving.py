"""Models whose passes stop between layers, where a test runs something else."""

from __future__ import annotations

from collections.abc import Callable


class Interleaved:
    """`between` is called with the number of layers done. When it returns True the pass is given up there.

    `forward` returns no logits of a pass that is given up.
    """

    def __init__(self, model, between: Callable[[int], bool | None]) -> None:
        self.layout = model.layout
        self._model, self._between = model, between

    def forward(self, batch, kv, still_wanted=None):
        layers = self._model.layers(batch, kv, still_wanted)
        done = 0
        while True:
            try:
                share = next(layers)
            except StopIteration as end:
                return end.value
            assert 0 < share < 1
            done += 1
            if self._between(done):
                layers.close()
                return batch.positions.new_zeros(batch.positions.shape[0], 1)
