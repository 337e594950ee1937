"""Fault campaigns: what the commands do where disks fail, files lie, processes die and the power goes.

    small_data_sets the data sets, and commands on copies of them -> judging a fault meets a command, in a
    process of its own (forked_case), and how that ends; os_calls.c fails, kills or stops at the k-th call

    disturbed_runs, disturbed_files, power_loss: the campaigns, each a generator of outcomes

docs/faults.md has a line for each campaign, and says how a run may end: all else is a failure. Thousands of
runs take minutes, as each is a fork of one process that has imported everything already.
"""
