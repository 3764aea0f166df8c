"""Runs vLLM's own DSpark code without an engine; started by test_dspark_in_vllm.py with TRITON_INTERPRET=1.

The query layout is the Triton kernel, interpreted; the sequential stage is `DSparkSpeculator._sample_sequential` over
vLLM's head modules. What is left out is the engine around them, which needs a GPU.

Usage: python vllm_dspark_probe.py IN.pt OUT.pt
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def kernel(folder: Path):
    """`_prepare_dflash_inputs_kernel` in a module of its own: vLLM's CPU build replaces Triton by a placeholder."""
    found = importlib.util.find_spec("vllm")
    root = Path(found.origin).parent / "v1" / "worker" / "gpu"
    parts = ["import triton", "import triton.language as tl"]
    for path, name in (
        (root / "cp_utils.py", "cp_local_slot"),
        (root / "spec_decode" / "dflash" / "speculator.py", "_prepare_dflash_inputs_kernel"),
    ):
        source = path.read_text()
        (node,) = (n for n in ast.parse(source).body if getattr(n, "name", None) == name)
        parts.append("@triton.jit\n" + ast.get_source_segment(source, node))
    (folder / "dflash_kernel.py").write_text("\n\n".join(parts))
    sys.path.insert(0, str(folder))
    import dflash_kernel

    return dflash_kernel._prepare_dflash_inputs_kernel


def layout(run, given: dict, from_anchor: bool) -> dict:
    """What each request's queries are: tokens, positions, and which of them are sampled for which position."""
    import torch

    contexts, rejected, bonus, k = given["contexts"], given["rejected"], given["bonus"], given["k"]
    count, queries = len(contexts), k if from_anchor else 1 + k
    ints = {"dtype": torch.int32}
    filled = {
        "input_ids": torch.full((count * queries,), -9, **ints), "positions": torch.full((count * queries,), -9),
        "start": torch.zeros(count + 1, **ints), "seq_lens": torch.zeros(count, **ints),
        "slots": torch.zeros(count * queries, dtype=torch.int64),
        "context_positions": torch.full((sum(contexts),), -9), "context_slots": torch.full((sum(contexts),), -9),
        "sample_indices": torch.full((count * k,), -9), "sample_pos": torch.full((count * k,), -9),
        "sample_request": torch.full((count * k,), -9),
        "temperature": torch.zeros(count), "seeds": torch.zeros(count, dtype=torch.int64),
    }  # fmt: skip
    starts = torch.tensor([0, *contexts]).cumsum(0).to(torch.int32)
    run[(count, 1)](
        *filled.values(),
        torch.cat([torch.arange(n) for n in contexts]), starts, torch.arange(count, **ints),
        torch.tensor(bonus), torch.zeros(count, **ints), torch.ones(count, **ints), torch.tensor(rejected, **ints),
        torch.zeros(count), torch.zeros(count, dtype=torch.int64),
        1 + torch.arange(count * 4, **ints).view(count, 4), 4, given["mask"], 16, queries, k, count, count * queries,
        64, 0, SAMPLE_FROM_ANCHOR=from_anchor, PAD_SLOT_ID=-1, CP_SIZE=1, CP_INTERLEAVE=1, BLOCK_SIZE=64,
    )  # fmt: skip
    return filled


def sequential(given: dict) -> dict:
    """Greedy tokens [B, k], their chances [B, k] and the biased logits [B, k, V] from the slots' states [B, k, H]."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.models.qwen3_dspark import (
        DSparkConfidenceHead,
        DSparkMarkovHead,
        Qwen3DSparkForCausalLM,
    )
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    states, tensors, head = given["states"], given["tensors"], given["head"]
    (count, k, hidden), (vocabulary, rank) = states.shape, tensors["markov_head.markov_w1.weight"].shape
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        init_distributed_environment(1, 0, f"file://{given['store']}", 0, "gloo")
        initialize_model_parallel(1)
        read = hidden + rank * given["with_markov"]
        heads = torch.nn.ModuleDict(
            {
                "markov_head": DSparkMarkovHead(vocabulary, vocabulary, rank, "markov_head"),
                "confidence_head": DSparkConfidenceHead(read, "confidence_head", True, given["with_markov"]),
            }
        )
        own = dict(heads.named_parameters())
        assert own.keys() == tensors.keys(), (own.keys(), tensors.keys())
        for name, tensor in tensors.items():
            loader = getattr(own[name], "weight_loader", None)
            loader(own[name], tensor) if loader is not None else own[name].copy_(tensor)
        model = Qwen3DSparkForCausalLM.__new__(Qwen3DSparkForCausalLM)
        torch.nn.Module.__init__(model)
        model.model, model.lm_head = heads, ParallelLMHead(vocabulary, hidden)
        model.lm_head.weight_loader(model.lm_head.weight, head)
        for layer in (heads["markov_head"].markov_w2, model.lm_head, heads["confidence_head"].proj):
            layer.quant_method.process_weights_after_loading(layer)
        model.logits_processor, model.draft_id_to_target_id = LogitsProcessor(vocabulary), None
        seen = []

        class Speculator(DSparkSpeculator):
            def __init__(self) -> None:
                self.model, self.num_speculative_steps, self.use_confidence_head = model, k, True
                self._draft_topk = self.draft_logits = self.acceptance_estimator = None
                self.sample_indices, self._anchor_idx = torch.arange(count * k), torch.arange(count) * k
                self.sample_idx_mapping = torch.arange(count).repeat_interleave(k)
                self.sample_pos, self._step_cols = torch.zeros(count * k, dtype=torch.int64), torch.arange(k)
                bonus = torch.tensor(given["bonus"])
                self.input_buffers = SimpleNamespace(
                    input_ids=torch.nn.functional.pad(bonus[:, None], (0, k - 1)).flatten()
                )
                self.draft_tokens = torch.full((count, k), -1)
                self.draft_token_confidence_probs = torch.full((count, k), -1.0)

            def _sample_logits(self, logits, *rest):
                seen.append(logits.clone())
                return super()._sample_logits(logits, *rest)

        speculator = Speculator()
        speculator._sample_sequential(count, states.flatten(0, 1))
    return {
        "tokens": speculator.draft_tokens,
        "chances": speculator.draft_token_confidence_probs,
        "logits": torch.stack(seen, 1),
    }


def main(source: str, out: str) -> None:
    import torch

    given = torch.load(source)
    run = kernel(Path(out).parent)
    found = {"dspark": layout(run, given, True), "dflash": layout(run, given, False)}
    found["sequential"] = sequential(given)
    torch.save(found, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
