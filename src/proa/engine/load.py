"""From a checkpoint directory to a model on this machine's CPU."""

from __future__ import annotations

import logging
from functools import partial

from proa.engine.build import LoadedModel, Report, max_forward_tokens
from proa.engine.config import EngineConfig
from proa.engine.kv_plan import plan_kv
from proa.engine.memory import available_bytes
from proa.models import check_expert_method, inspect, load_model, open_experts, packed_bytes
from proa.native.runtime import CpuRuntime
from proa.weights.checkpoint import Checkpoint
from proa.weights.progress import LoadProgress, LoadStatus

__all__ = ["load_checkpoint"]

logger = logging.getLogger("proa.engine")

LOG_INTERVAL_S = 5.0


def load_checkpoint(config: EngineConfig, report: Report) -> LoadedModel:
    """Read the model directory `config.model_path` for the CPU.

    Raises:
        CheckpointError, UnsupportedError, ConfigError: the user has to mend something.
    """
    checkpoint = Checkpoint.open(config.model_path)
    model_info = inspect(checkpoint)
    experts = None if config.expert_path is None else open_experts(checkpoint, config.expert_path)
    check_expert_method(checkpoint, config.expert_method, experts)
    plan_for = partial(
        plan_kv,
        config,
        model_info.layout,
        model_context=model_info.max_position_embeddings,
        # The mapped files are page cache and give way.
        available_bytes=available_bytes(),
    )
    weight_bytes = packed_bytes(checkpoint, experts)
    plan = plan_for(weight_bytes=weight_bytes)
    runtime = CpuRuntime(config.num_threads)

    logged = LoadStatus(0, 0, 0.0)

    def on_progress(status: LoadStatus) -> None:
        nonlocal logged
        report(status.done_bytes, status.total_bytes)
        is_late = status.elapsed_s - logged.elapsed_s >= LOG_INTERVAL_S or status.done_bytes >= status.total_bytes
        if is_late and status.done_bytes > logged.done_bytes:
            logged = status
            logger.info("%s", status)

    model = load_model(
        checkpoint,
        runtime,
        max_tokens=max_forward_tokens(config),
        max_positions=plan.max_model_len,
        progress=LoadProgress(on_progress),
        experts=experts,
        expert_activations=config.expert_activations,
    )
    # The scratch memory of large chunks, known only now, may be more than the reserve.
    plan = plan_for(weight_bytes=weight_bytes + model.workspace_bytes)
    info = {
        **plan.notes,
        "family": model_info.family,
        "num_threads": str(runtime.num_threads),
        "expert_activations": config.expert_activations,
    }
    return LoadedModel(model, model_info.layout, plan, model_info.eos_token_ids, info)
