"""Import Lightning without the packages that only torchmetrics' text, audio and plotting metrics would pull in.

torchmetrics imports transformers, scipy and matplotlib whenever they are installed: several seconds for metrics that
this project does not use. While torchmetrics is imported, those packages look absent to it; afterwards nothing is
changed, and importing them works as ever.
"""

from __future__ import annotations

import logging
import sys
import warnings
from importlib.metadata import PackageNotFoundError

HIDDEN = ("transformers", "scipy", "matplotlib")


def import_torchmetrics() -> None:
    """Import torchmetrics with HIDDEN hidden from it; does nothing when it is imported already."""
    if "torchmetrics" in sys.modules:
        return
    import lightning_utilities.core.imports as checks

    version, available = checks._version, checks.module_available

    def hidden_version(name: str) -> str:
        if name in HIDDEN:
            raise PackageNotFoundError(name)
        return version(name)

    def hidden_available(path: str) -> bool:
        return path.split(".")[0] not in HIDDEN and available(path)

    checks._version, checks.module_available = hidden_version, hidden_available  # type: ignore[assignment]
    try:
        import torchmetrics  # noqa: F401
    finally:
        checks._version, checks.module_available = version, available


NOISE = (
    # Metrics are reduced before they are logged, each by its own rule.
    ".*recommended to use `self.log.*sync_dist=True.*",
    ".*does not have many workers.*",
    ".*GPU available but not used.*",
    ".*Transformer Engine.*",
    ".*Apex.*",
    ".*torch.distributed is disabled, unavailable or uninitialized.*",
    ".*isinstance.treespec, LeafSpec.*",
    ".*Checkpoint directory .* exists and is not empty.*",
)


def quiet() -> None:
    """Neither advertising nor warnings about what the project does on purpose."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
