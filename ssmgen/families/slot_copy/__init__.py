"""slot_copy: a bare copy of slots, the ceiling that decode steps are measured against."""

from ...spec.family import Family, Kernels

FAMILY = Family(
    name="slot_copy",
    kernels=(Kernels("spec:SlotCopySpec", unchecked="it is a benchmark's copy, with no result to check"),),
    copies="bench:copies",
    defaults="defaults:DEFAULTS",
)
