"""The products of a mixture of experts, and the choice of each token's experts.

Doors: `gated_experts`; `weights`; `routing`.
"""
