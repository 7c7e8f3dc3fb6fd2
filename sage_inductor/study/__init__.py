"""What became of attention calls, and what it costs in accuracy: reports and diagnoses."""
