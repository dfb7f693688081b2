"""Measures the effect of ssmgen on models of Hugging Face transformers: `python -m tools.demo`."""

from ssmgen.errors import SsmgenError


class DemoError(SsmgenError):
    """The demonstration cannot run with these options, or one of its claims does not hold."""
