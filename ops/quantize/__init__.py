"""What is made of k and v before attention: statistics, codes and scales."""
