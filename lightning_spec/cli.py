"""The `lightning-spec` command.

This module is light on purpose: help, version and `report` start without torch. The training commands live in
`lightning_spec.command`, which imports Lightning.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from lightning_spec import __version__
from lightning_spec.errors import SpecError

HELP = f"""lightning-spec {__version__}: trains a policy and its speculative draft together

usage: lightning-spec COMMAND [options]

commands:
  fit        train: supervised, distillation, or GRPO with speculative rollouts
  validate   measure reward and acceptance length on the validation prompts
  export     write a checkpoint as a Hugging Face policy folder and a vLLM draft folder
  report     write report/index.html, summary.json and plots from a run's logs

  lightning-spec fit -c configs/experiment/demo_grpo.yaml [-c MORE.yaml ...] [--key.of.config VALUE ...]
  lightning-spec fit -c FILE --print_config      show the whole configuration, with comments on request
  lightning-spec COMMAND --help                  all keys of a command
  lightning-spec export runs/demo/checkpoints/step-00000100 --out exported
  lightning-spec report runs/demo

A configuration file may name others: `compose: [../base.yaml, ...]`. Later files and the command line win.
Set LIGHTNING_SPEC_TRACEBACK=1 to see the full traceback of an error.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0, or 2 for input that was refused, or 1 for a run that failed."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if args[0] == "--version":
        print(__version__)
        return 0
    try:
        if args[0] == "report":
            from lightning_spec.report import main as report

            return report(args[1:])
        from lightning_spec.command import run

        return run(args)
    except SpecError as error:
        if os.environ.get("LIGHTNING_SPEC_TRACEBACK"):
            raise
        print(f"lightning-spec: {describe(error)}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def describe(error: BaseException) -> str:
    """One short paragraph: what is wrong, what was found, what is needed, which key."""
    from lightning_spec.errors import ConfigError

    if isinstance(error, ConfigError):
        found, needed = _short(error.found), _short(error.needed)
        return f"error: {error.what}\n  found:  {found}\n  needed: {needed}\n  key:    {error.key}"
    return f"error: {type(error).__name__}: {error}"


def _short(value: object, limit: int = 400) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else f"{text[:limit]} ..."


if __name__ == "__main__":
    sys.exit(main())
