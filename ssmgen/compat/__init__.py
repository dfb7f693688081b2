"""Drop-in signatures of other packages. They rename arguments and hold no logic."""
