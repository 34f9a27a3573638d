"""What is reported in an iteration, and its means."""
