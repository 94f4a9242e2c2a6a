"""The ground floor, on which all other folders stand: each module by itself.

Of arguments: checks, and option_names (a wrong name explained). Of numbers: seeding (random numbers), positions,
chains (their R-hat and effective sample size) and matrices. Of results: groups (names of a tree's groups), findings
(what a fit tells its user), plain_text and files. Of the machine: memory and threads. And private, private_torch and
private_pyro: names that torch and Pyro do not promise to keep.
"""
