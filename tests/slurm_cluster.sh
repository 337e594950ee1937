#!/bin/bash
# A real Slurm cluster of several nodes on this one machine, for tests: as root, without systemd.
#
#   eval "$(tests/slurm_cluster.sh up)"     start it (or what is missing of it) and point this shell at it
#   tests/slurm_cluster.sh down             stop what `up` started, and remove its folder
#
# Everything lives in one folder: configuration, munge key and socket, states, logs. /etc/slurm,
# /etc/munge and a munged that already runs are neither read nor changed, so that a machine's own
# Slurm goes on undisturbed; clients find this cluster by SLURM_CONF alone.
#
# Options, by environment:
#   CLUSTER_DIR     its folder                                (${TMPDIR:-/tmp}/shardprep-slurm)
#   NUM_NODES       slurmds, named n1, n2, ...                (3)
#   NODE_PREFIX     n of these names: clusters side by side need other names, for cgroups are known by them
#   NODE_CPUS       CPUs each claims, whatever the machine has (8)
#   NODE_MEM_MB     memory each claims                        (8000)
#   KILL_WAIT       seconds from SIGTERM to SIGKILL; a busy worker needs more to end in order (5)
#   ACCOUNTING=1    slurmdbd and MariaDB too, for sacct       (0)
#   CGROUP=1        cgroups track and limit the jobs          (0)
#   EXTRA_CONF      more lines for slurm.conf, e.g. "MaxArraySize=5"
# Exit code 69: Slurm is not here and this machine can install nothing, or its slurmdbd and MariaDB do not fit each
# other; the one line on stderr says why.
set -euo pipefail

dir=${CLUSTER_DIR:-${TMPDIR:-/tmp}/shardprep-slurm}
num_nodes=${NUM_NODES:-3} prefix=${NODE_PREFIX:-n} node_cpus=${NODE_CPUS:-8} node_mem_mb=${NODE_MEM_MB:-8000}
accounting=${ACCOUNTING:-0} cgroup=${CGROUP:-0} extra_conf=${EXTRA_CONF:-}
marker=$dir/shardprep-test-cluster
hang_s=300 # nothing less decides: the machine may be busy
export SLURM_CONF=$dir/slurm.conf
export PATH=$PATH:/usr/sbin:/sbin

say() { echo "slurm_cluster: $*" >&2; }
die() { say "${@:2}"; exit "$1"; }

# until_true SECONDS COMMAND...: the command's first success within the time, or the end of the script.
until_true() {
  local deadline=$((SECONDS + $1)); shift
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < deadline)) || die 1 "no success in time: $* (logs in $dir/log)"
    sleep 0.1
  done
}

# pid_of NAME: the process we recorded under that name, if it still is ours. A pid alone may have
# been reused; ours carry this folder in their command line or environment.
pid_of() {
  local pid
  pid=$(cat "$dir/pid/$1" 2>/dev/null) && [[ -n $pid ]] || return 1
  grep -qsF -- "$dir" "/proc/$pid/cmdline" "/proc/$pid/environ" && echo "$pid"
}

# lock_ports FIRST: keep other clusters of this machine away from a block; a process holds the lock until `down`.
lock_ports() (
  exec 9>"/tmp/shardprep-ports-$1.lock" # not in TMPDIR, which others may have elsewhere
  flock -n 9 || exit 1
  sleep infinity >/dev/null 2>&1 &
  echo $! >"$dir/pid/ports"
)

# A block of 64 ports nobody listens on, remembered for the next `up`.
choose_ports() {
  local first offset
  if [[ -s $dir/ports ]]; then
    first=$(<"$dir/ports")
    pid_of ports >/dev/null || lock_ports "$first" || die 1 "another cluster has the ports from $first on"
    echo "$first"
    return
  fi
  for first in $(seq $((20000 + $$ % 100 * 64)) 64 30000); do
    for offset in $(seq 0 $((num_nodes + 2))); do
      (: <>"/dev/tcp/127.0.0.1/$((first + offset))") 2>/dev/null && continue 2
    done
    lock_ports "$first" || continue
    echo "$first" | tee "$dir/ports"
    return
  done
  die 1 "no free block of ports between 20000 and 30000"
}

