"""Expert layers run by streams: the same bits as a call, wrong ids counted, every misuse refused."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from tests.kernels.test_experts import HIDDEN, TOP_K, Experts

from proa.native import _C

STREAM = 0


@pytest.fixture(params=["memory", "host_function"])
def worker(request, driver, pool):
    worker = _C.StreamWorker(driver, pool, hand_over=request.param, max_jobs=4)
    yield worker
    worker.close()


def arrays(tokens, rng):
    ids = np.stack([rng.permutation(6)[:TOP_K] for _ in range(tokens)]).astype(np.int32)
    x, weights = rng.standard_normal((tokens, HIDDEN), np.float32), rng.random((tokens, TOP_K), np.float32)
    return x, ids, weights, np.zeros((tokens, HIDDEN), np.float32), np.array([tokens], np.int32)


def test_a_job_is_a_forward_whatever_is_in_its_arrays(worker, pool):
    rng = np.random.default_rng(0)
    layers = [Experts.make("int4_g32", seed).load(pool) for seed in (0, 1)]
    batches = [arrays(tokens, rng) for tokens in (1, 5)]
    jobs = [worker.add(layer, *batch) for layer, batch in zip(layers, batches, strict=True)]
    assert jobs == [0, 1]
    for replay in range(5):
        worker.resume()
        for layer, job, batch in zip(layers, jobs, batches, strict=True):
            batch[0][:] = rng.standard_normal(batch[0].shape)
            batch[3][:] = np.nan
            worker.submit(STREAM, job)
            worker.wait(STREAM, job)
            expected = np.empty_like(batch[3])
            layer.forward(*batch[:3], expected)
            assert np.array_equal(batch[3], expected)
        assert worker.finished == 2 * (replay + 1)
    assert worker.running == -1 and worker.faults == 0
    for layer, job in zip(layers, jobs, strict=True):
        assert 0 < worker.seconds(job) < layer.seconds, "the job's own forwards, not the others"


def test_ids_that_are_not_loaded_are_counted_and_add_nothing(worker, pool):
    rng = np.random.default_rng(1)
    layer = Experts.make("bf16").load(pool)
    x, ids, weights, out, tokens = arrays(2, rng)
    job = worker.add(layer, x, ids, weights, out, tokens)
    ids[0, 0], ids[1, 1], ids[1, 2] = 6, -7, -1
    worker.submit(STREAM, job)
    worker.wait(STREAM, job)
    assert worker.faults == 2
    ids[ids > 5] = -1
    ids[ids < 0] = -1
    expected = np.empty_like(out)
    layer.forward(x, ids, weights, expected)
    assert np.array_equal(out, expected)


def test_a_job_takes_as_many_rows_as_it_is_told(worker, pool):
    rng = np.random.default_rng(4)
    layer = Experts.make("int4_g32").load(pool)
    x, ids, weights, out, tokens = arrays(4, rng)
    worker.add(layer, x, ids, weights, out, tokens)
    expected = np.empty_like(out)
    layer.forward(x, ids, weights, expected)
    for count, faults in ((3, 0), (0, 0), (4, 0), (5, 1), (-1, 2)):
        tokens[0], out[:] = count, 7
        worker.submit(STREAM, 0)
        worker.wait(STREAM, 0)
        valid = count if 0 <= count <= 4 else 0
        assert np.array_equal(out[:valid], expected[:valid]) and (out[valid:] == 7).all()
        assert worker.faults == faults


def test_accumulating_jobs_add_to_what_is_there(worker, pool):
    rng = np.random.default_rng(2)
    layer = Experts.make("bf16").load(pool)
    x, ids, weights, out, tokens = arrays(3, rng)
    out[:] = 1
    worker.submit(STREAM, worker.add(layer, x, ids, weights, out, tokens, accumulate=True))
    worker.wait(STREAM, 0)
    expected = np.ones_like(out)
    layer.forward(x, ids, weights, expected, True)
    assert np.array_equal(out, expected)


def test_misuse_is_refused(worker, driver, pool):
    layer = Experts.make("bf16").load(pool)
    x, ids, weights, out, tokens = arrays(1, np.random.default_rng(3))
    with pytest.raises(TypeError, match="ExpertLayer"):
        worker.add(object(), x, ids, weights, out, tokens)
    with pytest.raises(ValueError, match="x"):
        worker.add(layer, x[:, :8], ids, weights, out, tokens)
    with pytest.raises(ValueError, match="number of a job"):
        worker.submit(STREAM, 0)
    with pytest.raises(ValueError, match="number of a job"):
        worker.seconds(0)
    for _ in range(4):
        worker.add(layer, x, ids, weights, out, tokens)
    with pytest.raises(ValueError, match="max_jobs"):
        worker.add(layer, x, ids, weights, out, tokens)
    with pytest.raises(ValueError, match="hand_over"):
        _C.StreamWorker(driver, pool, hand_over="telepathy")
    with pytest.raises(ValueError, match="max_jobs"):
        _C.StreamWorker(driver, pool, max_jobs=0)


def test_drivers_that_are_missing_or_refuse(driver):
    with pytest.raises(_C.CudaMissing, match="nowhere"):
        _C.CudaDriver("libnowhere.so.1")
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    driver.pin([(start, mmap.PAGESIZE), (start + mmap.PAGESIZE, mmap.PAGESIZE)], num_threads=2)
    assert driver.device_address(start) == start
    with pytest.raises(_C.CudaError, match="ALREADY_REGISTERED"):
        driver.pin([(start, 1)])
    driver.unpin(start)
    driver.unpin(start + mmap.PAGESIZE)
    with pytest.raises(_C.CudaError, match="NOT_REGISTERED"):
        driver.unpin(start)
    with pytest.raises(ValueError, match="num_threads"):
        driver.pin([], num_threads=0)


def test_copies_go_both_ways(driver):
    host, device = np.arange(16, dtype=np.uint8), np.zeros(16, np.uint8)
    driver.copy_to_device(STREAM, device.ctypes.data, host.ctypes.data, 16)
    assert np.array_equal(device, host)
    back = np.zeros(8, np.uint8)
    driver.copy_to_host(STREAM, back.ctypes.data, device.ctypes.data + 4, 8)
    assert np.array_equal(back, host[4:12])
