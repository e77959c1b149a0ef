"""What one client's stream feels while others attack: every attack that was ever found, over every face."""
