"""The decoder all families share: embedding, layers of attention and MLP or experts, final norm, output head."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator

import torch

from proa.attention.backend import AttentionBackend, create_attention
from proa.attention.batch import ForwardBatch, StillWanted
from proa.attention.expanded import expanded_bytes
from proa.attention.shape import single_token_bytes
from proa.kvcache.layout import KVLayout
from proa.kvcache.pool import KVPool
from proa.layers.embedding import Embedding, load_output_head
from proa.layers.gpu_check import check_gpu_trunk
from proa.layers.linear import Linear
from proa.layers.mla import ATTEND_TOKENS, MlaSpec
from proa.layers.mlp import MLP_TOKENS, mlp_rows
from proa.layers.norm import RMSNorm
from proa.layers.parameters import ParameterReader
from proa.layers.rotary import RotaryEmbedding
from proa.layers.workspace import ExpertPlan, Workspace, measuring_workspace
from proa.models.decoder_layer import DecoderLayer, DecoderSpec, Lane, Rows
from proa.moe.cpu_experts import expert_scratch_bytes
from proa.moe.hybrid_layers import hybrid_of, max_cpu_tokens
from proa.moe.stats import RoutingCounts
from proa.moe.strategies import create_usage
from proa.moe.traffic import ExpertTraffic, HybridTraffic
from proa.moe.usage import ExpertUsage

__all__ = ["Decoder", "cpu_scratch_bytes", "gpu_scratch_bytes", "gpu_transient_bytes"]

MAX_CACHED_ROWS = 64
# Rows that are copied at a time when others leave a pass.
NARROW_TOKENS = 4096


def gpu_scratch_bytes(spec: DecoderSpec, max_tokens: int, max_positions: int) -> int:
    """What the scratch of a trunk on a GPU takes there from loading on, with its tables and without the experts'."""
    workspace = _measured_rows(spec, max_tokens)
    for width in {spec.dense_intermediate, spec.moe.shared_intermediate} - {0}:
        mlp_rows(workspace, width, max_tokens)
    tables = 4 * spec.attention.rotary.dim * max_positions
    return workspace.device_bytes + tables + single_token_bytes(spec.head_shape)


def gpu_transient_bytes(spec: DecoderSpec, max_tokens: int, max_positions: int) -> int:
    """At most what torch operations of a forward take at a time: operands rounded to bf16, expanded keys and values.

    `max_positions`: of a sequence.
    """
    attention, hidden = spec.attention, spec.hidden
    some = min(max_tokens, max(MLP_TOKENS, NARROW_TOKENS, ATTEND_TOKENS))
    heads = attention.num_heads
    sizes = [2 * max_tokens * hidden, 2 * some * max(spec.dense_intermediate, spec.moe.shared_intermediate)]
    sizes.append(4 * some * hidden)  # rows that stay when others leave a pass
    if isinstance(attention, MlaSpec):
        rank, key_dim, value_dim = attention.kv_lora_rank, attention.nope_dim + attention.rope_dim, attention.value_dim
        sizes += [
            2 * max_tokens * heads * value_dim,
            expanded_bytes(max_tokens, max_positions, heads, attention.latent_dim, key_dim, value_dim),
            # In absorbed form: queries; one factor of heads and their product in float32.
            2 * some * heads * attention.latent_dim,
            some * heads * max(2 * attention.nope_dim + 4 * rank, 2 * rank + 4 * value_dim),
        ]
    else:
        sizes.append(2 * max_tokens * heads * attention.head_dim)
    return max(sizes)


def cpu_scratch_bytes(spec: DecoderSpec, max_tokens: int, num_threads: int | None = None) -> int:
    """What the scratch of a trunk on this machine's CPU takes, experts included."""
    moe = spec.moe
    widths = ((moe.intermediate, moe.router.top_k), (moe.shared_intermediate, 1), (spec.dense_intermediate, 1))
    experts = expert_scratch_bytes(max_tokens, spec.hidden, widths, num_threads)
    return _measured_rows(spec, max_tokens).device_bytes + experts


def _measured_rows(spec: DecoderSpec, max_tokens: int) -> Workspace:
    workspace = measuring_workspace(max_tokens)
    Rows(spec, workspace, max_tokens)
    Rows(spec, workspace, 1, Lane.SHORT)
    Rows(spec, workspace, 1, Lane.STEP)
    return workspace


