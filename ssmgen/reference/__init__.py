"""Plain PyTorch: the executable specification of every operator."""
