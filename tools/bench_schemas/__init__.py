"""What schemas of others come to: how many are admitted, whether what they forbid is refused, and what it costs."""
