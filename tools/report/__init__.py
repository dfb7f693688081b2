"""Kernels as a folder of web pages that needs no server and no network: `python -m tools.report DIR`."""

from collections.abc import Sequence

from ssmgen.errors import SsmgenError, bullets


class ReportError(SsmgenError):
    """A report cannot be made from the given files."""

    def __init__(self, problems: Sequence[str]):
        super().__init__(f"no report was written:\n{bullets(problems)}")
        self.problems = list(problems)
