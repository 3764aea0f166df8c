"""The parts of an engine that need no vLLM: settings, checks, the child process, buckets of weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from lightning_spec.batch import SpecStats
from lightning_spec.errors import ConfigError, EngineError, EngineTimeoutError
from lightning_spec.rollout import process, weight_transfer
from lightning_spec.rollout.engine import (
    EngineFiles,
    Generation,
    Request,
    Sampling,
    TensorSpec,
    checked,
    checkpoint_specs,
)
from lightning_spec.rollout.process import ChildProcess, cleaned_environment
from lightning_spec.rollout.speculation import Speculation
from lightning_spec.rollout.vllm import VLLMEngine
from lightning_spec.rollout.weight_transfer import checksum, read_bucket, stream, sweep

POLICY = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 8, "vocab_size": 128}
POLICY |= {"max_position_embeddings": 512}
DRAFT = {"hidden_size": 64, "num_attention_heads": 2, "vocab_size": 128, "max_position_embeddings": 512}


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 1e-3}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_bad_sampling_is_refused_with_its_key(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        Sampling(**settings)
    assert error.value.key == f"rollout.sampling.{key}"


def test_a_request_s_own_seed_wins_and_the_others_differ_by_index() -> None:
    sampling = Sampling(seed=10)
    assert sampling.seed_of(Request((1,), seed=3), 5) == 3
    assert [sampling.seed_of(Request((1,)), i) for i in range(3)] == [10, 11, 12]
    assert Sampling().seed_of(Request((1,)), 4) is None


def test_figures_of_two_calls_add_up() -> None:
    first = Generation(30, 0.5, SpecStats(4, 12, 6, (4, 2)))
    both = first + Generation(10, 1.5, SpecStats(1, 3, 3, (1, 1, 1)))
    assert (both.tokens, both.seconds, both.tokens_per_second) == (40, 2.0, 20.0)
    assert both.spec == SpecStats(5, 15, 9, (5, 3, 1))
    assert Generation() + first == first


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"method": "eagle4"}, "method"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"by_batch_size": []}, "by_batch_size"),
        ({"by_batch_size": [[1, 4]]}, "by_batch_size"),
        ({"by_batch_size": [[2, 4, 1]]}, "by_batch_size"),
        ({"by_batch_size": [[1, 4, 2], [6, 8, 1]]}, "by_batch_size"),
        ({"by_batch_size": [[1, 4, 9]]}, "by_batch_size"),
        ({"draft_sample_method": "beam"}, "draft_sample_method"),
        ({"prompt_lookup_max": 3}, "prompt_lookup_max"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min"),
        ({"extra": {"model": "x"}}, "extra"),
    ],
)
def test_bad_speculation_is_refused_with_its_key(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        Speculation(**settings)
    assert error.value.key == f"rollout.engine.speculation.{key}"


def test_speculation_becomes_vllm_s_dictionary() -> None:
    assert Speculation("none").to_vllm(None, 8) is None
    eagle = Speculation("eagle3", 3, by_batch_size=[[1, 4, 3], [5, 8, 0]], extra={"max_model_len": 99})
    assert eagle.to_vllm("/draft", 64) == {
        "method": "eagle3",
        "model": "/draft",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [(1, 4, 3), (5, 64, 0)],
        "max_model_len": 99,
    }
    adaptive = Speculation("eagle3", 3, adaptive=True).to_vllm("/draft", max_num_seqs=64)
    assert adaptive is not None
    assert adaptive["num_speculative_tokens_per_batch_size"] == [(1, 64, 3)], "the table that it rewrites"
    assert [Speculation(method).needs_draft for method in ("none", "ngram", "suffix", "eagle3")] == [False] * 3 + [True]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"dtype": "fp8"}, "dtype"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"engine_args": {"max_model_len": 3}}, "engine_args"),
    ],
)
def test_bad_engine_settings_are_refused_with_their_key(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        VLLMEngine(**settings)
    assert error.value.key == f"rollout.engine.{key}"


# --- checkpoints against each other -----------------------------------------------------------------------------------


def folder(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({"norm.weight": torch.ones(64)}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("policy", "draft", "what"),
    [
        ({}, None, "needs a draft"),
        ({}, {"vocab_size": 127}, "vocabulary is not the policy's"),
        ({}, {"max_position_embeddings": 100}, "fewer positions"),
        ({}, {"hidden_size": 128, "num_attention_heads": 4}, "another hidden size"),
        ({"num_hidden_layers": 5}, {}, "collide"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [1, 1, 3]}, "collide"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "do not exist"),
        ({"max_position_embeddings": 64}, {}, "beyond the policy's positions"),
        ({"num_attention_heads": 4}, {}, "no kernel for this head size"),
        ({}, {"num_attention_heads": 4}, "no kernel for this head size"),
    ],
)
def test_files_that_do_not_fit_are_refused_before_anything_starts(
    policy: dict[str, Any], draft: dict[str, Any] | None, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_spec.rollout.vllm.ChildProcess", lambda *_: pytest.fail("a process was started"))
    monkeypatch.setattr("lightning_spec.rollout.vllm._require_vllm", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    files = EngineFiles(
        folder(tmp_path / "policy", {**POLICY, **policy}),
        None if draft is None else folder(tmp_path / "draft", {**DRAFT, **draft}),
    )
    with pytest.raises(ConfigError, match=what):
        VLLMEngine(Speculation("eagle3", 3), max_model_len=256).start(files)


# --- the child process ------------------------------------------------------------------------------------------------

WORKER = """
import os, sys, time
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[sys.argv.index("--fd") + 1]))
print("worker is up", flush=True)
while True:
    name, *rest = connection.recv()
    if name == "echo": connection.send(("ok", rest))
    if name == "environment": connection.send(("ok", dict(os.environ)))
    if name == "fail": connection.send(("error", "Traceback: the engine's own words"))
    if name == "crash": print("about to crash", flush=True); os._exit(3)
    if name == "hang": time.sleep(1000)
    if name == "slow":
        for i in (1, 2, 3): connection.send(("progress", i, 3)); time.sleep(0.05)
        connection.send(("ok", None))
    if name == "spawn":
        import subprocess
        connection.send(("ok", subprocess.Popen(["sleep", "1000"]).pid))
    if name == "close": break
