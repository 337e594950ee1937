#!/bin/bash
# Run DDP training on any number of nodes. A job is requeued before its time limit ends it: see docs/cluster.md.
#
#   sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8 --time=12:00:00 \
#       slurm/train_ddp.sh examples/train_llama.py DATA CHECKPOINTS [its flags]
#
# The program must put whole checkpoints, files or folders, into CHECKPOINTS by rename. When the file SHARDPREP_STOP_FILE
# appears, it must save and exit with 75. The job is then requeued, at most SHARDPREP_MAX_REQUEUES (20) times, only with
# a newer checkpoint, and never after `scancel`. In a job array only the task itself is requeued; give each task its own
# CHECKPOINTS.
#
#   SHARDPREP_CHECKPOINTS   names of checkpoints: 'step-*.pt', 'checkpoint-*'. Default: all names with a number, and
#                           *.pt, *.pth, *.ckpt, *.safetensors, but no logs of TensorBoard, wandb and others
#   SHARDPREP_LAUNCHER      srun (default): one task per process, from --ntasks-per-node.
#                           torchrun: one task per node with SHARDPREP_PROCS processes (default: its GPUs, or 1)
#   SHARDPREP_SETUP         a file to source first: modules, conda, a virtual environment
#   SHARDPREP_PYTHON        the interpreter (default: python)
#   SHARDPREP_SRUN_ARGS     more options of srun: --container-image=... (pyxis)
#   SHARDPREP_EXEC          a command to put before the interpreter: apptainer exec --nv image.sif
#   MASTER_ADDR, MASTER_PORT   where the ranks meet (default: the first node, a port derived from the job id)
#
# The exit code is 0 if training finished, or else that of the first rank that failed (torchrun: in its last start).
# A rank killed by a signal counts as 75, because Slurm mangles codes from 128 on; the log names the signal.
#
#SBATCH --job-name=train
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --output=train-%j.log
set -euo pipefail

