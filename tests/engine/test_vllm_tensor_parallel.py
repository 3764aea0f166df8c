"""An engine whose workers share the model: the same tokens, acceptance and refits as one worker, and no worker left.

The policy has one key-value head, which both workers hold; everything else is cut.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from lightning_spec.errors import ConfigError, EngineError
from lightning_spec.rollout.engine import EngineFiles, Request, Sampling
from lightning_spec.rollout.process import shared_files
from lightning_spec.rollout.speculation import Speculation
from lightning_spec.rollout.vllm import VLLMEngine
from lightning_spec.rollout.weight_transfer import checksum

PROMPTS = [tuple(range(3 + i, 13 + 2 * i)) for i in range(4)]
REQUESTS = [Request(prompt) for prompt in PROMPTS]
GREEDY = Sampling(temperature=0, max_tokens=32)


@pytest.fixture(scope="module")
def shared(start_engine: Any, eagle: Any) -> VLLMEngine:
    """Two workers, started from the files of the engine with one."""
    options = {"speculation": Speculation("eagle3", 3), "tensor_parallel_size": 2, "threads": 2}
    return start_engine(eagle.folder / "policy", eagle.folder / "draft", **options)


def served(engine: VLLMEngine) -> tuple[list[tuple[int, ...]], Any]:
    return [completion.tokens for completion in engine.generate(REQUESTS, GREEDY)], engine.last.spec


def test_two_workers_generate_accept_and_take_new_weights_as_one_does(
    shared: VLLMEngine, eagle: Any, tiny: Any
) -> None:
    one: VLLMEngine = eagle.engine
    try:
        for version, (model, draft) in enumerate(weights(eagle, tiny)):
            if version:
                policy = dict(tiny.policy_tensors(model))
                report = shared.refit(iter(policy.items()), iter(draft.items()), version, verify=True)
                assert (report.version, report.verified) == (version, len(policy) + len(draft))
            one.refit(tiny.policy_tensors(model), iter(draft.items()), version)
            tokens, spec = served(shared)
            assert tokens == [tiny.greedy(model, prompt, 32) for prompt in PROMPTS]
            assert (tokens, spec) == served(one)
            assert 0 < spec.accepted < spec.drafted
        check_sums(shared, policy)
    finally:
        one.refit(tiny.policy_tensors(eagle.model), iter(eagle.draft.items()), 0)


def weights(eagle: Any, tiny: Any) -> list[tuple[Any, dict[str, Tensor]]]:
    other = copy.deepcopy(eagle.model)
    torch.manual_seed(31)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 0.5 * torch.randn_like(parameter))
    return [(eagle.model, eagle.draft), (other, tiny.helpful_draft(other, 7))]


def check_sums(engine: VLLMEngine, policy: dict[str, Tensor]) -> None:
    """Each worker holds its part, and a part that were wrong would be noticed."""
    query, key = (f"model.layers.3.self_attn.{name}_proj.weight" for name in "qk")
    shapes = {name: list(policy[name].shape) for name in (query, key)}
    first, second = engine._request("checksums", "policy", shapes)
    assert first[query][0]
    assert first[query] != second[query]
    sums = {name: checksum(policy[name]) for name in shapes}
    assert engine._verify("policy", sums) == 2
    with pytest.raises(EngineError, match=query):
        engine._verify("policy", sums | {query: sums[query] + 1})


def test_a_worker_that_is_killed_ends_the_engine_and_leaves_no_process_and_no_shared_memory(shared: VLLMEngine) -> None:
    assert shared.pid is not None
    shared._torn.clear()
    family = psutil.Process(shared.pid).children(recursive=True)
    files = shared_files(shared.pid)
    assert any(file.match("psm_*") for file in files), "vLLM's workers talk through shared memory"
    assert any(file.match("vllm_dist_*-cpushm_*") for file in files), "and exchange tensors through it"
    workers = [process for process in family if any("Worker" in word for word in process.cmdline() or [process.name()])]
    assert len(workers) == 2
    os.kill(workers[1].pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineError):
        [shared.generate(REQUESTS, Sampling(max_tokens=200)) for _ in range(100)]
    assert time.monotonic() - began < 60
    while shared.running and time.monotonic() - began < 60:
        time.sleep(0.1)  # its process looks after its children four times a second
    assert not shared.running
    psutil.wait_procs(family, timeout=10)
    # What has ended and waits for init to notice is no process any more.
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    # A process that is killed leaves the page with which Intel's OpenMP registered it; queues and semaphores are gone,
    # at once: the engine removes them itself, as whatever of Python's would is killed with the workers.
    assert not [file for file in files if file.exists() and not file.name.startswith("__KMP")]


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("num_attention_heads", 3, "query heads"),
        ("num_key_value_heads", 3, "key-value"),
        ("intermediate_size", 7, "MLP columns"),
        ("moe_intermediate_size", 7, "columns of an expert"),
    ],
)
def test_a_policy_that_does_not_split_over_the_workers_is_refused_before_anything_starts(
    eagle: Any, tmp_path: Path, key: str, value: int, needed: str
) -> None:
    config = json.loads((eagle.folder / "policy" / "config.json").read_text())
    config |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = VLLMEngine(tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=needed) as caught:
        engine.start(EngineFiles(tmp_path))
    assert "rollout.engine.tensor_parallel_size" in str(caught.value)
