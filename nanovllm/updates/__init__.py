"""Weights that change and memory that is lent, while an engine stays.

Doors: for engines `interface`, `updating`, `sleeping`, `hold`, `memory`; for building a rank
`weights`, `sleeper`, `settling`; for replicas `ends`; `ledger` and `parcel`, which travel;
`sharing` for processes.
"""
