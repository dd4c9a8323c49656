#!/bin/sh
# What cloud-init does with a script in an instance's user data: it runs it at the instance's first boot, and keeps what
# it says.
at=http://169.254.169.254/latest
ask() { curl -sf --noproxy '*' --max-time 5 "$@"; }
tries=0
until token=$(ask -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 300' "$at/api/token"); do
  tries=$((tries + 1))
  [ "$tries" -lt 240 ] || { echo 'cloud-init: there is no metadata service' >&2; exit 1; }
  sleep 0.5
done
get() { ask -H "X-aws-ec2-metadata-token: $token" "$at/$1"; }
instance=$(get meta-data/instance-id) || exit 1
state=/var/lib/cloud/instances/$instance
[ ! -e "$state/sem/config_scripts_user" ] || exit 0
mkdir -p "$state/sem" && get user-data >"$state/user-data.txt" || exit 0
: >"$state/sem/config_scripts_user"
[ "$(head -c 2 "$state/user-data.txt")" = '#!' ] || exit 0
chmod 700 "$state/user-data.txt"
exec "$state/user-data.txt" >>/var/log/cloud-init-output.log 2>&1