class Decoder:
    """A loaded model. One forward at a time: its scratch is shared; others may run between the layers of `layers`."""

    def __init__(
        self,
        spec: DecoderSpec,
        backend: AttentionBackend,
        workspace: Workspace,
        *,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
        usage: ExpertUsage,
    ) -> None:
        self._spec = spec
        self._backend = backend
        self._workspace = workspace
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self.expert_usage = usage
        plan = workspace.expert_plan
        self._may_defer = plan is not None and plan.max_deferred > 0
        self._rows: OrderedDict[tuple[int, Lane], Rows] = OrderedDict()
        self._hybrid = hybrid_of(workspace)
        if self._hybrid is not None:
            self._hybrid.last_has_few = spec.num_layers - 1 in spec.moe_layers
        self._stopped = 0  # how many passes are between two layers
        # Takes all scratch memory now, so that no forward does.
        for lane in Lane:
            self._rows_of(lane.tokens(workspace.max_tokens), lane)

    @classmethod
    def load(
        cls,
        reader: ParameterReader,
        spec: DecoderSpec,
        *,
        max_tokens: int,
        max_positions: int,
        attention: str,
        expert_plan: ExpertPlan | None = None,
    ) -> Decoder:
        """Reads and packs all parameters. `max_tokens`: of one forward; `max_positions`: of a sequence.

        `attention`: the name of an attention backend for the device. `expert_plan`: see `Workspace`. Raises
        KernelFaultError when a kernel of the GPU fails its self-test.
        """
        cpu_tokens = None if expert_plan is None else max_cpu_tokens(expert_plan, max_tokens)
        workspace = Workspace(reader.device, max_tokens, expert_plan, cpu_tokens=cpu_tokens)
        rotary = RotaryEmbedding(reader.device, spec.attention.rotary, max_positions)
        embedding = Embedding.load(reader, "model.embed_tokens", vocab_size=spec.vocab_size, hidden=spec.hidden)
        counts = RoutingCounts(len(spec.moe_layers), spec.moe.router.num_experts, reader.device.torch_device)
        layers = [DecoderLayer.load(reader, spec, layer, rotary, workspace, counts) for layer in range(spec.num_layers)]
        workspace.loaded()
        norm = RMSNorm.load(reader, "model.norm", size=spec.hidden, eps=spec.norm_eps)
        head = load_output_head(reader, "lm_head", embedding, tied=spec.tied_head)
        backend = create_attention(attention, reader.device, spec.head_shape)
        if reader.device.name == "cuda":
            check_gpu_trunk(reader.device, backend, reader.kernel_uses, spec.layout, spec.attention.num_heads)
        usage = create_usage(counts, workspace, spec.moe.router.top_k)
        return cls(spec, backend, workspace, embedding=embedding, layers=layers, norm=norm, head=head, usage=usage)

    @property
    def layout(self) -> KVLayout:
        return self._spec.layout

    @property
    def vocab_size(self) -> int:
        return self._spec.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights in memory; the embedding stays in the mapped file."""
        return self._head.nbytes + sum(layer.nbytes for layer in self._layers)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of scratch memory, for all layers together; resident as far as forwards have used it."""
        return self._workspace.nbytes

    @property
    def gpu_scratch_bytes(self) -> int:
        """Bytes of scratch in GPU memory."""
        return self._workspace.device_bytes

    @property
    def is_capturable(self) -> bool:
        """Whether a forward of few tokens on a GPU can be captured in a CUDA graph."""
        on_gpu = self._workspace.device.torch_device.type == "cuda"
        return on_gpu and self._backend.is_capturable and all(layer.is_capturable for layer in self._layers)

    @property
    def expert_traffic(self) -> ExpertTraffic:
        """Of the routed experts of all layers since loading."""
        return sum((layer.traffic for layer in self._layers), ExpertTraffic())

    @property
    def hybrid_traffic(self) -> HybridTraffic | None:
        """None where the CPU and a GPU share no experts."""
        return None if self._hybrid is None else self._hybrid.traffic()

    @property
    def expert_faults(self) -> int:
        """Ids of experts that the CPU was handed and does not have, since loading: each is a wrong sum."""
        return 0 if self._hybrid is None else self._hybrid.faults

    def forward(self, batch: ForwardBatch, kv: KVPool, still_wanted: StillWanted | None = None) -> torch.Tensor:
        """Runs T tokens; float32 logits `[L, vocab]` of `batch.logit_rows`, a tensor of its own on the device.

        Rows that `still_wanted`, asked between layers, leaves out are not computed further and have no logits. On the
        CPU a row's logits do not depend on the other rows, bit for bit.
        """
        is_step = batch.token_ids.shape[0] <= Lane.STEP.tokens(self._workspace.max_tokens)
        assert is_step or not self._stopped, "a long forward between the layers of another"
        self.wake()
        layers = self._layers_of(batch, kv, still_wanted, Lane.STEP if is_step else Lane.PASS)
        while True:
            try:
                next(layers)
            except StopIteration as end:
                logits: torch.Tensor = end.value
                return logits

    def layers(
        self, batch: ForwardBatch, kv: KVPool, still_wanted: StillWanted | None = None
    ) -> Generator[float, None, torch.Tensor]:
        """`forward`, stopping after every layer but the last with the share of layers that is done.

        There a step of few tokens may go through `forward`, and one other pass, of as many as `Lane.SHORT` holds, may
        be begun, which ends or is given up before this one goes on. What they compute and what comes out here are the
        same bits as one after the other. On a GPU the layer is done by then. Given up by letting go of it.
        """
        assert self._stopped < 2, "a pass between the layers of one that is between those of another"
        lane = Lane.SHORT if self._stopped else Lane.PASS
        suspended = None
        if self._hybrid is not None and lane is Lane.SHORT:
            suspended = self._hybrid.suspend(batch.token_ids.shape[0])
        layers = self._layers_of(batch, kv, still_wanted, lane)
        device = self._workspace.device.torch_device
        try:
            while True:
                try:
                    share = next(layers)
                except StopIteration as end:
                    logits: torch.Tensor = end.value
                    return logits
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
                self._stopped += 1
                try:
                    yield share
                finally:
                    self._stopped -= 1
        finally:
            if self._hybrid is not None and suspended is not None:
                self._hybrid.resume(suspended)

    def _layers_of(
        self, batch: ForwardBatch, kv: KVPool, still_wanted: StillWanted | None, lane: Lane
    ) -> Generator[float, None, torch.Tensor]:
        rows = self._rows_of(batch.token_ids.shape[0], lane)
        # A decode step: no layer leaves rows out, and nobody waits long for its end.
        singles = batch.token_ids.shape[0] == batch.num_single == batch.logit_rows.shape[0]
        defers = self._may_defer and lane is Lane.STEP and singles
        if defers:
            still_wanted = None
        step = self._backend.begin(batch, kv)
        self._embedding.forward(batch.token_ids, rows.residual)
        delta: torch.Tensor | None = None
        for done, layer in enumerate(self._layers[:-1], start=1):
            layer.attend(rows, delta, batch.positions, step)
            layer.feed_forward(rows, defers=defers)
            yield done / len(self._layers)
            wanted = None if still_wanted is None else still_wanted()
            if wanted is not None:
                if not wanted.numel():
                    return self._logits(0)
                wanted = wanted.to(rows.residual.device)
                batch = batch.select(wanted)
                rows = self._narrow(rows, wanted, lane)
                step = self._backend.begin(batch, kv)
            delta = rows.delta
        self._layers[-1].attend(rows, delta, batch.positions, step)
        return self._finish(rows, batch.logit_rows, lane, defers=defers)

    def wake(self) -> None:
        """Before work is queued on the device that the CPU's experts are a part of: they may be asleep."""
        if self._hybrid is not None:
            self._hybrid.wake()

    def recover(self) -> None:
        """After a forward that raised, once the device has nothing to do: the next one begins from a clean state."""
        if self._hybrid is not None:
            self._hybrid.settle()

    def _finish(self, rows: Rows, logit_rows: torch.Tensor, lane: Lane, *, defers: bool) -> torch.Tensor:
        """After the attention of the last layer, which fills the cache, only rows whose logits are wanted go on."""
        count = logit_rows.shape[0]
        logits = self._logits(count)
        if count == 0:
            return logits
        if count < rows.residual.shape[0]:
            rows = self._narrow(rows, logit_rows, lane)
        self._layers[-1].feed_forward(rows, defers=defers)
        self._norm.add_forward(rows.residual, rows.delta, rows.normed)
        self._head.forward(rows.normed, logits)
        return logits

    def _logits(self, count: int) -> torch.Tensor:
        return torch.empty(count, self._spec.vocab_size, device=self._workspace.device.torch_device)

    def _narrow(self, rows: Rows, kept: torch.Tensor, lane: Lane) -> Rows:
        """Scratch views whose residual and delta are rows `kept` [K], ascending, of those of `rows`."""
        narrowed = self._rows_of(kept.shape[0], lane)
        # Both sets of views begin at the same memory: a row moves towards the front, past none that is still to move.
        for first in range(0, kept.shape[0], NARROW_TOKENS):
            some = kept[first : first + NARROW_TOKENS]
            for source, target in ((rows.residual, narrowed.residual), (rows.delta, narrowed.delta)):
                target[first : first + len(some)] = source.index_select(0, some)
        return narrowed

    def _rows_of(self, tokens: int, lane: Lane) -> Rows:
        """Views are built once per token count: decode steps repeat few of them."""
        rows = self._rows.get((tokens, lane))
        if rows is None:
            assert 0 < tokens <= self._workspace.max_tokens, f"forward of {tokens} tokens"
            rows = self._rows[tokens, lane] = Rows(self._spec, self._workspace, tokens, lane)
            if len(self._rows) > MAX_CACHED_ROWS:
                self._rows.popitem(last=False)
        return rows
