"""What a module costs: counted (`cost`), on a given machine (`plan`), and measured (`timing`).

`probe` measures how hard a deep stack is to train.
"""
