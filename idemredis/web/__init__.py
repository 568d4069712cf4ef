"""The HTTP contract that all doors share: refusals, settings, the request's body, the response on its way out.

No framework here. A change here changes every door, and the documents for API clients.
"""
