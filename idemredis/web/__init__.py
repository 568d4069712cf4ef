"""HTTP code that all framework adapters share: refusals, settings, request bodies and response recording.

Nothing here imports a framework. A change here affects every adapter and the documentation for API clients.
"""