write_slurm_conf() {
  local first_port=$1 host node
  host=$(hostname -s)
  # At random, so that no job of one cluster has the number of another one's.
  [[ -s $dir/first_job ]] || echo $((1000 + (RANDOM << 15 | RANDOM) % 60000000)) >"$dir/first_job"
  {
    cat <<CONF
ClusterName=shardprep
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$first_port
FirstJobId=$(<"$dir/first_job")
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire: a requeued job may start again after seconds, not after two minutes
AuthInfo=socket=$dir/munge.socket,cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/pid/slurmctld
SlurmdPidFile=$dir/pid/%n
SlurmctldLogFile=$dir/log/slurmctld
SlurmdLogFile=$dir/log/%n
MailProg=/bin/true
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=$((node_mem_mb / node_cpus))
# believe the claimed CPUs and memory
SlurmdParameters=config_overrides
# schedule at once: tests wait for it
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=1
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
# a busy machine is not a dead node; a test that kills one sets it down
SlurmdTimeout=600
MessageTimeout=100
ReturnToService=2
KillWait=${KILL_WAIT:-5}
# tests ask for what ended long ago
MinJobAge=7200
CONF
    if [[ $cgroup = 1 ]]; then
      printf '%s\n' ProctrackType=proctrack/cgroup TaskPlugin=task/cgroup
      printf '%s\n' CgroupAutomount=yes ConstrainRAMSpace=yes ConstrainSwapSpace=no >"$dir/cgroup.conf"
    else
      printf '%s\n' ProctrackType=proctrack/linuxproc TaskPlugin=task/none JobAcctGatherParams=OverMemoryKill
      # from 23.11 on slurmd begins with cgroups unless told not to; an older one knows no such word
      [[ $(slurmd -V) < "slurm-wlm 23.11" ]] || echo CgroupPlugin=disabled >"$dir/cgroup.conf"
    fi
    if [[ $accounting = 1 ]]; then
      printf '%s\n' AccountingStorageType=accounting_storage/slurmdbd AccountingStorageHost=127.0.0.1 \
        "AccountingStoragePort=$((first_port + 1))" "AccountingStoragePass=$dir/munge.socket"
    fi
    echo "$extra_conf"
    for node in $(seq "$num_nodes"); do
      echo "NodeName=$prefix$node NodeHostname=$host NodeAddr=127.0.0.1 Port=$((first_port + 2 + node))" \
        "CPUs=$node_cpus RealMemory=$node_mem_mb"
    done
    echo "PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE"
  } >"$SLURM_CONF"
}

start_munged() {
  pid_of munged >/dev/null && return
  [[ -s $dir/munge.key ]] || (umask 077 && head -c 1024 /dev/urandom >"$dir/munge.key")
  # --force: a test folder under /tmp has looser permissions above it than munged likes
  munged --force --socket="$dir/munge.socket" --key-file="$dir/munge.key" --pid-file="$dir/pid/munged" \
    --seed-file="$dir/munge.seed" --log-file="$dir/log/munged" 2>>"$dir/log/munged.start" ||
    die 1 "munged did not start: $(tail -n 1 "$dir/log/munged.start")"
  until_true "$hang_s" munge -n --socket="$dir/munge.socket"
}

