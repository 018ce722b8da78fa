"""Handed cases of model output through a real server, in all three APIs. All cuts: see case_replay.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from case_replay import Replay

CASES = Path(__file__).parents[2].parent / "shared/cases"


@pytest.mark.parametrize("name", ["kimi_stream", "kimi_stream_large"])
def test_cases_in_all_three_apis(tmp_path, name):
    path = CASES / f"{name}.jsonl"
    if not path.exists():
        pytest.skip("the shared cases are not there")
    replay = Replay(tmp_path, [json.loads(line) for line in path.read_text().splitlines()], every=False)
    try:
        differences = list(replay.differences())
    finally:
        replay.process.stop()
    assert not differences, "\n".join(differences[:5])
    assert replay.num_requests >= 18
