#!/bin/sh
# What a container of the control plane runs: one of its processes, or a command of manage.py, instead of this shell.
set -eu
cd /opt/switchyard-control
python=.venv/bin/python
process=${1:-}
[ $# -eq 0 ] || shift

case $process in
  web) exec "$python" -m controlplane.web --host 0.0.0.0 --agent-host 0.0.0.0 "$@" ;;
  controller) exec "$python" manage.py controller "$@" ;;
  worker)
    exec "$python" -m celery --quiet -A controlplane.celery:app worker --without-gossip --without-mingle \
      --pool prefork --concurrency 2 --loglevel info "$@"
    ;;
  beat)
    exec "$python" -m celery --quiet -A controlplane.celery:app beat --schedule "$SWITCHYARD_HOME/beat-schedule" \
      --pidfile= --loglevel warning "$@"
    ;;
  sender) exec "$python" manage.py sender "$@" ;;
  planner) exec "$python" manage.py planner "$@" ;;
  batch) exec "$python" manage.py batch "$@" ;;
  manage) exec "$python" manage.py "$@" ;;
esac
echo "switchyard: '$process' is no process of the control plane: give web, controller, worker, beat, batch, planner or sender, or manage and a command of manage.py" >&2
exit 64
