"""An engine is refused that would serve another method than the draft's, before anything starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from callbacks.served import check_method
from lightning_spec.draft import MTP, DFlash, Draft, DraftModel, DSpark, Eagle3
from lightning_spec.errors import ConfigError
from lightning_spec.rollout.reference import ReferenceEngine
from lightning_spec.rollout.speculation import Speculation
from lightning_spec.rollout.vllm import VLLMEngine

DRAFTS: dict[str, Draft] = {
    "eagle3": Eagle3(),
    "dflash": DFlash(block_size=4, mask_token_id=3),
    "dspark": DSpark(block_size=3, mask_token_id=3),
    "mtp": MTP(),
    "draft_model": DraftModel(),
}
FILES = {"eagle3": "vllm.yaml", "dspark": "reference.yaml"}


@pytest.mark.parametrize("method", DRAFTS)
def test_every_draft_goes_with_its_own_method_and_with_those_that_load_none(method: str) -> None:
    for fitting in (method, "ngram", "suffix", "none"):
        check_method(VLLMEngine(Speculation(fitting)), DRAFTS[method])  # type: ignore[arg-type]
    check_method(ReferenceEngine("draft"), DRAFTS[method])


@pytest.mark.parametrize("method", DRAFTS)
def test_another_method_is_refused_by_the_names_of_both_keys_and_the_file_to_take(method: str) -> None:
    for other in DRAFTS.keys() - {method}:
        with pytest.raises(ConfigError) as caught:
            check_method(VLLMEngine(Speculation(other)), DRAFTS[method])  # type: ignore[arg-type]
        said = str(caught.value)
        assert "rollout.engine.init_args.speculation.method" in said
        assert f"model.draft: {type(DRAFTS[method]).__name__}" in said
        assert f"configs/rollout/{FILES.get(method, method + '.yaml')}" in said


def test_a_method_that_needs_a_draft_is_refused_without_one() -> None:
    with pytest.raises(ConfigError, match="needs a draft"):
        check_method(VLLMEngine(Speculation("eagle3")), None)
    check_method(VLLMEngine(Speculation("ngram")), None)
    check_method(SimpleNamespace(speculative=True), None)  # type: ignore[arg-type]
