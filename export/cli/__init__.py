"""``tandemrt export`` on the command line."""
