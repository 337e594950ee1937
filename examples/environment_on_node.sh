# Unpack environment.tar, which must be beside this file, onto the node, once for all tasks of the node.
#
#   python3 -m venv ENV && ENV/bin/pip install . && tar -C ENV -cf environment.tar .
#   shardprep submit DATA --setup environment_on_node.sh
#
# A newer tar is unpacked into a new folder. slurm/prep_array.sh sources this file, so nothing here may exit.
# shellcheck shell=bash
tar=$(dirname "$(realpath "${BASH_SOURCE[0]}")")/environment.tar
environment=/tmp/shardprep-$(id -u)-$(stat -c %Y-%s "$tar")
if [[ ! -e $environment ]]; then
  unpacked=$(mktemp -d "$environment.XXXXXX")
  # This fails if another task of this node was first.
  { tar -xf "$tar" -C "$unpacked" && mv -T "$unpacked" "$environment"; } 2>/dev/null || rm -rf "$unpacked"
fi
if [[ -O $environment ]]; then # anyone can write to /tmp: do not use a folder of another user
  export PATH=$environment/bin:$PATH
else
  echo "environment_on_node.sh: $tar could not be unpacked into $environment" >&2
fi
