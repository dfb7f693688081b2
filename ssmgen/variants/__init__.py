"""Many variants at once: the default ones, building them, their committed text and its lock, their PTX and SASS."""
