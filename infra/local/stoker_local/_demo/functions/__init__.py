"""``stoker demo --functions``: raw images become training data in functions that may die at any moment."""
