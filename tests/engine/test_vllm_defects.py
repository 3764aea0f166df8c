"""Each work-round of vllm_cpu.py is needed: with it left out, the defect shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_spec.errors import EngineError
from lightning_spec.rollout import vllm_cpu
from lightning_spec.rollout.engine import Request, Sampling
from lightning_spec.rollout.speculation import Speculation

PROMPT = tuple(range(3, 13))


@pytest.fixture(scope="module")
def defective(start_engine: Any, tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tied policy with EAGLE-3 and both engine-wide work-rounds left out."""
    folder = tmp_path_factory.mktemp("defective")
    model = tiny.make_policy(folder / "policy", 3, tied=True)
    draft = tiny.helpful_draft(model, 1)
    tiny.make_draft(folder / "draft", draft)
    patch = pytest.MonkeyPatch()
    patch.setenv(vllm_cpu.KEEP_VARIABLE, f"{vllm_cpu.EXPAND},{vllm_cpu.EMPTY_TOP_K},{vllm_cpu.TIED_HEAD}")
    engine = start_engine(folder / "policy", folder / "draft", speculation=Speculation("eagle3", 3))
    patch.undo()
    yield engine, model
    engine.close()


def test_without_the_expand_work_round_speculative_sampling_is_wrong(defective: Any, tiny: Any) -> None:
    engine, model = defective
    assert engine.facts["mends"][vllm_cpu.EXPAND] == "kept"
    worst = 0.0
    # The memory is whatever was freed last, which may by chance be right: several temperatures and batch sizes.
    for count, temperature in ((40, 0.5), (7, 1.7), (64, 0.3), (3, 1.2), (21, 1.9)):
        requests = [Request(PROMPT, seed=i) for i in range(count)]
        for completion in engine.generate(requests, Sampling(temperature=temperature, max_tokens=12)):
            exact = tiny.exact_logprobs(model, PROMPT, completion.tokens, temperature)
            chosen = exact.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
            gap = (chosen - torch.tensor(completion.logprobs).double()).abs()
            worst = max(worst, float(gap.nan_to_num(nan=float("inf")).max()))
    # Uninitialised temperatures: log-probs and samples are of some other distribution.
    assert worst > 1e-2


def test_without_the_empty_top_k_work_round_top_k_fails_in_the_engine(defective: Any) -> None:
    engine, _ = defective
    with pytest.raises(EngineError, match=r"max\(\)"):
        engine.generate([Request(PROMPT)], Sampling(top_k=5, max_tokens=16))


def test_without_the_tied_head_work_round_verify_names_the_stale_head(defective: Any, tiny: Any) -> None:
    engine, _ = defective
    other = tiny.make_policy_in_memory(17)
    with pytest.raises(EngineError, match=r"embed_tokens\.weight \(tied head\)"):
        engine.refit(tiny.policy_tensors(other), None, 1, verify=True)


def test_without_the_aliasing_work_round_the_engine_refuses_to_start(
    start_engine: Any, eagle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(vllm_cpu.KEEP_VARIABLE, vllm_cpu.ALIASING)
    with pytest.raises(EngineError, match=r"in place of the draft's own 'lm_head\.weight'"):
        start_engine(eagle.folder / "policy", eagle.folder / "draft", speculation=Speculation("eagle3", 3))


def test_all_work_rounds_are_in_force_or_not_needed(eagle: Any) -> None:
    assert set(eagle.engine.facts["mends"]) == {mend.name for mend in vllm_cpu.MENDS}
    assert "kept" not in eagle.engine.facts["mends"].values()


def test_expand_repeats_each_value_for_its_tokens_and_replaces_the_greedy_mark() -> None:
    values = torch.tensor([0.5, -1.0, 2.0])
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    out = vllm_cpu.expand_batch_to_tokens(values, ends, 5, replace_from=-1, replace_to=1)
    assert out.tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]
    integers = vllm_cpu.expand_batch_to_tokens(torch.tensor([3, 0]), torch.tensor([1, 3]), 3, 0, 1)
    assert integers.tolist() == [3, 1, 1]
    assert integers.dtype == torch.int64


def test_a_mended_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[str] = []
    mends = tuple(
        vllm_cpu.Mend(name, False, broken=lambda b=broken: b, apply=lambda n=name: touched.append(n))  # type: ignore[misc]
        for name, broken in (("fine", False), ("broken", True), ("left", True))
    )
    monkeypatch.setattr(vllm_cpu, "MENDS", mends)
    report = vllm_cpu.apply_mends(frozenset({"left"}))
    assert report == {"fine": "not needed", "broken": "mended", "left": "kept"}
    assert touched == ["broken"]
