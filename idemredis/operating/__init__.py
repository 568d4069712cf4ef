"""Tools for the person on call: the command line, `tail`, and interventions in single rows.

No other part of the package imports it. Check changes in a terminal, at 80 columns and piped.
"""
