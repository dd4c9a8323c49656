#!/bin/sh
# What a container of a node or an ingress runs: `switchyard-agent node|ingress`. At its first start it joins the fleet by
# an invitation for that role, or as a task of ECS by the role of the task; from then on it runs the release that the control plane hands out, whatever its image is.
# All that it has lies in SWITCHYARD_PREFIX. It ends when its agent has left the fleet, with status 0, or when it is told to.
set -eu
ROLE=${1:-}
CODE=${SWITCHYARD_PREFIX:-/var/lib/switchyard}
ENGINES=${SWITCHYARD_IMAGE_ENGINES:-/opt/switchyard-engines}
export SWITCHYARD_PREFIX="$CODE"

say() { echo "switchyard: $*" >&2; }

lacking() {
  missing=''
  [ -n "${SWITCHYARD_SERVER:-}" ] || missing="$missing, SWITCHYARD_SERVER"
  [ -n "${SWITCHYARD_PIN:-}" ] || missing="$missing, SWITCHYARD_PIN"
  [ -n "${SWITCHYARD_INVITATION:-}" ] || missing="$missing, SWITCHYARD_INVITATION"
  printf '%s' "${missing#, }"
}

# The line that `switchyard machine add` prints, in three variables.
join() {
  if [ -n "${SWITCHYARD_INVITATION_FILE:-}" ]; then SWITCHYARD_INVITATION=$(cat "$SWITCHYARD_INVITATION_FILE"); fi
  missing=$(lacking)
  if [ -n "$missing" ]; then
    say "this $ROLE has not joined a fleet, and lacks $missing: run \`switchyard machine add --role $ROLE\`, and give what its line says (server, pinned key, token)"
    exit 64
  fi
  script=$(curl -fsS -k --pinnedpubkey "$SWITCHYARD_PIN" --noproxy '*' --max-time 60 "$SWITCHYARD_SERVER/join") || {
    say "the control plane at $SWITCHYARD_SERVER does not answer, or has another key than $SWITCHYARD_PIN"
    exit 1
  }
  printf '%s\n' "$script" | sh -s -- "$SWITCHYARD_INVITATION" ${SWITCHYARD_FIRST_PORT:+--port "$SWITCHYARD_FIRST_PORT"}
}

# A task of ECS has no invitation: it proves by the keys of its role which task it is, again until it may join.
join_as_task() {
  UNIT=$SWITCHYARD_UNIT
  export UNIT
  until task_joins; do
    say 'this task has not joined yet; another try follows'
    sleep 10
  done
}

task_joins() {
  set -- -fsS --noproxy '*' --max-time 60
  if [ -n "${SWITCHYARD_PIN:-}" ]; then set -- "$@" -k --pinnedpubkey "$SWITCHYARD_PIN"; fi
  script=$(curl "$@" "$SWITCHYARD_SERVER/join/aws") && printf '%s\n' "$script" | sh
}

# Engines of the image, linked into the cache of the volume. Agents use one whose packages are those of their release.
link_engines() {
  for engine in "$ENGINES"/engines/*; do
    at=$CODE/state/cache/engines/${engine##*/}
    [ -d "$engine" ] || continue
    if [ -e "$at" ] && [ ! -L "$at" ]; then continue; fi
    mkdir -p "$CODE/state/cache/engines" && ln -sfn "$engine" "$at"
  done
}

# Whether the agent, or what starts it again, is there.
runs() { [ -e "$CODE/current" ] && kill -0 "$(cat "$CODE/state/supervisor.pid")" 2>/dev/null; }

# Everything of this container: HAProxy and engines are told by their agents, or directly where those are gone.
stop() {
  trap '' TERM INT
  kill -KILL "$(cat "$CODE/state/supervisor.pid" 2>/dev/null)" 2>/dev/null || :
  if [ $$ -eq 1 ]; then kill -TERM -1 2>/dev/null || :; fi
  tries=0
  while others && [ $tries -lt 8 ]; do
    tries=$((tries + 1))
    sleep 1
  done
  exit 0
}

# Whether another process than this shell is left in this container; one that has ended has no command line.
others() {
  for folder in /proc/[0-9]*; do
    if [ "${folder#/proc/}" != $$ ] && grep -q . "$folder/cmdline" 2>/dev/null; then return 0; fi
  done
  return 1
}

case $ROLE in
  node | ingress) ;;
  *) say "'$ROLE' is no role: give node or ingress"; exit 64 ;;
esac
trap stop TERM INT
link_engines
if [ -e "$CODE/current" ]; then
  sh "$CODE/run" &
  echo $! >"$CODE/state/supervisor.pid"
else
  if [ -n "${AWS_CONTAINER_CREDENTIALS_RELATIVE_URI:-}" ] && [ -n "${SWITCHYARD_UNIT:-}" ]; then
    join_as_task
  else
    join
  fi
  runs || { say "it did not join"; exit 1; }
fi
unset SWITCHYARD_INVITATION
tail -n +1 -F "$CODE/state/machine.log" 2>/dev/null &
while runs; do
  sleep 1 &
  wait $! || :
done
say "its agent has left the fleet"
