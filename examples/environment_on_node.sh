# Unpack environment.tar, which lies beside this file, onto the node: once for all tasks of the node.
#
#   python3 -m venv ENV && ENV/bin/pip install . && tar -C ENV -cf environment.tar .
#   shardprep submit DATA --setup environment_on_node.sh
#
# A newer tar gets another folder. slurm/prep_array.sh sources this file, so nothing here may exit.
# shellcheck shell=bash
tar=$(dirname "$(realpath "${BASH_SOURCE[0]}")")/environment.tar
environment=/tmp/shardprep-$(id -u)-$(stat -c %Y-%s "$tar")
if [[ ! -e $environment ]]; then
  unpacked=$(mktemp -d "$environment.XXXXXX")
  # It fails where another task of this node was first.
  { tar -xf "$tar" -C "$unpacked" && mv -T "$unpacked" "$environment"; } 2>/dev/null || rm -rf "$unpacked"
fi
if [[ -O $environment ]]; then # /tmp is everybody's: a folder of another user is not entered
  export PATH=$environment/bin:$PATH
else
  echo "environment_on_node.sh: $tar could not be unpacked into $environment" >&2
fi
