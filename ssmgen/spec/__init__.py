"""A kernel's description: specs, problems, element types, packed arguments, and the records of families."""
