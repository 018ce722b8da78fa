"""Speed of the GPU kernels beside what the same run measures of the GPU: copy bandwidth and torch's dense bf16 product.

    python benchmarks/kernels/gpu.py [PART ...] [--jsonl FILE] [--all] [--reps N]

Parts: mla, gqa, prefill, linear, layer, decode, experts. Kimi K2's dimensions, random values. Times are medians over
calls that walk over more data than the L2 holds. --all tries every tile size listed here, not only the chosen ones.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from proa.kernels import decode_attention, experts, linear, prefill_attention
from proa.kernels.code_rows import CodeTiles
from proa.kernels.heads import heads_linear
from proa.kernels.row_products import RowTiles
from proa.kernels.weight_tiles import kind_of, panel_bytes

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 7168, 2048, 384, 8
PAGE = 128  # positions of a block of the KV cache
COLD = 300 << 20  # bytes that calls walk over


@dataclass
class Limits:
    copy_gb_per_s: float
    dense_tflop_per_s: float


@dataclass
class Run:
    reps: int
    all: bool
    limits: Limits
    lines: list[dict[str, object]]

    def time(self, calls: list[Callable[[], None]]) -> float:
        """Median seconds of one of `calls`, which are taken in turn; several a measurement."""
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        samples = []
        for _ in range(self.reps):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for call in calls:
                call()
            stop.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(stop) / 1e3 / len(calls))
        return statistics.median(samples)

    def graph_time(self, calls: list[Callable[[], None]]) -> float:
        """The same from a captured graph, without the gaps between launches."""
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return self.time([graph.replay]) / len(calls)

    def report(self, case: str, config: object, seconds: float, *, gb: float = 0.0, tflop: float = 0.0) -> None:
        share = gb / seconds / self.limits.copy_gb_per_s if gb else tflop / seconds / self.limits.dense_tflop_per_s
        rate = gb / seconds if gb else tflop / seconds
        unit = "GB/s" if gb else "TFLOP/s"
        name = ",".join(str(v) for v in vars_of(config))
        print(f"{case:34s} {name:24s} {seconds * 1e6:9.1f} us {rate:7.0f} {unit:8s} {share:5.2f}", flush=True)
        self.lines.append(
            {"case": case, "tiles": name, "us": round(seconds * 1e6, 1), unit: round(rate, 1), "share": round(share, 3)}
        )

    def candidates(self, others: list[object]) -> Iterator[object]:
        """None, for the chosen tiles, and `others`."""
        yield None
        if self.all:
            yield from others


def vars_of(config: object) -> list[object]:
    if isinstance(config, tuple):
        return [value for part in config for value in vars_of(part)]
    fields = getattr(config, "__dataclass_fields__", None)
    return ["chosen"] if fields is None else [getattr(config, name) for name in fields]


def measure_limits(run: Run) -> None:
    source = torch.ones(1 << 30, dtype=torch.int32, device=DEVICE)
    target = torch.empty_like(source)
    run.limits.copy_gb_per_s = 2 * source.nbytes / 1e9 / run.time([lambda: target.copy_(source)])
    x, w = (torch.randn(8192, 8192, device=DEVICE).to(BF16) for _ in range(2))
    run.limits.dense_tflop_per_s = 2 * 8192**3 / 1e12 / run.time([lambda: x @ w] * 4)
    print(
        f"copy {run.limits.copy_gb_per_s:.0f} GB/s, dense bf16 {run.limits.dense_tflop_per_s:.0f} TFLOP/s", flush=True
    )


def paged(tokens: int, context: int, kv_heads: int, dims: tuple[int, int], heads: int, *, latent: bool) -> list[object]:
    """Arguments of the attention kernels for one sequence a token, or of one sequence of `tokens` last tokens."""
    sequences = tokens if tokens <= 16 else 1
    blocks = context // PAGE
    tables = torch.randperm(sequences * blocks, device=DEVICE).int().view(sequences, blocks)
    key = torch.randn(sequences * context, kv_heads, dims[0], device=DEVICE).to(BF16)
    value = (
        key[:, :, : dims[1]] if latent else torch.randn(sequences * context, kv_heads, dims[1], device=DEVICE).to(BF16)
    )
    if sequences == 1:
        ids, positions = torch.zeros(tokens), torch.arange(context - tokens, context)
    else:
        ids, positions = torch.arange(tokens), torch.full((tokens,), context - 1)
    q = torch.randn(tokens, heads, dims[0], device=DEVICE)
    out = torch.empty(tokens, heads, dims[1], device=DEVICE)
    return [q, key, value, tables, PAGE, ids.int().to(DEVICE), positions.int().to(DEVICE), 0.07, out]


def bench_decode_attention(run: Run, name: str, heads: int, kv_heads: int, dims: tuple[int, int], latent: bool) -> None:
    tiles = decode_attention.DecodeTiles
    for tokens, context in ((4, 65536), (1, 65536), (16, 8192)):
        arguments = paged(tokens, context, kv_heads, dims, heads, latent=latent)
        scratch = decode_attention.DecodeScratch(tokens, heads, dims[1], DEVICE)
        gb = tokens * context * kv_heads * (dims[0] + (0 if latent else dims[1])) * 2 / 1e9
        others = [tiles(64, 8, 3), tiles(32, 8, 4)] if latent else [tiles(64, 4, 3), tiles(128, 4, 4), tiles(128, 8, 3)]
        for config in run.candidates(others if tokens == 4 else []):
            try:
                call = lambda: decode_attention.paged_decode(*arguments, scratch, tiles=config)
                seconds = run.graph_time([call])
            except Exception as error:
                print(f"{name} {vars_of(config)}: {str(error)[:90]}")
                continue
            run.report(f"{name} decode {tokens} x {context}", config, seconds, gb=gb)


def bench_prefill(run: Run) -> None:
    tiles = prefill_attention.PrefillTiles
    cases = {
        "mla 64 x 576": (64, 1, (576, 512), True, [tiles(64, 64, 8, 3), tiles(64, 32, 8, 4)]),
        "mha 64 x 192": (
            64,
            64,
            (192, 128),
            False,
            [tiles(128, 64, 8, 2), tiles(128, 128, 8, 2), tiles(128, 64, 8, 3)],
        ),
        "gqa 32/4 x 128": (32, 4, (128, 128), False, [tiles(128, 64, 8, 2), tiles(128, 128, 8, 3)]),
    }
    tokens, context = 2048, 16384
    for name, (heads, kv_heads, dims, latent, others) in cases.items():
        arguments = paged(tokens, context, kv_heads, dims, heads, latent=latent)
        pairs = sum(range(context - tokens + 1, context + 1))
        tflop = 2 * heads * sum(dims) * pairs / 1e12
        for config in run.candidates(others):
            try:
                seconds = run.time([lambda: prefill_attention.paged_prefill(*arguments, tiles=config)])
            except Exception as error:
                print(f"{name} {vars_of(config)}: {str(error)[:90]}")
                continue
            run.report(f"{name} prefill {tokens} of {context}", config, seconds, tflop=tflop)


def random_rows(weight_format: str, out_features: int, in_features: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    def codes(columns: int) -> torch.Tensor:
        return torch.randint(0, 120, (out_features, columns), device=DEVICE, dtype=torch.uint8)

    def scales(rows: int, columns: int) -> torch.Tensor:
        return torch.rand(rows, columns, device=DEVICE) + 0.5

    match weight_format:
        case "bf16":
            return torch.randn(out_features, in_features, device=DEVICE).to(BF16), None
        case "fp8_block128":
            return codes(in_features), scales(-(-out_features // 128), -(-in_features // 128))
        case "int4_g32":
            return codes(in_features // 2), scales(out_features, in_features // 32).to(BF16)
        case _:
            return codes(in_features // 2), torch.full((out_features, in_features // 32), 120, device=DEVICE).to(
                torch.uint8
            )


def bench_linear(run: Run) -> None:
    """`--all`: other tiles of Hopper's kernel; plain Triton on tensor cores, as other GPUs multiply some tokens."""
    plain = [linear.LinearTiles(16, 64, 128, 4, 4)]
    nibbles = [linear.SkinnyTiles(*size) for size in ((32, 4, 4), (16, 8, 4), (16, 4, 4))]
    others = [linear.SkinnyTiles(*size) for size in ((32, 8, 2), (16, 8, 2), (32, 4, 4))]
    for weight_format in ("bf16", "int4_g32", "fp8_block128", "mxfp4"):
        for out_features, in_features in ((2112, 7168), (7168, 8192)):
            weights = [random_rows(weight_format, out_features, in_features)]
            size = sum(t.nbytes for t in weights[0] if t is not None)
            weights += [random_rows(weight_format, out_features, in_features) for _ in range(min(15, COLD // size))]
            for tokens in (1, 4, 8, 16):
                x = torch.randn(tokens, in_features, device=DEVICE)
                out = torch.empty(tokens, out_features, device=DEVICE)
                skinny = {"bf16": [], "fp8_block128": others}.get(weight_format, nibbles)
                for config in run.candidates(skinny * (tokens > 1) + plain * (tokens == 16)):
                    calls = [
                        lambda d=d, s=s, c=config: linear.linear(x, d, s, out, weight_format=weight_format, tiles=c)
                        for d, s in weights
                    ]
                    run.report(
                        f"{weight_format} {out_features}x{in_features} T={tokens}",
                        config,
                        run.graph_time(calls),
                        gb=size / 1e9,
                    )


def bench_layer(run: Run) -> None:
    """All products of a layer of Kimi K2 but attention's and those of routed experts, one after the other."""
    # Latents of queries and keys, queries, output, router, shared expert's gate and up, down.
    shapes = ((2112, 7168), (12288, 1536), (7168, 8192), (384, 7168), (4096, 7168), (7168, 2048))
    heads, latent, head = 64, 512, 128
    for weight_format in ("bf16", "fp8_block128"):
        layers = [
            (
                [random_rows("bf16" if rows == 384 else weight_format, rows, columns) for rows, columns in shapes],
                [torch.randn(heads, *s, device=DEVICE).to(BF16) for s in ((latent, head), (head, latent))],
            )
            for _ in range(3)
        ]
        parts = [t for weights, absorbed in layers for t in (*absorbed, *(t for pair in weights for t in pair))]
        size = sum(t.nbytes for t in parts if t is not None) / len(layers)
        for tokens in (1, 4, 16):
            x = [torch.randn(tokens, columns, device=DEVICE) for _, columns in shapes]
            out = [torch.empty(tokens, rows, device=DEVICE) for rows, _ in shapes]
            x_heads = [torch.randn(tokens, heads, columns, device=DEVICE) for columns in (head, latent)]

            def layer(number: int) -> None:
                weights, absorbed = layers[number]
                for (rows, _), (data, scales), a, b in zip(shapes, weights, x, out, strict=True):
                    name = "bf16" if rows == 384 else weight_format
                    linear.linear(a, data, scales, b, weight_format=name)
                for weight, a, b in zip(absorbed, x_heads, reversed(x_heads), strict=True):
                    heads_linear(a, weight, b)

            seconds = run.graph_time([lambda n=n: layer(n) for n in range(len(layers))])
            run.report(f"{weight_format} layer of K2 T={tokens}", None, seconds, gb=size / 1e9)


def random_experts(weight_format: str, num_experts: int) -> tuple[experts.ExpertFormat, torch.Tensor, torch.Tensor]:
    """Random codes with sane scales."""
    fmt = experts.ExpertFormat(HIDDEN, INTERMEDIATE, weight_format, weight_format)
    gate, down = experts.expert_bytes(fmt)
    size = 2 * gate + down
    arena = torch.randint(-(2**31), 2**31 - 1, (num_experts * size // 4,), device=DEVICE, dtype=torch.int32).view(
        torch.uint8
    )
    kind = kind_of(weight_format)
    if kind.groups:
        block = kind.groups * (256 + 16 * kind.scale_bytes)
        scales = arena.view(-1, block)[:, kind.groups * 256 :]
        if kind.scale_bytes == 1:
            scales.fill_(115)
        else:
            values = (torch.rand(scales.shape[0], scales.shape[1] // 2, device=DEVICE) + 0.5) * 0.003
            scales.copy_(values.to(BF16).view(torch.uint8))
    elif weight_format == "bf16":
        arena.view(BF16).normal_(std=0.01)
    else:
        arena &= 0xBB  # no NaN, and not the largest
        for e in range(num_experts):
            for at, length, columns in ((0, 2 * gate, HIDDEN), (2 * gate, down, INTERMEDIATE)):
                panels = arena[e * size + at :][:length].view(-1, panel_bytes(weight_format, columns))
                panels[:, columns * 16 : columns * 16 + 4 * (columns // 128)].view(torch.float32).fill_(0.001)
    begins = torch.arange(num_experts, device=DEVICE)[:, None] * size
    return fmt, arena, begins + torch.tensor([0, gate, 2 * gate], device=DEVICE)


def routed(tokens: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.rand(tokens, num_experts, device=DEVICE)
    return scores.topk(TOP_K).indices.int(), torch.rand(tokens, TOP_K, device=DEVICE)


def bench_decode_experts(run: Run) -> None:
    """`--all`: other tiles of Hopper's kernel, and what other GPUs run."""
    rows = [(RowTiles(32, 256, 2), RowTiles(16, 256, 2)), (RowTiles(32, 512, 2), RowTiles(16, 512, 2))]
    sizes = (((4, 2), (4, 2)), ((4, 4), (4, 2)), ((4, 4), (4, 4)), ((8, 2), (4, 2)))
    codes = [(CodeTiles(*first), CodeTiles(*second)) for first, second in sizes]
    for weight_format in ("int4_g32", "fp8_block128", "bf16", "mxfp4"):
        num_experts = NUM_EXPERTS if weight_format == "int4_g32" else 64
        fmt, arena, table = random_experts(weight_format, num_experts)
        size = sum(experts.expert_bytes(fmt)) + experts.expert_bytes(fmt)[0]
        for tokens in (1, 4, 16) if weight_format == "int4_g32" else (1, 4):
            x, out = (torch.randn(tokens, HIDDEN, device=DEVICE) for _ in range(2))
            scratch = experts.ExpertScratch(tokens, TOP_K, num_experts, fmt, DEVICE)
            batches = [routed(tokens, num_experts) for _ in range(4)]
            hit = statistics.mean(len(ids.unique()) for ids, _ in batches)
            others = (codes if weight_format in ("int4_g32", "fp8_block128") else []) + rows[: 2 if tokens == 1 else 1]
            for config in run.candidates(others):
                calls = [
                    lambda i=i, w=w, c=config: experts.grouped_experts(
                        x, i, w, arena, table, fmt, out, scratch, tiles=c
                    )
                    for i, w in batches
                ]
                run.report(f"experts {weight_format} T={tokens}", config, run.graph_time(calls), gb=hit * size / 1e9)


def bench_experts(run: Run) -> None:
    tiles = experts.ExpertTiles
    configs = [
        tiles(128, 128, 64, 4, 4),
        tiles(128, 128, 64, 8, 3),
        tiles(128, 256, 64, 8, 3),
        tiles(128, 64, 64, 4, 3),
        tiles(64, 128, 64, 4, 3),
        tiles(64, 256, 64, 8, 3),
    ]
    cases = (
        ("int4_g32", 16384, NUM_EXPERTS),
        ("int4_g32", 2048, NUM_EXPERTS),
        ("fp8_block128", 4096, 96),
        ("bf16", 4096, 96),
        ("mxfp4", 4096, 96),
    )
    for weight_format, tokens, num_experts in cases:
        fmt, arena, table = random_experts(weight_format, num_experts)
        x = torch.randn(tokens, HIDDEN, device=DEVICE).to(BF16)
        out = torch.empty(tokens, HIDDEN, device=DEVICE)
        scratch = experts.ExpertScratch(tokens, TOP_K, num_experts, fmt, DEVICE)
        ids, weights = routed(tokens, num_experts)
        tflop = 2 * tokens * TOP_K * 3 * HIDDEN * INTERMEDIATE / 1e12
        for config in run.candidates(configs if tokens == 16384 else configs[3:] if tokens == 2048 else configs[2:3]):
            call = lambda: experts.grouped_experts(
                x, ids, weights, arena, table, fmt, out, scratch, tiles=config and (config, config)
            )
            try:
                seconds = run.time([call])
            except Exception as error:
                print(f"{weight_format} {vars_of(config)}: {str(error)[:90]}")
                continue
            run.report(f"experts {weight_format} T={tokens} of {num_experts}", config, seconds, tflop=tflop)


PARTS: dict[str, Callable[[Run], None]] = {
    "mla": lambda run: bench_decode_attention(run, "mla 64 x 576", 64, 1, (576, 512), True),
    "gqa": lambda run: bench_decode_attention(run, "gqa 32/4 x 128", 32, 4, (128, 128), False),
    "prefill": bench_prefill,
    "linear": bench_linear,
    "layer": bench_layer,
    "decode": bench_decode_experts,
    "experts": bench_experts,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--jsonl", type=Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--reps", type=int, default=11)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    run = Run(arguments.reps, arguments.all, Limits(1.0, 1.0), [])
    measure_limits(run)
    for part in arguments.parts:
        try:
            PARTS[part](run)
        except Exception as error:
            print(f"{part} failed: {error!r}"[:600], flush=True)
        torch.cuda.empty_cache()
        if arguments.jsonl:
            write_lines(run, arguments.jsonl)


def write_lines(run: Run, path: Path) -> None:
    """Appends what was measured since the last call."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    machine = {
        "machine": f"{properties.name}, {properties.total_memory >> 30} GiB",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "copy_gb_per_s": round(run.limits.copy_gb_per_s),
        "dense_tflop_per_s": round(run.limits.dense_tflop_per_s),
    }
    with path.open("a") as file:
        file.writelines(json.dumps({**machine, **line}) + "\n" for line in run.lines)
    run.lines.clear()


if __name__ == "__main__":
    main()
