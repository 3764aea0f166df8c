"""Tiny policies and drafts for vLLM, and engines that a whole session shares (a start takes about 8 s)."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_spec.rollout.engine import EngineFiles
from lightning_spec.rollout.speculation import Speculation
from lightning_spec.rollout.vllm import VLLMEngine

HIDDEN, LAYERS, VOCABULARY, POSITIONS, HEADS, KV_HEADS, INNER = 64, 8, 128, 512, 2, 1, 128


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in Path(str(item.fspath)).parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session", autouse=True)
def _one_user_of_the_cores() -> Iterator[None]:
    """Engines bind to every core: two test sessions at once would time each other out."""
    with open("/tmp/lightning-spec-engine-tests.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_policy(folder: Path, seed: int, *, tied: bool = False) -> Any:
    """A random Llama of transformers, saved; peaky enough that greedy choices are not decided by rounding."""
    model = build_policy(seed, tied)
    model.save_pretrained(folder)
    return model


def build_policy(seed: int, tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() == 2:
                tensor.normal_(0, 0.25 if "embed" in name or "lm_head" in name else 0.15)
            else:
                tensor.copy_(1 + 0.1 * torch.randn_like(tensor))
    return model


def draft_tensors(seed: int, *, head: Tensor | None = None, own_head: bool = True) -> dict[str, Tensor]:
    """EAGLE-3 tensors under the names that vLLM loads (PLATFORM.md part 2)."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.05

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(HIDDEN, generator=generator)

    size = HIDDEN // HEADS
    tensors = {
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj.weight": matrix(HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": matrix(KV_HEADS * size, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": matrix(KV_HEADS * size, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
        "midlayer.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": matrix(INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "norm.weight": norm(),
    }
    if own_head:
        tensors["lm_head.weight"] = matrix(VOCABULARY, HIDDEN) * 5 if head is None else head.detach().clone()
    return tensors


def make_draft(folder: Path, tensors: dict[str, Tensor], **overrides: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **overrides,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def helpful_draft(model: Any, seed: int) -> dict[str, Tensor]:
    """A draft that is often right: it reads the policy's last tap and uses the policy's head."""
    tensors = draft_tensors(seed, head=model.lm_head.weight)
    tensors["fc.weight"] = torch.cat([torch.zeros(HIDDEN, 2 * HIDDEN), torch.eye(HIDDEN)], dim=1)
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        tensors[name] = torch.zeros_like(tensors[name])
    return tensors


def policy_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """What a trainer streams: the checkpoint's names, a tied head left out."""
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if not (tied and name == "lm_head.weight"):
            yield name, tensor


@pytest.fixture(scope="session")
def start_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., VLLMEngine]]:
    """Starts engines and closes them at the end of the session."""
    engines: list[VLLMEngine] = []

    def start(policy: Path, draft: Path | None = None, **arguments: Any) -> VLLMEngine:
        # One thread: these models are too small to share, and a busy host makes every barrier a wait.
        defaults = {"threads": 1, "kv_cache_gib": 0.125, "max_num_seqs": 64, "timeout_s": 300.0}
        engine = VLLMEngine(max_model_len=POSITIONS - 64, **(defaults | arguments))
        engines.append(engine)
        engine.start(EngineFiles(policy, draft))
        return engine

    yield start
    for engine in engines:
        engine.close()


@dataclass
class Served:
    """A running engine with the transformers model and the draft that it was started from."""

    engine: VLLMEngine
    model: Any
    draft: dict[str, Tensor]
    folder: Path


@pytest.fixture(scope="session")
def eagle(start_engine: Callable[..., VLLMEngine], tmp_path_factory: pytest.TempPathFactory) -> Served:
    """EAGLE-3, k = 3; the draft owns a head that equals the policy's at load (which vLLM would alias)."""
    folder = tmp_path_factory.mktemp("eagle")
    model = make_policy(folder / "policy", 0)
    draft = helpful_draft(model, 1)
    make_draft(folder / "draft", draft)
    with launcher_variables():
        engine = start_engine(folder / "policy", folder / "draft", speculation=Speculation("eagle3", 3))
    return Served(engine, model, draft, folder)


@pytest.fixture(scope="session")
def tied(start_engine: Callable[..., VLLMEngine], tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A policy with tied embeddings, no speculation."""
    folder = tmp_path_factory.mktemp("tied")
    model = make_policy(folder / "policy", 3, tied=True)
    return Served(start_engine(folder / "policy"), model, {}, folder)


@contextmanager
def launcher_variables() -> Iterator[None]:
    """What torchrun leaves in a trainer's environment. An engine that inherits it hangs or joins the wrong group."""
    patch = pytest.MonkeyPatch()
    launcher = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**launcher, "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "17"}.items():
        patch.setenv(name, value)
    try:
        yield
    finally:
        patch.undo()


def greedy(model: Any, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """transformers' own greedy continuation."""
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return tuple(out[0, len(prompt) :].tolist())


def exact_logprobs(model: Any, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float) -> Tensor:
    """log softmax(logits / temperature) [tokens, V] of transformers at each sampled position."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1)


@pytest.fixture(scope="session")
def tiny() -> SimpleNamespace:
    """The helpers of this file (with importlib mode a test module cannot import its conftest)."""
    return SimpleNamespace(
        make_policy=make_policy,
        make_policy_in_memory=lambda seed: build_policy(seed, tied=True),
        make_draft=make_draft,
        draft_tensors=draft_tensors,
        helpful_draft=helpful_draft,
        policy_tensors=policy_tensors,
        greedy=greedy,
        exact_logprobs=exact_logprobs,
        vocabulary=VOCABULARY,
        positions=POSITIONS,
    )
