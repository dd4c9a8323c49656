{% autoescape off %}#!/bin/sh
# Joins this host to the Switchyard at {{ server }}, or takes it out again:
#   sh -s -- TOKEN [--port FIRST_PORT] [--allow-reboot]
#   sh -s -- --uninstall
# Needs Linux, curl and Python 3.11 or later, else a glibc for which the control plane has a Python. As root it installs
# into /opt/switchyard and /var/lib/switchyard, else into ~/.local/share/switchyard; SWITCHYARD_PREFIX names another folder
# for both. It uses no package index. With --allow-reboot the fleet may reboot this host to repair it, by
# `shutdown -r now` or the command in SWITCHYARD_REBOOT_COMMAND.
set -eu

SERVER='{{ server }}'
PIN='{{ pin }}'
ARCHIVES='{% for archive in archives %}
{{ archive.tag }} {{ archive.digest }}{% endfor %}
'
PYTHONS='{% for python in pythons %}
{{ python.processor }} {{ python.least_glibc }} {{ python.digest }}{% endfor %}
'
TOKEN=''
STAGE=''
CARRIED=''

say() { printf 'switchyard: %s\n' "$*" >&2; }

fetch() {
  if [ -n "$PIN" ]; then set -- -k --pinnedpubkey "$PIN" "$@"; fi
  printf 'Authorization: Bearer %s\n' "$TOKEN" | curl -fsS --noproxy '*' --connect-timeout 10 --max-time 300 -H @- "$@"
}

fail() {
  say "$*"
  if [ -n "$TOKEN" ]; then
    reason=$(printf '%s' "$*" | tr -d '\\"' | tr '\n\t' '  ')
    fetch -o /dev/null --max-time 10 --data-binary "{\"reason\": \"$reason\"}" "$SERVER/agents/join/refused" 2>/dev/null || :
  fi
  exit 1
}

find_python() {
  for name in python3.14 python3.13 python3.12 python3.11 python3; do
    if command -v "$name" >/dev/null 2>&1 && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
}

# For a host with an older Python: that of the control plane, if its glibc is new enough for it.
carry_python() {
  have=$(python3 -V 2>&1) || have='no Python 3'
  lacks="the agent needs Python 3.11 or later, and this host has $have"
  machine=$(uname -m)
  known=$(printf '%s' "$PYTHONS" | while read -r processor glibc digest; do if [ "$processor" = "$machine" ]; then echo "$glibc $digest"; fi; done)
  [ -n "$known" ] || fail "$lacks: install one, such as the package python3.12, or run manage.py agent_archive python on the control plane"
  glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | sed 's/.* //')
  oldest=$(printf '%s\n%s\n' "${known% *}" "${glibc:-0}" | sort -V | head -n 1)
  [ "$oldest" = "${known% *}" ] ||
    fail "$lacks; that of the control plane needs glibc ${known% *}, and this host has ${glibc:-another C library}: install the package python3.11 or later"
  say "$lacks, so it gets one from the control plane"
  CARRIED=$CODE/python
  rm -rf "$CARRIED"
  mkdir -p "$CARRIED" || fail "cannot make the folder $CARRIED"
  fetch -o "$CARRIED/python.tgz" "$SERVER/agents/join/archive/python-$machine" 2>/dev/null || refused
  found=$(sha256sum "$CARRIED/python.tgz" | cut -d ' ' -f 1)
  [ "$found" = "${known#* }" ] || fail "the Python has SHA-256 $found instead of ${known#* }; nothing was installed, run the line again"
  (umask 022 && tar -xzf "$CARRIED/python.tgz" --no-same-owner -C "$CARRIED") || fail "the Python cannot be unpacked into $CARRIED"
  rm "$CARRIED/python.tgz"
  chmod 755 "$CODE" "$CARRIED"  # engines have own accounts
  python=$CARRIED/bin/python3
}

clean_up() {
  if [ -n "$STAGE$CARRIED" ]; then
    rm -rf ${STAGE:+"$STAGE"} ${CARRIED:+"$CARRIED"}
    rmdir "$CODE/releases" "$CODE" 2>/dev/null || :
  fi
}

