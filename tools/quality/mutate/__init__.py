"""Plant small bugs and check that the tests find them."""
