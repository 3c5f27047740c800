#!/bin/bash
# Make the environments of the other loaders: benchmarks/peers/setup.sh FOLDER [PYTHON]
#
# Two, as mosaicml-streaming wants older versions of NumPy and of the hub's client than the others
# do. 12 GB of disk; nothing of it is a dependency of zephon_mm. The versions are those that were
# compared; at the end it prints the setting that `python -m benchmarks.peers` takes.
set -euo pipefail
folder=${1:?give the folder of the environments} python=${2:-python3}
torch="torch==2.14.1 torchvision==0.29.1"
work="psutil tokenizers simplejpeg"

make_one() {
  test -x "$folder/$1/bin/python" || "$python" -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --upgrade pip
  # shellcheck disable=SC2086
  "$folder/$1/bin/pip" install --quiet $torch
  "$folder/$1/bin/pip" install --quiet $work "${@:2}"
}

make_one one webdataset==1.0.2 grain==0.2.18 megatron-energon==7.4.1 zephon==0.2.0 \
  litdata==0.2.76 datasets==5.2.0 pyarrow
make_one two mosaicml-streaming==0.13.0
echo "export PEERS_PYTHON=$folder/one/bin/python:$folder/two/bin/python"
