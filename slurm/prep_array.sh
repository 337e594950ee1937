#!/bin/bash
# Make shards of a data set with a job array: task N makes shard N.
#
#   sbatch slurm/prep_array.sh                                     shards 0-9 into /data/processed
#   sbatch --array=0-99 slurm/prep_array.sh DATA [worker flags]    shards 0-99 of the plan in DATA
#
# With several tasks a job, as `--nodes=2 --ntasks-per-node=1` asks for, all tasks of the array share the shards of the
# plan (`shardprep run`). Where nodes are not shared, a task uses all CPUs of its node.
#
# `--partition=amx-part` or SBATCH_PARTITION chooses a partition. `--array=0-99%20` runs 20 tasks at once.
# `--signal=B:USR1@60` gives tasks a minute to stop before the time limit, instead of KillWait (30 s) after it.
#
#   SHARDPREP_SETUP       a file to source first: modules, conda, a virtual environment
#   SHARDPREP_PYTHON      the interpreter (default: python, or else python3, where the worker runs)
#   SHARDPREP_SRUN_ARGS   more options of srun, split at blanks: --container-image=... (pyxis)
#   SHARDPREP_EXEC        a command to put before the interpreter, split at blanks: apptainer exec image.sif
#
# The exit code is the worker's (docs/commands.md): 0 done, 75 stopped, run it again. If tasks fail, type the same
# line again: it makes only the missing shards. The script never requeues itself.
#
# `shardprep submit DATA` sends this script with another head; --dry_run prints it.
#
#SBATCH --job-name=shardprep
#SBATCH --array=0-9
#SBATCH --nodes=1
#SBATCH --cpus-per-task=8
#SBATCH --open-mode=append
# Not logs/...: Slurm creates no folders, and a task whose log cannot be opened dies without a message. The log is
# created in the folder of submission, and moved to logs/ below.
#SBATCH --output=shardprep-%A_%a.log
#
# `shardprep submit` puts its own head in place of all lines above the next one.
set -euo pipefail

# The head of `shardprep submit` sets shards, shardprep_what, _command, _folder and _identity, or the function _end.
node=${SLURMD_NODENAME:-$(uname -n)} task=${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:-}}_${SLURM_ARRAY_TASK_ID:-0}
say() { echo "shardprep: node $node: $*" >&2; }
refuse() { say "$@"; exit 2; }

