"""vLLM itself computes the draft's proposals as `propose` does, hence as training does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_spec.draft.propose as propose_module
from lightning_spec.draft import Eagle3, VocabMap
from lightning_spec.shapes import PolicyShape

K = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "borrowing": {},
    "two_layers": {"num_layers": 2, "num_kv_heads": 1},
    "reduced_own_all": {"draft_vocab_size": 20, "own_embedding": True, "aux_layer_ids": [1, 6]},
    "norms": {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True},
}

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else None  # sharper than the default, so that argmaxes differ
    folder = tmp_path_factory.mktemp("policy")
    model.save_pretrained(folder)
    return folder, model


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=() if name in ("two_layers", "reduced_own_all") else pytest.mark.slow)
        for name in VARIANTS
    ],
)
def test_vllm_proposes_what_propose_does(
    variant: str, policy: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = policy
    head, table = model.lm_head.weight.detach(), model.model.embed_tokens.weight.detach()
    draft = Eagle3(num_passes=K, **VARIANTS[variant])
    if "draft_vocab_size" in VARIANTS[variant]:
        draft.use_vocab_map(VocabMap(torch.arange(1, 61, 3), 64))
    draft.build(PolicyShape.from_file(folder), seed=1)
    draft.init_from_policy(head, table)
    out = tmp_path / "seen.pt"
    probe = Path(__file__).with_name("vllm_probe.py")
    done = subprocess.run(
        [sys.executable, str(probe), str(folder), str(draft.export(tmp_path / "draft")), str(K), str(out)],
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = torch.load(out)
    tokens = torch.tensor(seen["tokens"])
    with torch.no_grad():
        hidden = model(tokens[None], output_hidden_states=True).hidden_states
    features = torch.cat([hidden[i][0] for i in draft.aux_layer_ids], -1)
    logits: list[Tensor] = []

    def greedy(z: Tensor, temperature: float, generator: Any) -> tuple[Tensor, Tensor]:
        logits.append(z[0])
        return z.argmax(-1), z.softmax(-1)

    monkeypatch.setattr(propose_module, "choose", greedy)
    compared = 0
    for call in seen["calls"]:
        n = call.get("last", len(tokens)) + 1  # verified tokens
        if n >= len(tokens) or not call["logits"]:
            continue
        logits.clear()
        mine = draft.propose(
            features[:n], tokens[:n], [n], tokens[n : n + 1], K, policy_head=head, policy_embedding=table
        )  # fmt: skip
        assert mine.tokens[0].tolist() == call["tokens"][0].tolist()
        for i, theirs in enumerate(call["logits"]):
            assert torch.allclose(logits[i], theirs[0], rtol=1e-4, atol=1e-4), (n, i)
            compared += 1
    assert compared >= 40
