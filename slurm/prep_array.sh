#!/bin/bash
# One shard a task of a job array: task N makes shard N of the data set in DATA.
#
#   sbatch slurm/prep_array.sh                                     shards 0-9 into /data/processed
#   sbatch --array=0-99 slurm/prep_array.sh DATA [worker's flags]     shards 0-99 of the plan in DATA
#
# No partition line: choose it by `sbatch --partition=amx-part ...` or SBATCH_PARTITION=amx-part.
# `--array=0-99%20` runs 20 at once. Time and memory are the site's defaults: --time=, --mem=.
# `--signal=B:USR1@60` gives tasks a minute before the time limit instead of KillWait (30 s).
#
# Environment, all optional:
#   SHARDPREP_SETUP       a file to source first: modules, conda, a virtual environment
#   SHARDPREP_PYTHON      the interpreter (default: python, or else python3, where the worker runs)
#   SHARDPREP_SRUN_ARGS   more arguments of srun, split at blanks: --container-image=... (pyxis)
#   SHARDPREP_EXEC        put before the interpreter, split at blanks: apptainer exec image.sif
#
# Ends with the worker's exit code: 0 done; 2 usage, or no working package; 65 bad input; 66 no such
# shard or input; 73, 74 cannot write, or read; 75 stopped, run me again; 78 another plan. Only missing
# shards are made, so the same line again mends whatever went wrong. It never requeues itself.
#
# `shardprep submit DATA` runs this same script with a head of its own (see it with --dry_run), which sets
# shardprep_command, the worker's arguments for this task, and shardprep_what, their name in messages.
#
#SBATCH --job-name=shardprep
#SBATCH --array=0-9
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --open-mode=append
# Not logs/...: Slurm makes no folder, and a task whose log cannot be opened dies without a word. The
# log begins here, in the folder of submission, and is moved to logs/ below.
#SBATCH --output=shardprep-%A_%a.log
set -euo pipefail

node=${SLURMD_NODENAME:-$(uname -n)}
refuse() { echo "shardprep: node $node: $*" >&2; exit 2; }

