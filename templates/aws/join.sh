{% autoescape off %}#!/bin/sh
# Proves to the Switchyard at {{ server }} which machine of EC2 or task of ECS this is, and joins it. User data or the
# image of the agent runs it, with UNIT in the environment, and again until it succeeds. There is no secret in it.
set -eu
umask 077

SERVER='{{ server }}'
PIN='{{ pin }}'
STS_HOST='{{ sts_host }}'
CODE=${SWITCHYARD_PREFIX:-/opt/switchyard}
NONCE=${SWITCHYARD_PREFIX:-/var/lib/switchyard}.nonce
export SERVER STS_HOST UNIT

say() { printf 'switchyard: %s\n' "$*" >&2; }

fetch() {
  if [ -n "$PIN" ]; then set -- -k --pinnedpubkey "$PIN" "$@"; fi
  curl -sS --noproxy '*' --connect-timeout 10 --max-time 60 "$@"
}

find_python() {
  for name in python3.14 python3.13 python3.12 python3.11 python3; do
    if command -v "$name" >/dev/null 2>&1 && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
}

main() {
  if [ -e "$CODE/current" ]; then say 'this machine joined already'; exit 0; fi
  python=$(find_python)
  [ -n "$python" ] || { say 'no Python 3.9 or later is on PATH; use an image that has one'; exit 1; }
  proof=$("$python" - "$NONCE" <<'ATTEST'
{{ attest }}
ATTEST
  ) || exit 1
  answer=$(printf '%s' "$proof" | fetch -H 'Content-Type: application/json' --data-binary @- "$SERVER/agents/join/attest") || exit 1
  ticket=$(printf '%s' "$answer" | sed -n 's/.*"ticket": *"\(sw_[^"]*\)".*/\1/p')
  if [ -z "$ticket" ]; then
    why=$(printf '%s' "$answer" | sed -n 's/.*"error": *"\(.*\)".*/\1/p')
    say "${why:-$SERVER does not answer}"
    exit 1
  fi
  script=$(mktemp)
  trap 'rm -f "$script"' EXIT
  fetch -f -o "$script" "$SERVER/join" || exit 1
  sh "$script" --nonce "$NONCE" "$ticket" || exit 1
  rm -f "$NONCE"
}

main
{% endautoescape %}
