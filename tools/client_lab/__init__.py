"""Real clients, of pinned versions, against a live server: ``python -m client_lab``. Not shipped,
and no part of the tests that run before each change, since it installs what it runs.
"""
