"""Fault campaigns: what commands do if disks fail, files are damaged, processes die or the power fails.

    small_data_sets: data sets, and commands on copies of them
    judging: runs a command with one fault, in a fork (forked_case), and judges how it ends
    os_calls, os_calls.c: make the k-th call to the operating system fail, or send a signal there
    disturbed_runs, disturbed_files, power_loss: the campaigns, each a generator of outcomes

The command must refuse with a message and an exit code, or write the bytes that it writes without the fault;
after a kill, a signal or an error, once it is run again. A traceback, a hang, or more than 3 GiB of extra
memory is a failure.

    kills: SIGKILL just before the k-th file system call
    stop_signals: SIGTERM, SIGINT or SIGUSR1 at that call
    injected_errors: the k-th call fails, once or from then on: EIO, ESTALE, ETIMEDOUT, EACCES, ENOSPC,
        EDQUOT, EMFILE, EINTR, EINVAL (O_DIRECT)
    short_transfers: a read or write transfers half of its bytes, once or always
    bit_flips: one bit of a plan, index, manifest, idx, tar, tokenizer, quarantine, findings or job file
    edited_files: bytes of such a file are overwritten, inserted, doubled or removed
    replaced_files: a FIFO, device, folder or link in place of a file, the file of another shard or data set
    bad_json: a value is of a wrong type, huge, deep or missing; tests/oracle/test_states.py: in loader states
    power_loss: the power fails at the k-th change: data that was not synced is lost
    full_disks: a tmpfs with k free pages
    races: at the k-th call the same command runs to its end in another process, four writers are stopped at
        random, or an input or a shard is deleted, cut, rewritten or replaced
    clocks: the clock is years off or jumps; files are from the future
    hostile_sets: each file of a data set is a link, FIFO, device, folder or hole of 3 GiB, or forged with
        right hashes; output folders have files of somebody else; as root, as another user, on another
        user's data. Nothing outside may be read or changed, and a command gets 1 GiB and 20 s of CPU

Thousands of runs take minutes, because each is a fork of a process that has already imported everything.
"""
