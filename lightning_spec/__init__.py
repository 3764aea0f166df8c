"""Train a policy and its speculative draft together, and refit both into a running engine."""

__version__ = "0.1.0"
