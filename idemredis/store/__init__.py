"""The way to Redis and back: the only importer of redis-py.

Makes and checks clients, sends the scripts, follows a cluster's slots, and puts redis-py's errors in our terms. A
change here must not know what a claim is.
"""
