"""The live objects of users: runtimes, pools and groups."""
