"""`ssmgen` as a process of a crew on real cards: as crew_cases, but all that is measured is measured."""

from __future__ import annotations

import sys

from crew_cases import begin

from ssmgen.cli import main
from ssmgen.tune import sharing as crew

if __name__ == "__main__":
    begun: list[int] = []
    measure = crew.outcome_of

    def outcome_of(*words):
        begin(begun)
        return measure(*words)

    crew.outcome_of = outcome_of
    sys.argv[0] = "ssmgen"
    main()
