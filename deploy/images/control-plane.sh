#!/bin/sh
# Runs one process of the control plane, or a command of manage.py, in place of this shell.
set -eu
cd /opt/switchyard-control
python=.venv/bin/python
process=${1:-}
[ $# -eq 0 ] || shift

case $process in
  manage) exec "$python" manage.py "$@" ;;
  web) exec "$python" -m controlplane.processes web --host 0.0.0.0 --agent-host 0.0.0.0 "$@" ;;
  *) exec "$python" -m controlplane.processes "$process" "$@" ;;
esac
