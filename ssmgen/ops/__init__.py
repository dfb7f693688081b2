"""The public functions on torch tensors: check, dispatch, launch."""
