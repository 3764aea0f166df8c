"""Runs vLLM on an exported policy and draft and records what its drafter computed; started by test_draft_in_vllm.py.

Usage: python vllm_probe.py POLICY DRAFT K OUT.pt
"""

from __future__ import annotations

import os
import sys

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the drafter must run where it can be watched
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def main(policy: str, draft: str, k: int, out: str) -> None:
    import torch
    from vllm import LLM, SamplingParams
    from vllm.v1.spec_decode.eagle import EagleProposer

    calls: list[dict] = []
    first_pass, propose = EagleProposer.set_inputs_first_pass, EagleProposer.propose

    def watch_first(self, **kwargs):
        result = first_pass(self, **kwargs)
        calls[-1]["last"] = int(kwargs["target_positions"][result[1]][0])
        return result

    def watch(self, *args, **kwargs):
        calls.append({"logits": []})
        compute = self.model.compute_logits

        def watch_logits(hidden):
            logits = compute(hidden)
            calls[-1]["logits"].append(logits.detach().clone())
            return logits

        self.model.compute_logits = watch_logits
        try:
            tokens = propose(self, *args, **kwargs)
        finally:
            del self.model.compute_logits
        calls[-1]["tokens"] = tokens.detach().clone()
        return tokens

    EagleProposer.set_inputs_first_pass, EagleProposer.propose = watch_first, watch
    llm = LLM(
        policy, dtype="float32", enforce_eager=True, max_model_len=96, max_num_seqs=2, skip_tokenizer_init=True,
        speculative_config={"method": "eagle3", "model": draft, "num_speculative_tokens": k},
    )  # fmt: skip
    prompt = [5, 9, 2, 33, 17, 8, 41]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    result = llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0]
    torch.save({"tokens": prompt + list(result.token_ids), "calls": calls}, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
