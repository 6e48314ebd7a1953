"""The warm tier in the local function cloud: its rate, tail latency, cost of losses, and memory."""
