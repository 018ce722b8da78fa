from __future__ import annotations

from proa.server.progress import PromptProgress


def test_rate_counts_from_the_first_report():
    now = [100.0]
    progress = PromptProgress({"a": 1000, "b": 1000}, clock=lambda: now[0])
    assert str(progress) == "waiting: prompt of 2000 tokens" and progress.seconds_left is None
    now[0] = 103.0
    progress.advance("a", 600)  # of these, the prefix cache may have had any number
    assert str(progress) == "prefill: 600 of 2000 tokens, ETA unknown"
    now[0] = 105.0
    progress.advance("a", 1000)
    assert progress.seconds_left == 5.0  # 200 a second, 1000 are left
    now[0] = 107.0
    assert str(progress) == "prefill: 1000 of 2000 tokens, ETA 3 s"
    now[0] = 200.0
    assert progress.seconds_left == 0.0
    progress.advance("b", 5000)
    assert str(progress) == "generating"


def test_the_first_token_ends_it():
    progress = PromptProgress({"a": 10}, clock=lambda: 0.0)
    progress.advance("a", 5)
    progress.finish("a")
    assert str(progress) == "generating"
