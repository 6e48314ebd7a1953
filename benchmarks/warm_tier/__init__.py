"""The warm tier in the local function cloud: its rate, its tail, what losses cost, and its memory."""
