"""Code that whole decode layers share: convolution, state and norm in one launch."""
