"""A step simulated: the plans that ranks execute, on hardware that is data."""