say() { echo "train_ddp: job ${SLURM_JOB_ID:-none}, run ${SLURM_RESTART_COUNT:-0}: $*" >&2; }
if (($# < 3)) || [[ -z ${SLURM_JOB_ID:-} || $3 = -* ]]; then
  say "type: sbatch --nodes=2 slurm/train_ddp.sh PROGRAM.py DATA CHECKPOINTS [flags]"
  exit 2
fi
# They are used in arithmetic, where bash would evaluate any other text, and in names of files.
numbers=(JOB_ID RESTART_COUNT ARRAY_JOB_ID ARRAY_TASK_ID JOB_NUM_NODES NTASKS NTASKS_PER_NODE CPUS_PER_TASK)
for name in "${numbers[@]/#/SLURM_}" SHARDPREP_MAX_REQUEUES; do
  [[ ${!name:-0} =~ ^(0|[1-9][0-9]{0,9})$ ]] || { say "$name is $(printf %q "${!name}"), expected a number"; exit 2; }
done
# The id of the last task of an array is also that of the array: with it, Slurm would requeue all tasks.
job=$SLURM_JOB_ID
if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then
  [[ -n ${SLURM_ARRAY_TASK_ID:-} ]] || { say "SLURM_ARRAY_JOB_ID without SLURM_ARRAY_TASK_ID, expected both"; exit 2; }
  job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi
checkpoints=$3
[[ -r $1 ]] || { say "no program $1 (relative to $PWD)"; exit 2; }
mkdir -p "$checkpoints"

source_setup() { # a function, so that the file does not see this script's arguments; few work under -eu
  set +euo pipefail
  # shellcheck source=/dev/null
  source "$(realpath -- "$SHARDPREP_SETUP")" || say "$SHARDPREP_SETUP ended with status $?"
  set -euo pipefail
}
[[ -z ${SHARDPREP_SETUP:-} ]] || source_setup
read -ra srun_args <<<"${SHARDPREP_SRUN_ARGS:-}"
read -ra container <<<"${SHARDPREP_EXEC:-}"
python=${SHARDPREP_PYTHON:-python}

# A file, because a signal does not reach the ranks through srun, torchrun and containers alike. Each run has its own:
# after the loss of a node, processes of the run before may still be alive.
run=${SLURM_RESTART_COUNT:-0} place=$(realpath -- "$checkpoints") # runs are numbered from 0
stop_file() { echo "$place/.stop-$SLURM_JOB_ID-$1"; }
SHARDPREP_STOP_FILE=$(stop_file "$run")
# The first rank that fails writes its exit code here. srun returns the highest code, which may be that of a rank that
# it killed, and torchrun always returns 1.
SHARDPREP_CODE_FILE=$place/.code-$SLURM_JOB_ID-$run
clean_up() {
  for ((n = 0; n <= run; n++)); do rm -f "$(stop_file "$n")" "$place/.code-$SLURM_JOB_ID-$n"-* || true; done
  rm -f "$place/.new-$SLURM_JOB_ID"-* || true
}
# Others may write to CHECKPOINTS, too. `touch` would follow a link to any file of this user; a rename replaces the link.
create_stop_file() {
  local temporary
  { temporary=$(mktemp "$place/.new-$SLURM_JOB_ID-XXXXXXXX") && mv -fT "$temporary" "$1"; } || say "cannot create $1"
}
clean_up
((run == 0)) || create_stop_file "$(stop_file $((run - 1)))" # stops such processes
# Whoever may write to CHECKPOINTS may also put a stop file there. The rank's shell has the same test.
has_own_stop_file() { [[ -f $SHARDPREP_STOP_FILE && ! -L $SHARDPREP_STOP_FILE && -O $SHARDPREP_STOP_FILE ]]; }
num_signals=0
# shellcheck disable=SC2317,SC2329  # a trap calls it
ask_to_stop() {
  num_signals=$((num_signals + 1))
  say "asked to stop; waiting for the program to save"
  create_stop_file "$SHARDPREP_STOP_FILE"
}
was_asked_to_stop() { ((num_signals > 0)) || has_own_stop_file; }
trap ask_to_stop USR1 TERM
trap clean_up EXIT
if ((run > ${SHARDPREP_MAX_REQUEUES:-20})); then
  say "requeued $run times, more than SHARDPREP_MAX_REQUEUES allows: not again"
  exit 75
fi

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export SHARDPREP_STOP_FILE SHARDPREP_CODE_FILE MASTER_ADDR="${MASTER_ADDR:-${hosts%%$'\n'*}}"
export MASTER_PORT="${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 10000))}"
# Print a line for each checkpoint, the newest last: time, number and name. A new checkpoint has a new line. A folder has
# no time, because a program may change files in it later.
list_checkpoints() {
  local names=(-name '*[0-9]*' -o -name '*.pt' -o -name '*.pth' -o -name '*.ckpt' -o -name '*.safetensors')
  local logs='.*/(events\.out\..*|(tmp|run|offline-run|version|logs?|tb|trace|memory)[-_].*|.*[-_.]logs?|.*\.tmp.*|'
  logs+='.*\.(log|jsonl?|txt|csv|tsv|ya?ml|toml|out|err|html|png|pdf|lock|py|sh)|'
  logs+='core\..*|profil.*|wandb.*|runs.*|.*tensorboard.*)'
  [[ -z ${SHARDPREP_CHECKPOINTS:-} ]] || names=(-name "$SHARDPREP_CHECKPOINTS") logs='.*\.tmp'
  find "$place" -mindepth 1 -maxdepth 1 ! -name '.*' ! -name $'*\n*' \( "${names[@]}" \) \
    -regextype posix-extended ! -iregex "$logs" \
    \( -type f -printf '%T@ %T@ %i %f\n' -o -type d -printf '%T@ 0 %i %f\n' \) | sort -n | cut -d ' ' -f 2-
}
before=$(list_checkpoints)
# Print the name of the newest checkpoint that was not there at the start, if there is one.
new_checkpoint() { list_checkpoints | grep -vxFf <(printf '%s\n' "$before") | tail -n 1 | cut -d ' ' -f 3- | tr -cd '[:print:]'; }

# The rank's shell ignores signals, which are for the program. Only the first rank that fails can link its file to the
# name, and not through a link or into a FIFO. The file is whole before, as srun kills a rank when another one fails.
# A rank that stopped on request exits with 0 under torchrun, which would start it again otherwise.
# shellcheck disable=SC2016  # the rank's own shell expands it
keep_code='trap : TERM USR1; rc=0; "$@" || rc=$?
  ((rc == 0)) || {
    new=$(mktemp "${SHARDPREP_CODE_FILE%/*}/.new-$SLURM_JOB_ID-XXXXXXXX") &&
      echo "$rc ${RANK:-0} ${SLURMD_NODENAME:-}" >"$new" &&
      ln -T "$new" "$SHARDPREP_CODE_FILE-${TORCHELASTIC_RESTART_COUNT:-0}"
    rm -f "$new"
  } 2>/dev/null
  stop=$SHARDPREP_STOP_FILE
  [[ -z ${TORCHELASTIC_RUN_ID:-} || $rc != 75 || ! -f $stop || -L $stop || ! -O $stop ]] || rc=0
  exit "$rc"'
common=(--export=ALL --kill-on-bad-exit=1)
# srun does not inherit --cpus-per-task. Leave it unset if the job has none: --cpus-per-task=1 would take most CPUs of
# an exclusive node away from the ranks.
cpus=${SLURM_CPUS_PER_TASK:-}
case ${SHARDPREP_LAUNCHER:-srun} in
  srun)
    # If the number of nodes was changed, SLURM_NTASKS still has the old value.
    ntasks=${SLURM_NTASKS:-1}
    [[ -z ${SLURM_NTASKS_PER_NODE:-} ]] || ntasks=$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))
    common+=(--ntasks="$ntasks" ${cpus:+--cpus-per-task="$cpus"})
    say "srun of $ntasks task(s) on $SLURM_JOB_NUM_NODES node(s), $MASTER_ADDR:$MASTER_PORT"
    # shellcheck disable=SC2016  # srun's shell expands them
    launch='export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID; '$keep_code
    command=("$python" -u)
    ;;
  torchrun)
    # The one task on each node gets the CPUs of all tasks that the job has there.
    common+=(--ntasks-per-node=1 --ntasks="$SLURM_JOB_NUM_NODES"
      ${cpus:+--cpus-per-task="$((cpus * ${SLURM_NTASKS_PER_NODE:-1}))"})
    procs=${SHARDPREP_PROCS:-${SLURM_GPUS_ON_NODE:-1}}
    say "torchrun on $SLURM_JOB_NUM_NODES node(s) x $procs, $MASTER_ADDR:$MASTER_PORT"
    # shellcheck disable=SC2016
    launch='export PET_NODE_RANK=$SLURM_NODEID; exec "$@"' # torchrun's own variable for --node_rank
    # `python -m` would look for modules in the current folder first, which may be a data set of somebody else.
    start='import sys; sys.path[:] = [place for place in sys.path if place]; '
    [[ -n ${PYTHONSAFEPATH:-} ]] || start+='import os; os.environ.pop("PYTHONSAFEPATH"); '
    start+='import runpy; '
    start+='runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)'
    command=(env PYTHONSAFEPATH=1 "$python" -u -c "$start" "--nnodes=$SLURM_JOB_NUM_NODES" "--nproc_per_node=$procs"
      "--master_addr=$MASTER_ADDR" "--master_port=$MASTER_PORT"
      --no_python bash -c "$keep_code" bash "$python" -u)
    ;;
  *) say "SHARDPREP_LAUNCHER is $SHARDPREP_LAUNCHER, expected srun or torchrun"; exit 2 ;;