if [[ -z ${SLURM_JOB_ID:-} || -z ${SLURM_ARRAY_TASK_ID:-}${shardprep_what:-} ]]; then
  script=$(realpath -- "$0") # in a job this is Slurm's copy
  [[ $0 != */slurm_script ]] || script=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
  (($#)) || set -- DATA
  refuse "not a task of a job array, so there is no shard to make; type: sbatch --array=0-9 $script$(printf ' %q' "$@")"
fi
# They are used in arithmetic, where bash would evaluate any other text, and in names of files.
for name in JOB_ID ARRAY_JOB_ID ARRAY_TASK_ID ARRAY_TASK_COUNT RESTART_COUNT NTASKS JOB_NUM_NODES CPUS_PER_TASK \
  CPUS_ON_NODE; do
  name=SLURM_$name
  [[ ${!name:-0} =~ ^(0|[1-9][0-9]{0,9})$ ]] || refuse "$name is $(printf %q "${!name}"), expected a number from Slurm"
done

# Move the log by rename, so that later messages of Slurm itself (time limit, memory) still reach it. A restart must
# not overwrite the log of the run before.
log=shardprep-$task.log
if [[ $log -ef /proc/self/fd/1 ]]; then # otherwise the user gave --output=
  if mkdir -p logs && [[ $(stat -Lc %d logs) = $(stat -c %d .) ]]; then
    [[ ! -e logs/$log ]] || mv "logs/$log" "logs/${log%.log}.before-restart-${SLURM_RESTART_COUNT:-0}.log"
    mv "$log" "logs/$log"
  else
    say "logs/ cannot be created, or is on another file system: the log stays at $PWD/$log"
  fi
fi

# A folder given as an argument must have a plan. For the default folder the worker makes one.
place=(--output_dir /data/processed)
if (($#)) && [[ $1 != -* ]]; then place=(--output_dir "$1" --planned); shift; fi
# Without --ntasks there is a task a node.
num_nodes=${SLURM_JOB_NUM_NODES:-1}
num_tasks=${SLURM_NTASKS:-$num_nodes}
if [[ -n ${shardprep_what:-} ]]; then
  what=$shardprep_what
elif ((num_tasks > 1)); then
  shardprep_command=(run "${place[1]}")
  ((${SLURM_ARRAY_TASK_COUNT:-1} == 1)) || shardprep_command+=(--array)
  what="its share of the shards"
  shards="" # `run` adds them to the record
else
  shardprep_command=(--shard_id "$SLURM_ARRAY_TASK_ID" "${place[@]}")
  what="shard ${SLURM_ARRAY_TASK_ID:-}"
fi

# Write a record of this attempt for `shardprep status`: what Slurm told this task, and how it ended. The worker removes
# the record once all shards are made. Errors with the record never stop the work.
unset SHARDPREP_ATTEMPT
record="" stage="set-up" killed_by="" stop_signal="" stopped=""
begin_record() {
  local root=${shardprep_folder:-${place[1]}} plan log=""
  plan=$(read_start "$root/plan.json" | sed -n 's/.*"plan_id": *"\([0-9a-f]*\)".*/\1/p') || true
  [[ -n $plan ]] || return 0
  [[ ! -f /proc/$$/fd/1 ]] || log=$(readlink "/proc/$$/fd/1")
  [[ $root = /* ]] || root=$PWD/$root
  record=$root/jobs/attempts/$task.r${SLURM_RESTART_COUNT:-0}
  print_begin | append_to_record || record=""
} 2>/dev/null
# In another user's data set any name may be a link or a FIFO: the first could lead to a file of this user, the second
# would make a task wait for ever. So nothing is opened through them.
read_start() { dd if="$1" iflag=nofollow,nonblock bs=400 count=1 status=none; }
append_to_record() (
  umask go-w # of a group that shares DATA, nobody else may write into the record
  folder=${record%/jobs/attempts/*}
  cd -P -- "$folder" || exit
  for folder in jobs attempts; do
    below=$PWD/$folder
    [[ -d $folder ]] || mkdir "$folder"
    cd -P "./$folder" && [[ $PWD = "$below" ]] || exit # otherwise it was a link
  done
  file=${record##*/}
  [[ ! -e $file || -f $file ]] || exit
  dd of="$file" oflag=append,nofollow,nonblock conv=notrunc bs=64k status=none
)
print_begin() {
  echo begin
  env | grep -E '^SLURM(D_NODENAME|_(ARRAY_|RESTART_|JOB_|CPUS_PER_|MEM_PER_)[A-Z_]*)='
  printf '%s\n' "plan_id=$plan" "shards=${shards-${SLURM_ARRAY_TASK_ID:-}}" \
    "identity=${shardprep_identity:-$(stat -Lc %i "$root").$(stat -fLc %i "$root")}" "time=$(date +%s)" \
    "log=${log//$'\n'/?}"
}
# shellcheck disable=SC2317,SC2329  # a trap calls it
end_record() {
  local code=$1
  set +e
  if [[ -z $record ]] && ((code)); then begin_record; fi # the worker may have made the plan by now
  # After success the worker has removed the record. If it still exists, the node failed, although srun exited with 0,
  # and a record without an end says so.
  [[ ($code != 0 || $stage != work) && -f $record ]] || return
  { printf '%s\n' end "time=$(date +%s)" "exit_code=$code" "stage=$stage" "killed_by=$killed_by" \
      "signal=$stop_signal" "stopped=$stopped"
    # Before Slurm 24.11 a task is not told its time limit. A retry needs it.
    [[ -n ${SLURM_JOB_END_TIME:-} || $code = 0 ]] ||
      echo "limit=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%l)"
  } | append_to_record
} 2>/dev/null
trap 'end_record $?' EXIT
begin_record

# On scancel, preemption and time limit Slurm itself sends the worker TERM; `--signal=B:` reaches only this shell.
# In both cases this shell sends USR1 to srun, which forwards it to the worker. It does not send TERM, after which srun
# would kill the worker at once, and its temporary file would stay.
srun_pid="" num_signals=0
# shellcheck disable=SC2317,SC2329  # a trap calls it
pass_on() {
  num_signals=$((num_signals + 1)) stop_signal=$1 stopped=${stopped:-$(date +%s)}
  say "got $1, stopping $what"
  [[ -n $srun_pid ]] || exit 75
  kill -USR1 "$srun_pid" 2>/dev/null || true
}
trap 'pass_on TERM' TERM
trap 'pass_on USR1' USR1

# A function, so that the file does not see this script's arguments. Few such files work under -eu.
source_setup() {
  [[ -r $SHARDPREP_SETUP && -f $SHARDPREP_SETUP ]] ||
    refuse "SHARDPREP_SETUP=$SHARDPREP_SETUP is not a readable file (in $PWD); correct the path or unset it"
  set +euo pipefail
  # shellcheck source=/dev/null
  source "$(realpath -- "$SHARDPREP_SETUP")" || say "$SHARDPREP_SETUP ended with status $?"
  set -euo pipefail
}
[[ -z ${SHARDPREP_SETUP:-} ]] || source_setup
trap 'end_record $?' EXIT # the file may have set its own trap
stage=start
read -ra srun_args <<<"${SHARDPREP_SRUN_ARGS:-}"
read -ra container <<<"${SHARDPREP_EXEC:-}"

# The next two scripts run where the worker will run: inside srun and the container.
# shellcheck disable=SC2016  # srun's shell expands it
launch='python=$1 start=$2; shift 2
[ -n "$python" ] || python=$(command -v python || command -v python3) || python=python3
command -v "$python" >/dev/null || {
  echo "shardprep: node ${SLURMD_NODENAME:-$(uname -n)}: no $python here;" \
    "set SHARDPREP_PYTHON, or SHARDPREP_SETUP to a file that activates its environment" >&2; exit 2; }
export PYTHONSAFEPATH=1 # Python 3.13 imports linecache, before it runs the first statement
exec "$python" -c "$start" "$@"'
# The current folder, which may contain a preprocess.py, comes last on sys.path, before anything is imported, and a data
# set of somebody else does not come at all. An old Python must parse this code.
start='import sys
sys.path[:] = [place for place in sys.path if place]
import os
os.environ.pop("PYTHONSAFEPATH", None)
from importlib.util import find_spec
if not find_spec("preprocess") and not os.path.lexists("plan.json"):
    sys.path.append("")
found = find_spec("preprocess")
missing = [name for name in ("numpy", "orjson", "tokenizers", "tqdm") if not find_spec(name)]
# find_spec("preprocess.plan") runs preprocess, which must not be a script of the user.
if not (found and found.submodule_search_locations and find_spec("preprocess.plan")):
    missing.insert(0, "preprocess.plan")
if missing or sys.version_info < (3, 10):
    import platform
    where = found.origin or list(found.submodule_search_locations)[0] if found else "nowhere"
    sys.stderr.write("shardprep: node %s: python %s (%s) is not a Python 3.10+ with shardprep: not found: %s; "
        "preprocess is at: %s; install shardprep for this python, or set SHARDPREP_PYTHON, or SHARDPREP_SETUP to a "
        "file that activates its environment\n" % (os.environ.get("SLURMD_NODENAME") or platform.node(), sys.executable,
        platform.python_version(), ", ".join(missing) or "-", where))
    sys.exit(2)
import runpy
runpy.run_module("preprocess", run_name="__main__", alter_sys=True)'

# Unset variables that srun would read as options, left from an allocation in which sbatch was typed. If both variables
# for memory are set, one of them is left over, too. Without them the step gets the memory of the job.
unset "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}" "${!SLURM_STEP@}" SLURM_DISTRIBUTION SLURM_EXACT SLURM_OVERLAP
[[ -z ${SLURM_MEM_PER_CPU:-} || -z ${SLURM_MEM_PER_NODE:-} ]] || unset SLURM_MEM_PER_CPU SLURM_MEM_PER_NODE

[[ -z $record ]] || export SHARDPREP_ATTEMPT=$record # after the set-up: only the worker may remove the record
# A job may have more CPUs than it asked for: all of a node that is not shared, or all threads of its cores.
num_cpus=${SLURM_CPUS_PER_TASK:-1}
num_given=${SLURM_CPUS_ON_NODE:-0}
tasks_on_node=$(((num_tasks + num_nodes - 1) / num_nodes))
if ((num_tasks == 1)); then
  ((num_given <= num_cpus)) || num_cpus=$num_given
  step=(--ntasks=1 --cpus-per-task="$num_cpus")
  export SLURM_CPUS_PER_TASK=$num_cpus
else
  # If a task or a node fails, the others make its shards.
  step=(--nodes="$num_nodes" --ntasks="$num_tasks" --kill-on-bad-exit=0 --wait=0 --no-kill)
  if ((num_given > tasks_on_node * num_cpus)); then
    unset SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK # nodes may differ: each divides its own CPUs
  else
    step+=(--cpus-per-task="$num_cpus")
  fi
fi
# srun ends with this code if it could not begin the step, so that nothing of it ran: slurmctld was away, or refused it.
# No worker, shell or signal has this code. With any other one the work began, and is not begun again here.
no_step=199
# srun does not inherit --cpus-per-task. --export=ALL is needed after `sbatch --export=NONE`.
run_step() {
  SLURM_EXIT_ERROR=$no_step srun "${step[@]}" --export=ALL ${srun_args[@]+"${srun_args[@]}"} \
    ${container[@]+"${container[@]}"} sh -c "$launch" sh "${SHARDPREP_PYTHON:-}" "$start" \
    "${shardprep_command[@]}" "$@" &
  srun_pid=$! stage=work
  # A trapped signal interrupts `wait`. Repeat it until no signal came: only then it returns the worker's exit code.
  until seen=$num_signals rc=0; wait "$srun_pid" || rc=$?; ((num_signals == seen)); do :; done
  ((rc >= 0)) || rc=75 # bash may lose the code of a program that ends just as a signal comes
}
# A slurmctld that restarts takes a minute, and one that is away may take an hour. If it answers, but lets no step begin,
# that is tried three times in all.
num_refused=0 delay_s=5 until_s=$((SECONDS + 3600))
while run_step "$@"; ((rc == no_step && num_signals == 0)); do
  stage=start srun_pid=""
  if scontrol show job "$SLURM_JOB_ID" >/dev/null 2>&1; then num_refused=$((num_refused + 1)); fi
  ((num_refused < 3 && SECONDS < until_s)) || break
  say "srun could not begin $what, see its messages above; trying again in $delay_s s"
  sleep "$delay_s" &
  wait "$!" || true
  delay_s=$((delay_s < 30 ? 2 * delay_s : 60))
done
if ((rc && num_tasks > 1)) && [[ -n $record && ! -e $record ]]; then # the task that sees all shards made removes it
  say "a task ended with exit code $rc, and the others made its shards"
  rc=0
fi
if ((rc == 255 || rc == no_step)); then # not codes of the worker
  say "$what did not start: srun failed, see its messages above"
  rc=75 stage=start
elif ((rc >= 128)); then # killed by a signal; Slurm mangles such codes
  why="before it could clean up"
  ((num_signals)) || killed_by=$((rc - 128)) why="by signal $((rc - 128)) (9 is often memory: try a larger --mem)"
  say "$what was killed $why; type the same sbatch line to make it again"
  rc=75
fi
if ((rc)) || [[ -n ${shardprep_what:-} ]]; then say "$what ended with exit code $rc"; fi
if declare -F shardprep_end >/dev/null; then shardprep_end "$rc"; fi # of a verify job
exit "$rc"
