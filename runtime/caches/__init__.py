"""Key/value caches: their memory, its allocation to slots, and the calls that use it."""