esac
# srun ends with this code if it could not begin the step, so that nothing of it ran: slurmctld was away, or refused it.
# No shell or signal has this code; a rank that has it leaves a file. slurmctld may take an hour to come back; if it
# answers, but lets no step begin, that is tried three times in all.
no_step=199 num_refused=0 delay_s=5 until_s=$((SECONDS + 3600))
while :; do
  SLURM_EXIT_ERROR=$no_step srun "${common[@]}" ${srun_args[@]+"${srun_args[@]}"} ${container[@]+"${container[@]}"} \
    bash -c "$launch" bash "${command[@]}" "$@" &
  srun_pid=$!
  # A trapped signal interrupts `wait`. Repeat it until no signal came: only then it returns the program's exit code.
  until seen=$num_signals rc=0; wait "$srun_pid" || rc=$?; ((num_signals == seen)); do :; done
  ((rc >= 0)) || rc=75 # bash may lose the code of a program that ends just as a signal comes
  if ((rc != no_step)) || compgen -G "$SHARDPREP_CODE_FILE-*" >/dev/null; then break; fi
  if scontrol show job "$SLURM_JOB_ID" >/dev/null 2>&1; then num_refused=$((num_refused + 1)); fi
  rc=75
  if ((num_refused == 3 || SECONDS >= until_s)) || was_asked_to_stop; then
    say "srun could not begin the program, see its messages above"
    break
  fi
  say "srun could not begin the program, see its messages above; trying again in $delay_s s"
  sleep "$delay_s" &
  wait "$!" || true
  ! was_asked_to_stop || break
  delay_s=$((delay_s < 30 ? 2 * delay_s : 60))
