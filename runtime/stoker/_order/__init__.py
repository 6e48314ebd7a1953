"""Which rank reads which sample when: pure arithmetic."""
