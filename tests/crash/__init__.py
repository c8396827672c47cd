"""The crash matrix: every boundary x what happens at it x phase x database, and what is left.

- ``checker``: the five invariants, by plain SQL, plain git and ``/proc``; no code of the product
- ``ledger``, ``world``, ``bystanders``: what the checker looks with
- ``hands``: the product's own loop and run steps in line, as one process drives them
- ``scenes``: the states from which cells start
- ``lane``, ``cells``: one cell after another, each with processes that really die
"""
