"""What is allowed, token by token: one object per request, which speaks through mask rows."""
