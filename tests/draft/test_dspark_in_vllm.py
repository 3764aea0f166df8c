"""vLLM's own DSpark code gives the slots, logits, tokens and confidences that `propose` has (it serves it on a GPU)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_spec.draft import DSpark
from lightning_spec.draft.block_propose import blocks
from lightning_spec.shapes import PolicyShape

K, MASK, BONUS = 4, 61, [3, 40, 17]
CONTEXTS, REJECTED = [7, 5, 9], [0, 2, 3]

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("vllm", "triton")), reason="vLLM is not installed"
    ),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the probe found, and ours: draft, features and the policy's head and table."""
    folder = tmp_path_factory.mktemp("dspark")
    shape = PolicyShape.from_hf(
        {
            "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        },
    )  # fmt: skip
    draft = DSpark(block_size=K, num_layers=2, aux_layer_ids=[1, 3], mask_token_id=MASK, markov_rank=8)
    draft.build(shape, seed=3)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "markov" in name or "confidence" in name:
                parameter.add_(torch.randn(parameter.shape, generator=g) * 0.7)
    lengths = [n - r for n, r in zip(CONTEXTS, REJECTED, strict=True)]
    features = torch.randn(sum(lengths), 64, generator=g)
    head, table = torch.randn(64, 32, generator=g) * 0.3, torch.randn(64, 32, generator=g)
    with torch.no_grad():
        states = blocks(draft, features, lengths, torch.tensor(BONUS), K, table)
    tensors = {name: tensor for name, tensor in draft.engine_tensors() if "markov" in name or "confidence" in name}
    given = {"states": states, "tensors": tensors, "head": head, "bonus": BONUS, "k": K, "mask": MASK}
    given |= {"contexts": CONTEXTS, "rejected": REJECTED, "with_markov": True, "store": str(folder / "store")}
    torch.save(given, folder / "in.pt")
    probe = Path(__file__).with_name("vllm_dspark_probe.py")
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    done = subprocess.run(
        [sys.executable, str(probe), str(folder / "in.pt"), str(folder / "out.pt")],
        env={k: v for k, v in os.environ.items() if k not in names} | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    own = {"draft": draft, "features": features, "lengths": lengths, "head": head, "table": table, "states": states}
    return own | torch.load(folder / "out.pt")


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_vllm_s_queries_are_the_slots_of_a_block(seen: dict[str, Any], kind: str) -> None:
    found, ahead = seen[kind], int(kind == "dflash")
    slots = K + ahead
    at = torch.tensor(seen["lengths"])
    assert found["input_ids"].view(3, slots).tolist() == [[token] + [MASK] * (slots - 1) for token in BONUS]
    assert torch.equal(found["positions"].view(3, slots), at[:, None] + torch.arange(slots))
    assert torch.equal(found["sample_indices"].view(3, K), torch.arange(3 * slots).view(3, slots)[:, ahead:])
    # The first proposal stands behind the bonus token in either layout.
    assert torch.equal(found["sample_pos"].view(3, K), at[:, None] + 1 + torch.arange(K))
    # Rejected rows stay out of the trunk.
    kept = [[True] * n + [False] * r for n, r in zip(seen["lengths"], REJECTED, strict=True)]
    assert (found["context_slots"] >= 0).tolist() == [one for row in kept for one in row]
    assert torch.equal(found["seq_lens"].long(), at + slots)


def test_vllm_s_sequential_stage_gives_our_tokens_logits_and_confidences(seen: dict[str, Any]) -> None:
    draft, theirs, states = seen["draft"], seen["sequential"], seen["states"]
    args = {"policy_head": seen["head"], "policy_embedding": seen["table"]}
    tokens, bonus = torch.zeros(sum(seen["lengths"]), dtype=torch.int64), torch.tensor(BONUS)

    def propose(**more: Any) -> Any:
        return draft.propose(seen["features"], tokens, seen["lengths"], bonus, K, **args, **more)

    assert torch.equal(propose().tokens, theirs["tokens"])
    assert len(theirs["tokens"].unique()) > 4
    before = torch.cat([bonus[:, None], theirs["tokens"][:, :-1]], 1).flatten()
    with torch.no_grad():
        embedded = draft.markov_head.embed(before)
        bias = draft.markov_head.bias(embedded)
        logits = states.flatten(0, 1) @ seen["head"].T + bias
        chances = draft.confidence_head(states.flatten(0, 1), embedded).sigmoid()
    torch.testing.assert_close(logits.view(3, K, -1), theirs["logits"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(chances.view(3, K), theirs["chances"], atol=1e-6, rtol=1e-5)
    # The bias decides, and the chances are no constant: neither could be left out unseen.
    assert not torch.equal((states @ seen["head"].T).argmax(-1), theirs["tokens"])
    assert float(theirs["chances"].max() - theirs["chances"].min()) > 0.1
    try:
        draft.confidence_threshold = float(theirs["chances"][:, 1].max()) + 1e-5
        below = (theirs["chances"] < draft.confidence_threshold).int()
        cut = int(torch.where(below.any(1), below.argmax(1), K).max())
        assert cut < K
        assert propose().tokens.tolist() == theirs["tokens"][:, :cut].tolist()
    finally:
        draft.confidence_threshold = None