if [[ -z ${SLURM_JOB_ID:-} || -z ${SLURM_ARRAY_TASK_ID:-}${shardprep_what:-} ]]; then
  again=$(printf '%q ' "$(realpath -- "$0")" "$@")
  # In a job $0 is Slurm's own copy of the script; Slurm knows what was submitted, with its arguments.
  [[ $0 != */slurm_script ]] || again=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')" "
  [[ -n ${shardprep_what:-} ]] || { again="--array=0-9 $again"; (($#)) || again+=DATA; }
  refuse "not a task of a job array, so no shard to make; type: sbatch ${again% }"
fi
# The log moves by rename: the file stays the same, so what Slurm itself still writes (time limit, memory)
# goes along. Another file system under logs/ would need a copy and lose that: then it stays where it is.
task=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}_${SLURM_ARRAY_TASK_ID:-0}
log=shardprep-$task.log
if [[ $log -ef /proc/self/fd/1 ]]; then # else --output= was given: the user knows better
  if mkdir -p logs && [[ $(stat -Lc %d logs) = $(stat -c %d .) ]]; then
    # A task that Slurm started again must not overwrite what its earlier run left.
    [[ ! -e logs/$log ]] || mv "logs/$log" "logs/shardprep-$task.before-restart-${SLURM_RESTART_COUNT:-0}.log"
    mv "$log" "logs/$log"
  else
    echo "shardprep: logs/ cannot be made, or is on another file system: the log stays in $PWD/$log" >&2
  fi
fi

# A folder that is named has a plan; without one, the worker plans.
place=(--output_dir /data/processed)
if (($#)) && [[ $1 != -* ]]; then place=(--output_dir "$1" --planned); shift; fi
[[ -n ${shardprep_what:-} ]] || shardprep_command=(--shard_id "$SLURM_ARRAY_TASK_ID" "${place[@]}")

# The record of this attempt: a file of JSON lines in DATA/jobs/attempts, read by `slurm status`. It is opened
# once, here, and removed by the worker that made everything: srun may end with 0 where its node failed. Nothing
# of it may stop the work: what cannot be written is left.
line="" record="" stage="set-up" killed_by="" stop_signal="" left_s="" log_start=0
field() { # NAME VALUE: a number as it is, else a text, escaped
  local value=${2//[[:cntrl:]]/?}
  [[ -n $value ]] || return 0
  [[ $value =~ ^(0|[1-9][0-9]{0,17})$ ]] || { value=${value//\\/\\\\} value=\"${value//\"/\\\"}\"; }
  line+=",\"$1\":$value"
}
write_record() { printf '{"event":"%s"%s}\n' "$1" "$line" >&"$record" || true; } 2>/dev/null
begin_record() {
  local root=${shardprep_folder:-${place[1]}} facts plan="" mem=${SLURM_MEM_PER_NODE:-}
  { read -rN 400 plan <"$root/plan.json" || true; } 2>/dev/null
  [[ $plan =~ \"plan_id\":\ ?\"([0-9a-f]+)\" ]] || return 0
  plan=${BASH_REMATCH[1]}
  facts=$(stat -Lc '%i %s' "$root" /proc/$$/fd/1) || return 0
  [[ $root = /* ]] || root=$PWD/$root
  SHARDPREP_ATTEMPT=$root/jobs/attempts/$task.r${SLURM_RESTART_COUNT:-0}
  # A link in a data set of somebody else may lead to a file of this user's.
  [[ ! -L $root/jobs && ! -L $root/jobs/attempts && ! -L $SHARDPREP_ATTEMPT ]] ||
    { unset SHARDPREP_ATTEMPT; return 0; }
  { exec {record}>>"$SHARDPREP_ATTEMPT"; } 2>/dev/null ||
    { mkdir -p "$root/jobs/attempts" && exec {record}>>"$SHARDPREP_ATTEMPT"; } 2>/dev/null ||
    { record=""; unset SHARDPREP_ATTEMPT; return 0; }
  log_start=${facts##* } line=""
  [[ -n $mem || -z ${SLURM_MEM_PER_CPU:-} ]] || mem=$((SLURM_MEM_PER_CPU * ${SLURM_CPUS_PER_TASK:-1}))
  field version 1
  field by "${shardprep_by:-sbatch}"
  field plan_id "$plan"
  field identity "${facts%% *}"
  [[ -n ${shardprep_verified:-} ]] || field shards "${shards:-${SLURM_ARRAY_TASK_ID:-}}"
  field job_id "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"
  field index "${SLURM_ARRAY_TASK_ID:-0}"
  field raw_job_id "$SLURM_JOB_ID"
  field num_restarts "${SLURM_RESTART_COUNT:-0}"
  field user "${SLURM_JOB_USER:-${USER:-}}"
  field node "$node"
  field time "$(printf '%(%s)T' -1)"
  field num_cpus "${SLURM_CPUS_PER_TASK:-1}"
  [[ $mem = 0 ]] || field mem_mb "$mem"
  [[ ! -f /proc/$$/fd/1 ]] || field log "$(readlink /proc/$$/fd/1)"
  write_record begin
}
# What the kernel counted for the whole job: peak memory, and how many processes it killed for memory.
# shellcheck disable=SC2317
read_cgroup() {
  local kinds path root name value
  while IFS=: read -r _ kinds path; do
    [[ $path =~ ^(.*/job_[0-9]+) ]] || continue
    root=/sys/fs/cgroup${BASH_REMATCH[1]}
    [[ ,$kinds, != *,memory,* ]] || root=/sys/fs/cgroup/memory${BASH_REMATCH[1]}
    [[ -z $kinds || ,$kinds, = *,memory,* ]] || continue
    for name in memory.peak memory.max_usage_in_bytes; do
      [[ ! -r $root/$name ]] || field peak_bytes "$(<"$root/$name")"
    done
    while read -r name value; do [[ $name != oom_kill || $value = 0 ]] || oom=1; done \
      < <(cat "$root/memory.events" "$root/memory.oom_control" 2>/dev/null)
  done </proc/self/cgroup
}
# shellcheck disable=SC2317
end_record() {
  local code=$1 oom="" words=""
  set +e
  [[ -n $record ]] || { ((code)) && begin_record; }  # the worker may have made the plan meanwhile
  [[ -n $record ]] || return 0
  line=""
  field time "$(printf '%(%s)T' -1)"
  field exit_code "$code"
  field stage "$stage"
  field killed_by "$killed_by"
  field signal "$stop_signal"
  stopped_at
  field left_s "$left_s"
  read_cgroup
  # Slurm says in the log why it stopped a task, and what no cgroup counts. Later it may have forgotten both.
  [[ ! -f /proc/$$/fd/1 ]] || words=$(tail -c "+$((log_start + 1))" /proc/$$/fd/1 2>/dev/null | tail -c 16384 | tr -d '\0')
  [[ ! $words =~ oom[-_]kill|': Out Of Memory'|exceeded\ (job\ )?memory\ limit ]] || oom=1
  case $words in
    *"DUE TO TIME LIMIT"*) field stopped_by "time limit" ;;
    *"DUE TO NODE FAILURE"* | *"srun: error: Node failure"*) field stopped_by "node failure" ;;
    *"DUE TO PREEMPTION"*) field stopped_by preemption ;;
    *"*** JOB "*" CANCELLED AT"*) field stopped_by cancel ;;
    *"*** STEP "*" CANCELLED AT"*) field stopped_by "cancelled step" ;;
  esac
  field oom "$oom"
  write_record end
}
# shellcheck disable=SC2317
stopped_at() { # how long it was until the time limit, when this was told to stop first
  [[ -n $left_s || -z ${SLURM_JOB_END_TIME:-} ]] || left_s=$((SLURM_JOB_END_TIME - $(printf '%(%s)T' -1)))
  [[ $left_s != -* ]] || left_s=0
}
trap 'end_record $?' EXIT
begin_record
# The worker writes it into the manifest, so that the set-up's time counts. Slurm before 24.11 does not say it.
export SLURM_JOB_START_TIME="${SLURM_JOB_START_TIME:-$(printf '%(%s)T' -1)}"
((${SLURM_NTASKS:-1} == 1 && ${SLURM_JOB_NUM_NODES:-1} == 1)) ||
  refuse "${SLURM_NTASKS:-1} tasks on ${SLURM_JOB_NUM_NODES:-1} nodes: each would make the same shard" \
    "${SLURM_ARRAY_TASK_ID:-}; leave out --ntasks and --nodes, and use more array indices and --cpus-per-task"


# Signals. On scancel, preemption and time limit Slurm itself sends the worker TERM; `--signal=B:` reaches
# this shell alone. Either way the worker is told by USR1, the one that srun passes on: given TERM, srun
# kills the task at once, and its temporary file would stay.
srun_pid="" num_signals=0 what=${shardprep_what:-shard ${SLURM_ARRAY_TASK_ID:-}}
# shellcheck disable=SC2317  # the traps call it
pass_on() {
  num_signals=$((num_signals + 1)) stop_signal=$1
  stopped_at
  echo "shardprep: node $node: $1, telling $what to stop" >&2
  [[ -n $srun_pid ]] || exit 75
  kill -USR1 "$srun_pid" 2>/dev/null || true
}
trap 'pass_on TERM' TERM
trap 'pass_on USR1' USR1

# A function hides this script's arguments from the file; few such files bear -eu.
source_setup() {
  [[ -r $SHARDPREP_SETUP && -f $SHARDPREP_SETUP ]] ||
    refuse "SHARDPREP_SETUP=$SHARDPREP_SETUP is no readable file (seen from $PWD); mend the path or unset it"
  set +euo pipefail
  # shellcheck source=/dev/null
  source "$(realpath -- "$SHARDPREP_SETUP")" || echo "shardprep: $SHARDPREP_SETUP ended with status $?" >&2
  set -euo pipefail
}
[[ -z ${SHARDPREP_SETUP:-} ]] || source_setup
trap 'end_record $?' EXIT # the file may have set another one
stage=start
read -ra srun_args <<<"${SHARDPREP_SRUN_ARGS:-}"
read -ra container <<<"${SHARDPREP_EXEC:-}"

# These two run where the worker will: inside srun, and inside the container. Some 20 ms; the specs are only
# looked up, and nothing is imported. No f-strings: an old Python must be able to read its own refusal. The
# current folder is looked into last: it may have a preprocess.py, or a random.py, of its own.
# shellcheck disable=SC2016  # srun's shell expands them
launch='python=$1 check=$2; shift 2
[ -n "$python" ] || python=$(command -v python || command -v python3) || python=python3
command -v "$python" >/dev/null || {
  echo "shardprep: node ${SLURMD_NODENAME:-$(uname -n)}: no $python here;" \
    "set SHARDPREP_PYTHON, or SHARDPREP_SETUP to a file that activates its environment" >&2; exit 2; }
exec "$python" -c "$check" "$@"'
check='import sys
from importlib.util import find_spec
# The current folder comes last, behind installed packages: it may have a preprocess.py of its own.
sys.path[:] = [place for place in sys.path if place]
if not find_spec("preprocess"):
    sys.path.append("")
import os, platform
def refuse(why):
    node = os.environ.get("SLURMD_NODENAME") or platform.node()
    facts = (node, sys.executable, platform.python_version(), why)
    sys.stderr.write("shardprep: node %s: python %s (%s) %s\n" % facts)
    sys.exit(2)
remedy = ("; install shardprep for this python (pip install), or set SHARDPREP_PYTHON, or SHARDPREP_SETUP "
    "to a file that activates its environment")
if sys.version_info < (3, 10):
    refuse("is too old, 3.10 is needed" + remedy)
found = find_spec("preprocess")
if found is None:
    refuse("cannot import the package preprocess" + remedy)
if not found.submodule_search_locations or not find_spec("preprocess.plan"):
    where = found.origin or list(found.submodule_search_locations)[0]
    refuse("finds %s in place of the package preprocess; rename it" % where + remedy)
missing = [name for name in ("numpy", "orjson", "tokenizers", "tqdm") if not find_spec(name)]
if missing:
    refuse("cannot import " + ", ".join(missing) + remedy)
run = """import sys; sys.path[:] = [place for place in sys.path if place] + %r; import runpy
runpy.run_module("preprocess", run_name="__main__", alter_sys=True)""" % [place for place in sys.path if not place]
os.execv(sys.executable, [sys.executable, "-c", run] + sys.argv[1:])'

# What srun would take for options of its own, left by an allocation in which sbatch was typed. Memory of both
# kinds excludes itself, and only one is this job's: without any, the step gets what the job has.
unset "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}" "${!SLURM_STEP@}" SLURM_DISTRIBUTION SLURM_EXACT SLURM_OVERLAP
[[ -z ${SLURM_MEM_PER_CPU:-} || -z ${SLURM_MEM_PER_NODE:-} ]] || unset SLURM_MEM_PER_CPU SLURM_MEM_PER_NODE

[[ -z $record ]] || export SHARDPREP_ATTEMPT # behind the set-up: only the worker may remove it
# srun does not inherit --cpus-per-task. --export=ALL: also after `sbatch --export=NONE`.
srun --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --export=ALL ${srun_args[@]+"${srun_args[@]}"} \
  ${container[@]+"${container[@]}"} sh -c "$launch" sh "${SHARDPREP_PYTHON:-}" "$check" \
  "${shardprep_command[@]}" "$@" &
srun_pid=$! stage=work

# A trapped signal ends `wait` before its time; only a wait that none ended has the worker's exit code.
until seen=$num_signals rc=0; wait "$srun_pid" || rc=$?; ((num_signals == seen)); do :; done
if ((rc == 255)); then # the worker has no such code
  echo "shardprep: node $node: $what did not start: srun failed, its words are above" >&2
  rc=75 stage=start
fi
# Above 128 a signal killed it, and Slurm mangles such codes. Whatever it had not finished does not count.
((rc < 128)) || {
  why="by signal $((rc - 128)) (9 is often memory: try a larger --mem)"
  ((num_signals == 0)) || why="before it could clean up"
  ((num_signals)) || killed_by=$((rc - 128))
  echo "shardprep: node $node: $what was killed $why; the same sbatch line makes it again" >&2
  rc=75
}
# For `shardprep status`, where Slurm keeps no accounts.
if [[ -n ${shardprep_verified:-} ]]; then # of a verify job: one line to grep, and whom to tell
  SHARDPREP_RESULT=verified
  ((rc == 0)) || SHARDPREP_RESULT="not verified:"
  echo "shardprep: $SHARDPREP_RESULT $shardprep_verified" >&2
  export SHARDPREP_RESULT=${SHARDPREP_RESULT%:} SHARDPREP_EXIT_CODE=$rc
  [[ -z ${shardprep_notify:-} ]] || bash -c "$shardprep_notify" ||
    echo "shardprep: node $node: --notify ended with exit code $?" >&2
fi
((rc == 0)) && [[ -z ${shardprep_what:-} ]] || echo "shardprep: node $node: $what ended with exit code $rc" >&2
exit "$rc"
