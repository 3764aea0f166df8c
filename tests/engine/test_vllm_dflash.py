"""DFlash in vLLM's CPU build: work-rounds 3 (fused K/V buffers after a refit) and 4 (each layer's own k_norm)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spec.batch import SpecStats
from lightning_spec.rollout import vllm_cpu
from lightning_spec.rollout.engine import Request, Sampling
from lightning_spec.rollout.speculation import Speculation

HIDDEN, HEADS, KV_HEADS, SIZE, INNER = 64, 2, 1, 32, 128
REQUESTS = [Request(tuple(range(3 + i, 13 + 2 * i))) for i in range(8)]
GREEDY = Sampling(temperature=0, max_tokens=48)


def dflash_tensors(seed: int) -> dict[str, Tensor]:
    """Two layers whose k_norms differ strongly, so that serving both with the first one's shows."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.1

    def norm(size: int, scale: float = 1.0) -> Tensor:
        return scale * (1 + 0.1 * torch.randn(size, generator=generator))

    tensors = {"fc.weight": torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], 1)}
    tensors |= {"hidden_norm.weight": norm(HIDDEN), "norm.weight": norm(HIDDEN)}
    for layer in range(2):
        prefix = f"layers.{layer}."
        tensors |= {
            prefix + "self_attn.q_proj.weight": matrix(HEADS * SIZE, HIDDEN),
            prefix + "self_attn.k_proj.weight": matrix(KV_HEADS * SIZE, HIDDEN),
            prefix + "self_attn.v_proj.weight": matrix(KV_HEADS * SIZE, HIDDEN) * 5,
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * SIZE) * 5,
            prefix + "self_attn.q_norm.weight": norm(SIZE),
            prefix + "self_attn.k_norm.weight": norm(SIZE, 0.1 if layer == 0 else 8.0),
            prefix + "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            prefix + "mlp.up_proj.weight": matrix(INNER, HIDDEN),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN, INNER),
            prefix + "input_layernorm.weight": norm(HIDDEN),
            prefix + "post_attention_layernorm.weight": norm(HIDDEN),
        }
    return tensors


def save(tiny: Any, folder: Path, tensors: dict[str, Tensor]) -> Path:
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "block_size": 4,
        "dflash_config": {"mask_token_id": 127, "target_layer_ids": [3, 6]},
    }
    return tiny.make_draft(folder, tensors, **config)


def accepted(engine: Any) -> tuple[list[tuple[int, ...]], SpecStats]:
    completions = engine.generate(REQUESTS, GREEDY)
    return [c.tokens for c in completions], engine.last.spec


def test_a_refitted_dflash_draft_proposes_what_a_freshly_started_one_does(
    start_engine: Any, tied: Any, tiny: Any, tmp_path: Path
) -> None:
    first, second = dflash_tensors(1), dflash_tensors(2)
    speculation = Speculation("dflash", 3)
    engines = [
        start_engine(tied.folder / "policy", save(tiny, tmp_path / name, tensors), speculation=speculation)
        for name, tensors in (("first", first), ("second", second))
    ]
    try:
        before, wanted = accepted(engines[0]), accepted(engines[1])
        assert before[0] == wanted[0] == [tiny.greedy(tied.model, r.prompt_tokens, 48) for r in REQUESTS]
        report = engines[0].refit(None, second.items(), 1, verify=True)
        assert report.verified == len(second)
        assert accepted(engines[0]) == wanted
        assert before[1] != wanted[1]
    finally:
        for engine in engines:
            engine.close()


def test_keys_are_normalised_with_each_layer_s_own_weight() -> None:
    """The work-round itself, with vLLM's operator; the operator alone reads the first row only."""
    pytest.importorskip("vllm")

    class Draft:
        _k_norm_weights = torch.stack([torch.ones(32), torch.full((32,), 3.0)])
        _rms_norm_eps = 1e-6

    keys = torch.randn(2, 5, 1, 32)
    out = vllm_cpu.normalize_context_k(Draft(), keys)
    want = keys * keys.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * Draft._k_norm_weights[:, None, None]
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
