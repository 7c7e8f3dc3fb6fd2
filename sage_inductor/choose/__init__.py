"""Which recipe a call gets: its candidates, their times, and the best of them."""
