#!/bin/sh
# What a container of the control plane runs: one of its processes, or a command of manage.py, instead of this shell.
set -eu
cd /opt/switchyard-control
python=.venv/bin/python
process=${1:-}
[ $# -eq 0 ] || shift

celery_worker() {
  exec "$python" -m celery --quiet -A controlplane.celery:app worker --hostname "$process@%h" \
    --without-gossip --without-mingle --loglevel info "$@"
}

case $process in
  web) exec "$python" -m controlplane.web --host 0.0.0.0 --agent-host 0.0.0.0 "$@" ;;
  controller) celery_worker --queues control --task-events "$@" ;;
  planner) celery_worker --queues planner --task-events "$@" ;;
  worker) celery_worker --pool prefork --concurrency 2 "$@" ;;
  beat)
    exec "$python" -m celery --quiet -A controlplane.celery:app beat --schedule "$SWITCHYARD_HOME/beat-schedule" \
      --pidfile= --loglevel warning "$@"
    ;;
  sender) exec "$python" manage.py sender "$@" ;;
  batch) exec "$python" manage.py batch "$@" ;;
  manage) exec "$python" manage.py "$@" ;;
esac
echo "switchyard: '$process' is no process of the control plane: give web, controller, worker, beat, batch, planner or sender, or manage and a command of manage.py" >&2
exit 64
