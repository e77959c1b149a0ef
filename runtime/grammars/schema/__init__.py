"""Convert JSON schemas to the few forms that a grammar engine enforces exactly.

``dialect`` normalizes keywords, ``document`` resolves references, ``expand`` turns schemas that apply together into
alternatives of one JSON type each (``shapes``), ``lowering`` rewrites these for the engine, and ``emit`` writes them.
"""
