"""How accurate a decode is with states in fewer bits, on random small models: `python -m tools.state_accuracy`."""