main() {
  uninstall='' port='' nonce='' reboot=''
  while [ $# -gt 0 ]; do
    case "$1" in
      --uninstall) uninstall=yes ;;
      --port) port=${2:-}; shift ;;
      --nonce) nonce=${2:-}; shift ;;
      --allow-reboot) reboot=--allow-reboot ;;
      -*) fail "unknown option $1; there are --port FIRST_PORT, --allow-reboot and --uninstall" ;;
      *) TOKEN=$1 ;;
    esac
    shift
  done
  if [ -n "${SWITCHYARD_PREFIX:-}" ]; then CODE=$SWITCHYARD_PREFIX
  elif [ "$(id -u)" = 0 ]; then CODE=/opt/switchyard
  elif [ -n "${HOME:-}" ]; then CODE=$HOME/.local/share/switchyard
  else fail "there is no home folder; set HOME, or SWITCHYARD_PREFIX to a folder to install into"; fi
  if [ -n "$uninstall" ]; then
    [ -e "$CODE/current" ] || { say "nothing is installed in $CODE"; exit 0; }
    exec "$CODE/current/venv/bin/python" -m engine_agent leave --code "$CODE"
  fi
  [ -n "$TOKEN" ] || fail "give the token of the line that switchyard machine add printed"
  [ ! -e "$CODE/current" ] || fail "this host joined already, in $CODE; uninstall it first: sh -s -- --uninstall"
  [ "$(uname -s)" = Linux ] || fail "this is $(uname -s); only Linux hosts can join"
  python=$(find_python)
  trap clean_up EXIT
  trap 'exit 1' HUP INT TERM
  [ -n "$python" ] || carry_python
  tag=$("$python" -c 'import platform, sys; print("cp%d%d-%s" % (*sys.version_info[:2], platform.machine()))')
  digest=$(printf '%s' "$ARCHIVES" | while read -r name known; do if [ "$name" = "$tag" ]; then echo "$known"; fi; done)
  [ -n "$digest" ] || fail "the control plane has no agent for $tag; run manage.py agent_archive $tag there"
  "$python" -c 'import venv' 2>/dev/null || fail "$python has no module venv; install the package python3-venv"

  STAGE=$CODE/releases/$(printf '%.16s' "$digest")
  rm -rf "$STAGE"
  mkdir -p "$STAGE" || fail "cannot make the folder $STAGE"
  fetch -o "$STAGE/agent.tar.gz" "$SERVER/agents/join/archive/$tag" 2>/dev/null || refused
  found=$("$python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$STAGE/agent.tar.gz")
  [ "$found" = "$digest" ] || fail "the agent's archive has SHA-256 $found instead of $digest; nothing was installed, run the line again"
  "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$STAGE/agent.tar.gz" "$STAGE" ||
    fail "the agent cannot be unpacked into $STAGE"
  rm "$STAGE/agent.tar.gz"
  "$python" -m venv --without-pip "$STAGE/venv" || fail "$python cannot make an environment in $STAGE/venv"
  for packages in "$STAGE"/venv/lib/python*/site-packages; do
    printf '%s\n%s\n' "$STAGE/site" "$STAGE" >"$packages/switchyard.pth"
  done
  if printf '%s' "$TOKEN" | "$STAGE/venv/bin/python" -m engine_agent join --code "$CODE" --release "$STAGE" \
    --server "$SERVER" --pin "$PIN" --port "${port:-0}" --nonce "$nonce" $reboot; then
    STAGE='' CARRIED=''
  else
    exit 1
  fi
}

# What the control plane says of the token, where it refused the archive.
refused() {
  why=$(fetch --no-fail -d '{"port": 0, "nonce": "00000000000000000000000000000000"}' "$SERVER/agents/join/check" 2>&1 |
    sed -n 's/.*"error": *"\([^"]*\)".*/\1/p')
  say "${why:-the agent cannot be fetched from $SERVER}"
  exit 1
}

main "$@"
{% endautoescape %}
