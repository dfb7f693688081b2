"""Demonstrations: what ssmgen changes in another project's program, measured there. `ssmgen demo hf` is the one for transformers."""

from ..errors import SsmgenError


class DemoError(SsmgenError):
    """A demonstration cannot be run as asked, or what it is to show does not hold."""
