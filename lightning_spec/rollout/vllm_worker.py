"""The engine's side: a process that holds one vLLM engine and answers the requests of `VLLMEngine`, one at a time."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from lightning_spec.batch import Completion, SpecStats
from lightning_spec.errors import ConfigError
from lightning_spec.rollout.adaptive import AdaptiveConfig
from lightning_spec.rollout.engine import Generation, Request, Sampling
from lightning_spec.rollout.process import shared_files, unlink_all
from lightning_spec.rollout.vllm_adaptive import AdaptiveScheduler
from lightning_spec.rollout.weight_transfer import BACKEND

PR_SET_PDEATHSIG = 1
EXTENSION = "lightning_spec.rollout.vllm_backend.WorkerExtension"


class Server:
    """Holds the engine; each public method is a request of the same name."""

    def __init__(self, progress: Callable[[int, int], None]) -> None:
        self._llm: Any = None
        self._progress = progress
        self._speculative = False
        self._adaptive: AdaptiveScheduler | None = None
        self._asleep = False

    def start(self, settings: dict[str, Any], adaptive: AdaptiveConfig | None = None) -> dict[str, Any]:
        """Build the engine. `settings` are keyword arguments of vllm.LLM."""
        from vllm.platforms import current_platform

        cpu = bool(current_platform.is_cpu())
        in_process = cpu and settings.get("tensor_parallel_size", 1) == 1
        # In one process the engine starts in 7 s instead of 20 s, and there is nobody who could be left behind.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        if not in_process:
            # The death signal would end this process and leave the others; the thread that watches ends all of them.
            _die_with_parent(0)
        if not cpu:
            settings = {"enable_sleep_mode": True, **settings}
        self._speculative = settings.get("speculative_config") is not None
        self._llm = LLM(
            **settings,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            worker_extension_cls=EXTENSION,
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        )
        self._llm.init_weight_transfer_engine({"init_info": {}})
        self._llm.update_weight_version("0")
        if not in_process:
            _watch_children()
        elif adaptive is not None:
            self._adaptive = AdaptiveScheduler(self._llm.llm_engine.engine_core.engine_core.scheduler, adaptive)
        (facts, *_) = self._rpc("spec_facts")
        config = self._llm.llm_engine.vllm_config
        return {
            **facts,
            "cpu": cpu,
            "adaptive": self._adaptive is not None,
            "max_model_len": config.model_config.max_model_len,
            "vocab_size": config.model_config.get_vocab_size(),
        }

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> tuple[list[Completion], Generation]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=request.max_tokens or sampling.max_tokens,
                seed=sampling.seed_of(request, index),
                logprobs=0,
                flat_logprobs=True,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,
                detokenize=False,
            )
            for index, request in enumerate(requests)
        ]
        prompts = [{"prompt_token_ids": list(request.prompt_tokens)} for request in requests]
        before = self.stats()
        began = time.perf_counter()
        try:
            outputs = self._llm.generate(prompts, params, use_tqdm=self._bar)
        except BaseException:
            self._abort_all()
            raise
        seconds = time.perf_counter() - began
        completions = [_completion(output.outputs[0]) for output in outputs]
        tokens = sum(len(completion.tokens) for completion in completions)
        report = None if self._adaptive is None else self._adaptive.report()
        return completions, Generation(tokens, seconds, self.stats() - before, report)

    def _bar(self, iterable: Any = None, total: int = 0, **_: Any) -> Any:
        # vLLM first wraps the adding of requests in a bar, which is quick, then makes one for the generation.
        return _Bar(total, self._progress) if iterable is None else iterable

    def _abort_all(self) -> None:
        engine = self._llm.llm_engine
        with contextlib.suppress(Exception):
            engine.abort_request(list(engine.output_processor.request_states))

    def stats(self) -> SpecStats:
        if not self._speculative:
            return SpecStats()
        counts: dict[str, Any] = {}
        for metric in self._llm.get_metrics():
            name = metric.name.removeprefix("vllm:spec_decode_num_")
            if name == "accepted_tokens_per_pos":
                counts[name] = tuple(metric.values)
            elif name != metric.name:
                counts[name] = counts.get(name, 0) + metric.value
        return SpecStats(
            drafts=counts.get("drafts", 0),
            drafted=counts.get("draft_tokens", 0),
            accepted=counts.get("accepted_tokens", 0),
            per_position=counts.get("accepted_tokens_per_pos", ()),
        )

    def restore_speculation(self, state: dict[str, Any]) -> None:
        if self._adaptive is not None:
            self._adaptive.restore(state)

    def refit_begin(self, target: str, names: list[str]) -> None:
        self._rpc("spec_expect", names)
        if target == "draft":
            self._llm.start_draft_weight_update()
        else:
            self._llm.start_weight_update()

    def refit_bucket(self, manifest: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": manifest})

    def refit_end(self, version: int) -> list[str]:
        self._llm.finish_weight_update(weight_version=str(version))
        (repaired, *_) = self._rpc("spec_repaired")
        return repaired

    def refit_abandon(self, target: str) -> None:
        self._rpc("spec_abandon", target)

    def refit_commit(self, version: int) -> None:
        """Old weights' keys and values must not be read: nothing runs now, so every block can be dropped."""
        self._llm.update_weight_version(str(version))
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be dropped: requests are still running")

    def checksums(self, target: str, shapes: dict[str, list[int]]) -> list[dict[str, tuple[bool, int]]]:
        return self._rpc("spec_checksums", target, shapes)

    def sleep(self) -> bool:
        from vllm.platforms import current_platform

        if current_platform.is_cpu() or self._asleep:
            return False
        self._llm.sleep(level=1)
        self._asleep = True
        return True

    def wake(self) -> bool:
        if not self._asleep:
            return False
        self._llm.wake_up()
        self._llm.reset_prefix_cache()
        self._asleep = False
        return True

    def close(self) -> None:
        if self._llm is not None and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1":
            self._llm.llm_engine.engine_core.shutdown()

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return self._llm.collective_rpc(method, args=args)