"""


@pytest.fixture
def child(tmp_path: Path) -> Any:
    (tmp_path / "fake_engine_worker.py").write_text(WORKER)
    made = ChildProcess("fake_engine_worker", {**os.environ, "PYTHONPATH": str(tmp_path)}, None, "engine")
    yield made
    made.close(grace_s=1.0)


def gone(pid: int, within_s: float = 10.0) -> bool:
    for _ in range(int(within_s / 0.05)):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_an_answer_comes_back_and_progress_on_the_way(child: ChildProcess) -> None:
    assert child.request("echo", 1, "two", timeout_s=30) == [1, "two"]
    seen: list[tuple[int, int]] = []
    child.request("slow", timeout_s=30, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_an_error_of_the_child_is_raised_with_its_words_and_the_child_lives(child: ChildProcess) -> None:
    with pytest.raises(EngineError, match="the engine's own words"):
        child.request("fail", timeout_s=30)
    assert child.request("echo", timeout_s=30) == []


def test_a_child_that_dies_raises_its_status_and_the_end_of_its_output(child: ChildProcess) -> None:
    with pytest.raises(EngineError, match=r"(?s)exited with status 3.*about to crash"):
        child.request("crash", timeout_s=30)
    assert not child.alive
    with pytest.raises(EngineError, match="exited with status 3"):
        child.request("echo", timeout_s=30)


def test_a_child_that_hangs_is_killed_at_the_bound(child: ChildProcess) -> None:
    child.request("echo", timeout_s=30)
    began = time.monotonic()
    with pytest.raises(EngineTimeoutError):
        child.request("hang", timeout_s=0.5)
    assert time.monotonic() - began < 5
    assert gone(child.pid)


def test_a_child_that_does_not_read_is_killed_at_the_bound(child: ChildProcess) -> None:
    child.request("echo", timeout_s=30)
    psutil.Process(child.pid).suspend()
    with pytest.raises(EngineTimeoutError):
        child.request("echo", b"x" * (64 << 20), timeout_s=1.0)
    assert gone(child.pid)


def test_an_interrupted_wait_ends_the_child_rather_than_mixing_answers(child: ChildProcess) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child.request("slow", timeout_s=30, on_progress=interrupt)
    assert gone(child.pid)


def test_closing_ends_grandchildren_too_and_can_be_repeated(child: ChildProcess) -> None:
    grandchild = child.request("spawn", timeout_s=30)
    child.close(grace_s=2.0)
    child.close()
    assert gone(child.pid)
    assert gone(grandchild)
    assert not child.log_file.exists()


def test_the_engine_dies_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\n"
        "from lightning_spec.rollout.process import ChildProcess\n"
        "child = ChildProcess('lightning_spec.rollout.vllm_worker', dict(os.environ), None, 'engine')\n"
        "print(child.pid, flush=True)\ntime.sleep(1000)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    engine = int(trainer.stdout.readline())
    time.sleep(0.5)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    # A child that is still importing notices when it is done.
    assert gone(engine, within_s=60)


def test_the_environment_is_cleaned_of_launcher_and_thread_variables() -> None:
    dirty = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_PORT": "1", "TORCHELASTIC_X": "", "SLURM_JOB_ID": "1"}
    dirty |= {"LOCAL_RANK": "1", "OMP_NUM_THREADS": "9", "KMP_AFFINITY": "x", "VLLM_DP_RANK": "1"}
    assert cleaned_environment({**dirty, "HOME": "/h", "PATH": "/p", "RANKING": "kept?"}).keys() >= {"HOME", "PATH"}
    assert not cleaned_environment(dirty)


def test_cpu_settings_bind_to_the_given_cores_and_preload_only_what_exists() -> None:
    settings = process.cpu_environment([2, 5])
    assert settings["OMP_NUM_THREADS"] == "2"
    assert settings["VLLM_CPU_OMP_THREADS_BIND"] == "2,5"
    assert all(Path(path).is_file() for path in settings.get("LD_PRELOAD", "").split(":") if path)


# --- weights ----------------------------------------------------------------------------------------------------------


def specs(tensors: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(tuple(tensor.shape), weight_transfer.NAMES[tensor.dtype]) for name, tensor in tensors.items()
    }


def model(layers: int = 5) -> dict[str, torch.Tensor]:
    tensors = {"embed.weight": torch.randn(16, 8)}
    for layer in range(layers):
        for name in ("q", "k", "v"):
            tensors[f"layers.{layer}.{name}.weight"] = torch.randn(8, 8)
    return tensors | {"norm.weight": torch.randn(8), "d2t": torch.arange(16)}


def test_buckets_keep_layers_whole_and_give_back_every_tensor_cast(tmp_path: Path) -> None:
    tensors = model()
    dtypes = {name: torch.bfloat16 if t.is_floating_point() else t.dtype for name, t in tensors.items()}
    got: dict[str, torch.Tensor] = {}
    groups: list[set[str]] = []
    paths: list[Path] = []
    for bucket in stream(tensors.items(), specs(tensors), dtypes, limit=600):
        read = read_bucket(bucket.manifest())
        groups.append({weight_transfer.layer_of(name) for name, _ in read})
        got |= dict(read)
        paths.append(bucket.path)
    assert len(groups) > 2
    assert sum(len(group) for group in groups) == len(set().union(*groups))
    # Mappings outlive their files.
    assert not any(path.exists() for path in paths)
    for name, tensor in tensors.items():
        assert torch.equal(got[name], tensor.to(dtypes[name]))


def test_a_consumer_that_stops_leaves_no_file() -> None:
    tensors = model()
    buckets = stream(tensors.items(), specs(tensors), {n: t.dtype for n, t in tensors.items()}, limit=100)
    path = next(buckets).path
    assert path.exists()
    buckets.close()
    assert not path.exists()


def test_files_of_dead_writers_are_swept_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    dead = tmp_path / f"{weight_transfer.PREFIX}1-dead"
    dead.write_bytes(b"x")
    living = weight_transfer.Bucket(tmp_path, 100)
    assert sweep([tmp_path], older_than_s=-1) == 1
    assert not dead.exists()
    assert living.path.exists()
    living.close()


def test_an_incomplete_stream_yields_nothing_when_it_fits_in_one_bucket() -> None:
    tensors = model()
    wanted = specs(tensors)
    fewer = {name: tensor for name, tensor in tensors.items() if name != "norm.weight"}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    with pytest.raises(EngineError, match=r"missing: norm\.weight"):
        next(stream(checked(fewer.items(), wanted, "policy"), wanted, dtypes, limit=1 << 20))


def test_shards_add_up_to_the_checksum_of_the_whole() -> None:
    whole = torch.randn(12, 10)
    rows = checksum(whole[:5], (12, 10)) + checksum(whole[5:], (12, 10), (5, 0))
    columns = checksum(whole[:, :3], (12, 10)) + checksum(whole[:, 3:], (12, 10), (0, 3))
    assert rows % 2**64 == columns % 2**64 == checksum(whole)


def test_a_checksum_sees_a_changed_bit_a_swap_and_a_transposition() -> None:
    whole = torch.randn(8, 8)
    changed = whole.clone()
    changed.view(torch.int32)[3, 4] ^= 1
    swapped = whole.clone()
    swapped[[1, 2]] = whole[[2, 1]]
    sums = {checksum(t) for t in (whole, changed, swapped, whole.t(), whole.to(torch.bfloat16).float())}
    assert len(sums) == 5
    assert checksum(torch.tensor([0.0, 1e-40])) == checksum(torch.tensor([-0.0, 0.0]))


def test_checkpoint_specs_come_from_the_headers(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int64)}, tmp_path / "model.safetensors")
    assert checkpoint_specs(tmp_path) == {"a": TensorSpec((2, 3), "F32"), "b": TensorSpec((4,), "I64")}
    with pytest.raises(ConfigError, match="no weights"):
        checkpoint_specs(tmp_path / "nowhere")
