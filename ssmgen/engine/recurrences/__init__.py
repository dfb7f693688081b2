"""What a recurrence is: its problem, its kernel, its reference and its models. Decode steps, layers and prompts build on it."""
