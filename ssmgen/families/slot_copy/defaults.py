"""The default variant of slot_copy."""

from ...spec.kernel import Pdl
from ...variants.defaults import FixedSpec
from .spec import SlotCopySpec

DEFAULTS = {"2 MiB slots": FixedSpec(SlotCopySpec(slot_bytes=2 << 20, pdl=Pdl.TRIGGER_LOADED))}
