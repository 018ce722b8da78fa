"""--kt-method is held to what the checkpoint has."""

from __future__ import annotations

import pytest

from proa.convert.encoding import FORMATS
from proa.convert.random_model import DIMENSIONS, write_random_model
from proa.core.errors import ConfigError
from proa.models import check_expert_method
from proa.models.expert_method import METHODS
from proa.weights.checkpoint import Checkpoint

STORED_AS = {
    "f32": {"BF16"},
    "bf16": {"BF16"},
    "f16": {"BF16"},
    "int4_g32": {"RAWINT4", "GPTQ_INT4", "AMXINT4"},
    "int4_g64": {"RAWINT4", "GPTQ_INT4", "AMXINT4"},
    "int4_g128": {"RAWINT4", "GPTQ_INT4", "AMXINT4"},
    "int4_g32_f16": {"RAWINT4", "GPTQ_INT4"},
    "int4_g64_f16": {"RAWINT4", "GPTQ_INT4"},
    "int4_g128_f16": {"RAWINT4", "GPTQ_INT4"},
    "int8_g128": {"AMXINT8"},
    "fp8_block128": {"FP8"},
    "fp8_channel": {"FP8_PERCHANNEL"},
    "mxfp8": {"MXFP8"},
    "mxfp4": {"MXFP4"},
    "nvfp4": {"NVFP4"},
}


@pytest.mark.parametrize("stored", FORMATS)
def test_only_the_names_of_a_format_are_accepted(tmp_path, stored):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    write_random_model(tmp_path / "m", DIMENSIONS["tiny"], tokenizer, format=stored)
    checkpoint = Checkpoint.open(tmp_path / "m")
    for method in METHODS:
        if method in STORED_AS[stored] | {"auto", "LLAMAFILE"}:
            check_expert_method(checkpoint, method)
            continue
        with pytest.raises(ConfigError, match=f"stored as {method}.*got {stored}"):
            check_expert_method(checkpoint, method)
