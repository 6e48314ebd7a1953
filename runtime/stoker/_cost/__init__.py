"""What a run costs, in dollars: pure arithmetic on figures and prices."""
