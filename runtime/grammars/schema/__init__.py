"""JSON schemas: what is read is brought into a few plain forms that a grammar engine holds to the letter.

``document`` finds what references lead to, ``dialect`` says what a keyword means, ``expand`` turns schemas that hold
together into shapes of one type each, ``emit`` writes those down.
"""
