#!/bin/bash
# Install the Debian packages that tests and lint need. This is the one place that does.
#
#   tests/install_packages.sh [slurm] [accounts] [shellcheck] [gcc]      (no word: all of them)
#
# It waits for other installations, WAIT_S seconds at most (600). SBIN names folders that are searched beside
# PATH (/usr/sbin:/sbin). The log of apt-get is kept only where it failed.
# Exit codes: 0 all of it is here; 1 this machine should have been able to install it; 69 it cannot install
# anything: no root, or no Debian or Ubuntu. The last line on stderr says what is missing and why.
set -euo pipefail

export LC_ALL=C PATH=$PATH:${SBIN-/usr/sbin:/sbin}
wait_s=${WAIT_S:-600}
groups=("$@")
((${#groups[@]})) || groups=(slurm accounts shellcheck gcc)

commands_of() {
  case $1 in
    slurm) echo munged slurmctld slurmd sbatch ;;
    accounts) echo slurmdbd mariadbd ;;
    shellcheck | gcc) echo "$1" ;;
    *) echo "usage: $0 [slurm] [accounts] [shellcheck] [gcc]; got $1" >&2 && return 2 ;;
  esac
}

packages_of() {
  case $1 in
    slurm) echo slurm-wlm munge ;;
    accounts) echo slurmdbd mariadb-server ;;
    shellcheck) echo shellcheck ;;
    gcc) echo gcc libc6-dev ;;
  esac
}

missing_commands() {
  local group name commands
  for group in "${groups[@]}"; do
    commands=$(commands_of "$group") || exit 2
    for name in $commands; do command -v "$name" >/dev/null || echo "$name"; done
  done
}

# apt_get ARGUMENTS...: again while another process holds one of apt's locks. apt itself waits for dpkg's
# lock, but not for the one on its lists.
apt_get() {
  while true; do
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get -o "DPkg::Lock::Timeout=$wait_s" "$@" >"$log" 2>&1 && return
    grep -qE 'Could not get lock|Unable to (lock|acquire)' "$log" && ((SECONDS < wait_s)) || return 1
    sleep 0.5
  done
}

missing=$(missing_commands)
[[ -n $missing ]] || exit 0
why="${missing//$'\n'/, } not found"
((EUID == 0)) || { echo "install_packages: $why, and only root can install packages" >&2 && exit 69; }
command -v apt-get >/dev/null || { echo "install_packages: $why, and there is no apt-get to install it" >&2 && exit 69; }

# One at a time: who waited finds the packages there.
exec 9>"${TMPDIR:-/tmp}/shardprep-packages.lock"
flock -w "$wait_s" 9 || { echo "install_packages: $why; another run of this script took over $wait_s s" >&2 && exit 1; }
missing=$(missing_commands)
[[ -n $missing ]] || exit 0

packages=()
for group in "${groups[@]}"; do
  # shellcheck disable=SC2207  # names without spaces
  packages+=($(packages_of "$group"))
done
echo "install_packages: installing ${packages[*]}" >&2
log=$(mktemp)
# Lists that could not be refreshed may still do. RUNLEVEL=1: the services of a package do not start.
apt_get update -qq || true
if ! apt_get install -y -qq --no-install-recommends "${packages[@]}"; then
  echo "install_packages: apt-get could not install ${packages[*]} (log: $log): $(tail -n 1 "$log")" >&2
  exit 1
fi
rm -f "$log"
missing=$(missing_commands)
[[ -z $missing ]] || { echo "install_packages: ${missing//$'\n'/, } still not found after installing ${packages[*]}" >&2 && exit 1; }