start_accounting() {
  local why first_port=$1 sql=(mysql --no-defaults -uroot "--socket=$dir/db.socket")
  if ! pid_of mariadbd >/dev/null; then
    # its own: a mariadbd that starts removes the temporary tables of all others in a shared /tmp
    mkdir -p "$dir/db-tmp"
    [[ -d $dir/db/mysql ]] || TMPDIR=$dir/db-tmp mariadb-install-db --no-defaults --user=root --datadir="$dir/db" \
      --skip-test-db --auth-root-authentication-method=socket >"$dir/log/mariadb-install" 2>&1
    TMPDIR=$dir/db-tmp mariadbd --no-defaults --user=root --datadir="$dir/db" --socket="$dir/db.socket" --skip-networking \
      --pid-file="$dir/pid/mariadbd" --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 \
      >"$dir/log/mariadbd" 2>&1 </dev/null &
    until_true "$hang_s" "${sql[@]}" -e 'select 1'
  fi
  # StorageHost=localhost with a socket in MYSQL_UNIX_PORT: no TCP port, no password.
  (umask 077; cat >"$dir/slurmdbd.conf") <<CONF
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
DbdHost=localhost
DbdPort=$((first_port + 1))
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
LogFile=$dir/log/slurmdbd
PidFile=$dir/pid/slurmdbd
CONF
  pid_of slurmdbd >/dev/null || MYSQL_UNIX_PORT=$dir/db.socket slurmdbd
  # shellcheck disable=SC2016  # the inner shell expands it
  until_true "$hang_s" bash -c 'sacctmgr -n show cluster || grep fatal: "$1"' _ "$dir/log/slurmdbd"
  why=$(grep fatal: "$dir/log/slurmdbd") || return 0
  # Debian 13: the client library of MariaDB 11.8.9 refuses the first query of slurmdbd 24.11
  [[ $why != *_check_mysql_concat_is_sane* ]] || die 69 "this slurmdbd cannot use this MariaDB: $why"
  die 1 "slurmdbd did not start: $why"
}

# A start that failed says where, and what its logs end with: who called may remove the folder.
explain() {
  local code=$1 command=$2
  ((code == 0 || code == 69)) && return
  say "exit code $code after: $command"
  tail -n 5 "$dir"/log/* >&2 || true
}

up() {
  trap 'explain $? "$BASH_COMMAND"' EXIT
  ((EUID == 0)) || die 69 "needs root: slurmd starts jobs as any user"
  [[ ! -e $dir || -e $marker || -z $(ls -A "$dir") ]] || die 1 "$dir is not empty and not a test cluster's"
  ((${#dir} < 80)) || die 1 "$dir is too long a path: sockets lie in it"
  mkdir -p "$dir"/{pid,log,state,db}
  chmod 755 "$dir"
  : >"$marker"
  local first_port node packages=(slurm)
  [[ $accounting != 1 ]] || packages+=(accounts)
  "${BASH_SOURCE%/*}/install_packages.sh" "${packages[@]}" || exit
  first_port=$(choose_ports)
  write_slurm_conf "$first_port"
  start_munged
  [[ $accounting != 1 ]] || start_accounting "$first_port"
  pid_of slurmctld >/dev/null || slurmctld -f "$SLURM_CONF"
  until_true "$hang_s" scontrol ping
  for node in $(seq "$num_nodes"); do
    mkdir -p "$dir/spool-$prefix$node"
    pid_of "$prefix$node" >/dev/null || slurmd -f "$SLURM_CONF" -N "$prefix$node"
  done
  # shellcheck disable=SC2016  # the inner shell expands them
  until_true "$hang_s" bash -c '[[ $(sinfo -h -N -t idle,alloc,mix -o %N | wc -l) -ge $1 ]]' _ "$num_nodes"
  say "$num_nodes nodes up in $SECONDS s; state and logs in $dir"
  echo "export SLURM_CONF=$SLURM_CONF"
}

# stop NAME...: ask all of them to end, then wait for each: a slurmd takes two seconds.
stop() {
  local name pid pids=()
  for name; do
    pid=$(pid_of "$name") && kill "$pid" && pids+=("$pid")
  done
  for pid in "${pids[@]}"; do
    # shellcheck disable=SC2016  # the inner shell expands it
    until_true "$hang_s" bash -c '! kill -0 "$1"' _ "$pid"
  done
}

down() {
  [[ -e $marker ]] || die 0 "nothing of ours in $dir"
  if pid_of slurmctld >/dev/null; then
    scancel --user=root || true
    # jobs end first, or their processes would outlive the slurmd that watches them
    # shellcheck disable=SC2016
    timeout 120 bash -c 'while [[ -n $(squeue -h) ]]; do sleep 0.1; done' || say "some jobs did not end"
  fi
  local nodes=("$dir/pid/$prefix"[0-9]*)
  stop "${nodes[@]##*/}" slurmctld
  stop slurmdbd
  stop mariadbd munged ports
  rm -rf "$dir"
}

case ${1:-} in
  up) up ;;
  down) down ;;
  *) die 2 "usage: $0 up|down" ;;
esac
