"""Tokenizers: any local Hugging Face folder, and a character tokenizer that needs no download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_spec.errors import ConfigError

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
"""Characters of the character tokenizer in id order; the first has id 4, after pad, bos, eos, unk."""


def char_tokenizer(folder: str | Path) -> Any:
    """Build the character-level tokenizer and save it to `folder`; returns the PreTrainedTokenizerFast.

    100 tokens with stable ids: 0 pad, 1 bos, 2 eos, 3 unk, 4 newline, 5.. printable ASCII. Encoding with special tokens
    puts bos first (a fixed first key is what small policies attend to when nothing else matters); eos is never added.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate((PAD, BOS, EOS, UNK, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocab[BOS])]
    )
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )
    Path(folder).mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))
    return tokenizer


def load_tokenizer(folder: str | Path, key: str = "data.tokenizer") -> Any:
    """Load a Hugging Face tokenizer from a local folder, never from the network.

    Raises:
        ConfigError: no such folder, or nothing in it that transformers can read as a tokenizer.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(
            "no tokenizer folder", found=str(folder), needed="a local folder with tokenizer files", key=key
        )
    if not any(path.glob("tokenizer*")) and not any(path.glob("*.model")) and not (path / "vocab.json").exists():
        names = sorted(item.name for item in path.iterdir())[:8]
        raise ConfigError("no tokenizer in the folder", found=names, needed="tokenizer.json or the like", key=key)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises a dozen types here, all of which mean the same to the user
        raise ConfigError(
            f"the tokenizer cannot be loaded ({type(error).__name__}: {error})",
            found=str(folder),
            needed="a folder that transformers' AutoTokenizer reads",
            key=key,
        ) from error


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Text of a completion, special tokens left out, spacing untouched."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text)


class PromptEncoder:
    """Turns prompts and worked answers into tokens, with the tokenizer's own special tokens or its chat template.

    Args:
        folder: the tokenizer's folder.
        chat_template: format text prompts as one user message; prompts that are messages always use the template.
        system: system message put first by the chat template.

    Raises:
        ConfigError: no tokenizer there, or a chat template asked for that it does not have.
    """

    def __init__(self, folder: str | Path, chat_template: bool = False, system: str | None = None) -> None:
        self.folder, self.chat_template, self.system = folder, chat_template, system
        self.tokenizer = load_tokenizer(folder)
        if chat_template:
            self._require_template()

    def _require_template(self) -> None:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ConfigError(
                "the tokenizer has no chat template",
                found=str(self.folder),
                needed="chat_template.jinja in the folder, or chat_template: false with text prompts",
                key="data.chat_template",
            )

    @property
    def end_id(self) -> int:
        """Id of the token that ends a completion."""
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(
                "the tokenizer has no end-of-sequence token",
                found=None,
                needed="eos_token in tokenizer_config.json",
                key="data.tokenizer",
            )
        return int(self.tokenizer.eos_token_id)

    def encode(
        self, prompt: str | list[dict[str, str]], worked: str | None
    ) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """(prompt tokens, worked tokens or None). A worked answer gets no special token but the end at its end."""
        if self.chat_template or not isinstance(prompt, str):
            tokens = self._chat(prompt)
        else:
            tokens = self.tokenizer(prompt, add_special_tokens=True)["input_ids"]
        if worked is None:
            return tuple(map(int, tokens)), None
        body = self.tokenizer(worked, add_special_tokens=False)["input_ids"]
        return tuple(map(int, tokens)), (*map(int, body), self.end_id)

    def _chat(self, prompt: str | list[dict[str, str]]) -> list[int]:
        self._require_template()
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        # Templates write their own special tokens.
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
