"""Fault campaigns: what commands do if disks fail, files are damaged, processes die or the power fails.

    small_data_sets: data sets, and commands on copies of them
    judging: runs a command with one fault, in a fork (forked_case), and judges how it ends
    os_calls, os_calls.c: make the k-th call to the operating system fail, or send a signal there
    disturbed_runs, disturbed_files, power_loss: the campaigns, each a generator of outcomes

docs/faults.md lists the campaigns and how a run may end; anything else is a failure. Thousands of runs take
minutes, because each is a fork of a process that has already imported everything.
"""
