# SPDX-License-Identifier: Apache-2.0
"""Synthetic autoregressive decision processes on which everything is computed exactly."""

from theory.mdp.adversarial import (
    bernoulli_at_kl,
    branch_then_binary,
    coordinate_search,
    hazard_error,
    rare_token_sup,
    reverse_branch,
    two_step_branch,
)
from theory.mdp.markov import MarkovPair, random_markov
from theory.mdp.product import BernoulliProduct, CountLaw, multinomial_law, poisson_law
from theory.mdp.routing_flip import rare_token_amplification, routing_flip
from theory.mdp.tree import Tree, random_tree

__all__ = [
    "BernoulliProduct",
    "CountLaw",
    "MarkovPair",
    "Tree",
    "bernoulli_at_kl",
    "branch_then_binary",
    "coordinate_search",
    "hazard_error",
    "multinomial_law",
    "poisson_law",
    "random_markov",
    "random_tree",
    "rare_token_amplification",
    "rare_token_sup",
    "reverse_branch",
    "routing_flip",
    "two_step_branch",
]