class _Bar:
    """What vLLM uses of tqdm, to pass progress on. At most ten reports a second."""

    def __init__(self, total: int, report: Callable[[int, int], None]) -> None:
        self.total, self.n, self.postfix = total, 0, ""
        self._report = report
        self._began = self._last = time.monotonic()

    @property
    def format_dict(self) -> dict[str, float]:
        return {"elapsed": max(time.monotonic() - self._began, 1e-9)}

    def update(self, n: int) -> None:
        self.n += n
        now = time.monotonic()
        if now - self._last >= 0.1 or self.n == self.total:
            self._last = now
            self._report(self.n, self.total)

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        pass


def _completion(output: Any) -> Completion:
    tokens = tuple(output.token_ids)
    logprobs = output.logprobs
    if tuple(logprobs.token_ids[start] for start in logprobs.start_indices) != tokens:
        raise RuntimeError("vLLM's log-probs are not those of its tokens")
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"a request ended with {output.finish_reason!r}")
    spans = output.weight_versions or []
    metrics = output.spec_decode_metrics
    return Completion(
        tokens=tokens,
        logprobs=tuple(logprobs.logprobs[start] for start in logprobs.start_indices),
        finish=output.finish_reason,
        version=int(spans[0].version) if spans else 0,
        spec=None if metrics is None else _spec_stats(metrics),
    )


def _spec_stats(metrics: Any) -> SpecStats:
    counts = metrics.histogram  # [j]: steps that accepted j proposals
    at_least = tuple(sum(counts[position + 1 :]) for position in range(len(counts) - 1))
    return SpecStats(sum(counts), metrics.num_draft_tokens, sum(at_least), at_least)


def _die_with_parent(number: int) -> None:
    """Which signal the kernel sends when the trainer's thread that started this process ends; 0: none."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _end_group() -> None:
    """End this process and all that it started, at once."""
    unlink_all(shared_files(os.getpgrp()))
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _watch_parent(parent: int) -> None:
    """End the whole process group when the trainer is gone, whatever the main thread is doing."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.25)
        _end_group()

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def _watch_children() -> None:
    """vLLM's client waits for ever when its engine core is killed: end with it instead."""
    import psutil

    children = psutil.Process().children(recursive=True)

    def watch() -> None:
        while True:
            time.sleep(0.25)
            for child in children:
                if not child.is_running() or child.status() == psutil.STATUS_ZOMBIE:
                    print(f"vLLM's process {child.pid} has died", file=sys.stderr, flush=True)
                    os._exit(70)

    threading.Thread(target=watch, name="watch-children", daemon=True).start()


def serve(connection: Connection) -> None:
    """Answer requests until the trainer closes; where it goes away, end all that this process started."""
    server = Server(progress=lambda done, total: connection.send(("progress", done, total)))
    while True:
        try:
            name, *arguments = connection.recv()
        except (EOFError, ConnectionError):
            # The trainer is gone without a word; vLLM's other processes would outlive this one.
            _end_group()
        if name == "close":
            server.close()
            return
        try:
            connection.send(("ok", getattr(server, name)(*arguments)))
        except ConfigError as error:
            connection.send(("refused", error))
        except Exception:
            trace = traceback.format_exc()
            print(trace, file=sys.stderr, flush=True)
            connection.send(("error", trace))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--die-with-parent", action="store_true")
    options = parser.parse_args()
    os.set_inheritable(options.fd, False)
    if options.die_with_parent:
        _die_with_parent(signal.SIGKILL)
    _watch_parent(options.parent)
    serve(Connection(options.fd))
    sys.stdout.flush()
    sys.stderr.flush()
    # No interpreter shutdown: vLLM's destructors take seconds and have nothing to save.
    os._exit(0)


if __name__ == "__main__":
    main()
