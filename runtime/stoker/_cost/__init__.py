"""Costs in US dollars: pure arithmetic on usage and prices."""
