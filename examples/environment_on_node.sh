# Unpack environment.tar, which must be beside this file, onto the node, once for all tasks of the node.
#
#   python3 -m venv ENV && ENV/bin/pip install . && tar -C ENV -cf environment.tar .
#   shardprep submit DATA --setup environment_on_node.sh
#
# A newer tar is unpacked into a new folder. slurm/prep_array.sh sources this file, so nothing here may exit.
# shellcheck shell=bash
tar=$(dirname "$(realpath "${BASH_SOURCE[0]}")")/environment.tar
environment=/tmp/shardprep-$(id -u)-$(stat -c %Y-%s "$tar")
# Anyone can write to /tmp: do not use a folder or a link of another user.
is_own() { [[ -O $1 && -d $1 && ! -L $1 ]]; }
unpack() {
  local unpacked
  [[ ! -e $environment ]] || return 0 # another task of this node was first
  unpacked=$(mktemp -d "$environment$1XXXXXX")
  { tar -xf "$tar" -C "$unpacked" && mv -T "$unpacked" "$environment"; } 2>/dev/null || rm -rf "$unpacked"
}
if [[ ! -e $environment ]]; then
  lock=/tmp/shardprep-$(id -u)
  mkdir -m 700 "$lock" 2>/dev/null
  if is_own "$lock"; then
    # The lock goes with the processes that hold it. A task that hangs for ten minutes stops no others.
    (if flock -w 600 9; then rm -rf "$environment".??????; unpack .; else unpack .late.; fi) 9<"$lock"
  else
    unpack .late.
  fi
fi
if is_own "$environment"; then
  export PATH=$environment/bin:$PATH
else
  echo "environment_on_node.sh: $tar could not be unpacked into $environment" >&2
fi
