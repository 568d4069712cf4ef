"""For the person on call: the command line, `tail`, and what is done to a row by hand.

Nothing imports it. A change here is seen by people at a terminal: look at it there, at 80 columns and piped.
"""
