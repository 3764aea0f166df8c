"""Lightning strategies that users name in YAML (`class_path: strategies.MegatronStrategy`)."""

from strategies.megatron import MegatronStrategy

__all__ = ["MegatronStrategy"]
