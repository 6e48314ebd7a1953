"""Runs in virtual time, as a person describes them."""