done

code_file=$(find "$place" -maxdepth 1 -type f -user "$EUID" -name "${SHARDPREP_CODE_FILE##*/}-*" | sort -V | tail -n 1)
first=$(dd if="$code_file" iflag=nofollow,nonblock bs=400 count=1 status=none 2>/dev/null | tr -d '\0') || true
if [[ $first =~ ^([1-9][0-9]{0,2})\ ([0-9]{1,9})\ ([[:alnum:]._-]{0,255})$ ]]; then
  first_rc=${BASH_REMATCH[1]} first_rank=${BASH_REMATCH[2]} first_node=${BASH_REMATCH[3]}
  # With rc 0, torchrun started the ranks again and they succeeded, unless they stopped on request.
  if ((first_rc < 256)) && { ((rc != 0)) || { ((first_rc == 75)) && was_asked_to_stop; }; }; then
    rc=$first_rc
    ((rc < 128)) || say "rank $first_rank on $first_node was killed by signal $((rc - 128))"
    say "the first to fail was rank $first_rank on $first_node, with exit code $rc"
  fi
fi
if ((rc == 0)); then exit 0; fi
state=unknown runs=$run
if answer=$(squeue --noheader --jobs="$job" --Format=State:30,RestartCnt:10 2>/dev/null); then
  read -r state runs <<<"$answer" || true
fi
newer=$(new_checkpoint) || true
if [[ ${runs:-$run} != "$run" ]]; then
  say "Slurm has requeued the job and started another run: this one ends"
elif [[ $state != RUNNING && $state != unknown ]]; then
  say "the job is $state: Slurm decides whether it starts again"
elif ! was_asked_to_stop && [[ -e $SHARDPREP_STOP_FILE || -L $SHARDPREP_STOP_FILE ]]; then
  say "ended with exit code $rc; $SHARDPREP_STOP_FILE is not a file of this user, and counts for nothing: not requeued"
elif ! was_asked_to_stop && ((rc != 75 && rc != 128 + 15)); then # a preemption may signal only the ranks
  say "the program ended with exit code $rc without being asked to stop: not requeued"
elif [[ -z $newer ]]; then
  say "stopped with exit code $rc, but no new checkpoint in $checkpoints: not requeued; if its name has no number, set" \
    "SHARDPREP_CHECKPOINTS='NAME*'"
elif ((run >= ${SHARDPREP_MAX_REQUEUES:-20})); then
  say "requeued $run times, the most that SHARDPREP_MAX_REQUEUES allows: not again"
else
  say "saved $newer; requeueing"
  clean_up
  trap - TERM # with TERM Slurm ends this script
  if scontrol requeue "$job"; then sleep 60; fi # Slurm ends this script meanwhile
  say "scontrol requeue failed; submit the same line again"
fi
((rc < 128)) || rc=75
exit "$rc"
