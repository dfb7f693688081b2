"""What ssmgen changes in models of Hugging Face transformers, measured: `python -m tools.demo`."""

from ssmgen.errors import SsmgenError


class DemoError(SsmgenError):
    """The demonstration cannot be run as asked, or what it is to show does not hold."""
