"""What a machine of EC2 runs at its first boot, without a secret: everybody on it, and many others, can read it. Pure.

It makes a cache of the instance's own disks, then fetches the script that proves who the machine is and joins it, and
runs that. The script comes from the control plane and not with the launch, so that the text stays the same from release
to release: EC2 compares it when a token comes again. A machine that never joins ends itself.
"""

import re
from dataclasses import dataclass
from shlex import quote

BYTES_MOST = 16 * 1024
"""EC2's limit, before base64."""
JOIN_PATH = "/join/aws"
TRIES_FOR_S = 3600
"""Then nobody has waited for it for long: the control plane ends what has not joined after a third of this."""


@dataclass(frozen=True, slots=True)
class Boot:
    """What a machine must know. `pin`: of the control plane's public keys, as curl takes it; "": its certificate is
    signed by an authority that the image knows. `install`, `unit`: as in the machine's tags."""

    server: str
    pin: str
    region: str
    install: str
    unit: str


_FORMS = {
    "server": re.compile(r"https://[A-Za-z0-9.:\[\]-]{1,260}"),
    "pin": re.compile(r"(sha256//[A-Za-z0-9+/]{43}=(;sha256//[A-Za-z0-9+/]{43}=){0,7})?"),
    "region": re.compile(r"[a-z]{2,4}(-[a-z]{2,12}){1,3}-[0-9]{1,2}"),
    "install": re.compile(r"sw-[0-9a-f]{12}"),
    "unit": re.compile(r"[a-z0-9-]{1,64}"),
}


def user_data(boot: Boot) -> str:
    """The shell script of a machine's first boot: cloud-init runs it once for each instance.

    Raises:
        ValueError: a value has another form than it may.
    """
    for name, form in _FORMS.items():
        if not form.fullmatch(getattr(boot, name)):
            raise ValueError(f"{name} {getattr(boot, name)!r} has not the form {form.pattern}")
    known = {
        "SERVER": boot.server,
        "PIN": boot.pin,
        "AWS_REGION": boot.region,
        "INSTALL": boot.install,
        "UNIT": boot.unit,
        "JOIN_PATH": JOIN_PATH,
        "TRIES_FOR_S": str(TRIES_FOR_S),
    }
    lines = "".join(f"{name}={quote(value)}\n" for name, value in known.items())
    about = f"# Joins this machine to the Switchyard at {boot.server}. There is no secret in it."
    return f"#!/bin/sh\n{about}\n{lines}{_SCRIPT}"


_SCRIPT = r"""
set -u
export SERVER PIN AWS_REGION INSTALL UNIT
export SWITCHYARD_CACHE=/var/cache/switchyard

say() { echo "switchyard: $*"; }

# One file system over all of the instance's own disks; on the root volume where it has none, or they are in use.
make_cache() {
  mkdir -p "$SWITCHYARD_CACHE"
  command -v lsblk >/dev/null && command -v mdadm >/dev/null && command -v mkfs.xfs >/dev/null || return 0
  disks=''
  for disk in $(lsblk -dnpo NAME,MODEL | awk '/Instance Storage/ { print $1 }'); do
    if [ "$(lsblk -no MOUNTPOINT,TYPE "$disk" | wc -w)" = 1 ]; then disks="$disks $disk"; fi
  done
  [ -n "$disks" ] || return 0
  # shellcheck disable=SC2086  # a list of words
  set -- $disks
  if mdadm --create /dev/md/switchyard --run --force --level=0 --raid-devices=$# "$@" &&
    mkfs.xfs -qf /dev/md/switchyard && mount -o noatime /dev/md/switchyard "$SWITCHYARD_CACHE"; then
    say "the cache lies on $# disks of the instance"
  else
    say "the disks of the instance cannot be used; the cache lies on the root volume"
  fi
}

fetch() {
  if [ -n "$PIN" ]; then set -- -k --pinnedpubkey "$PIN" "$@"; fi
  curl -fsS --noproxy '*' --proto '=https' --connect-timeout 10 --max-time 60 "$@"
}

join() {
  script=$(mktemp) || return 1
  fetch -o "$script" "$SERVER$JOIN_PATH" && sh "$script"
  joined=$?
  rm -f "$script"
  return $joined
}

# Many machines boot at once: each waits for another time, so that they do not all come back together.
pause_s() { awk -v seed="$1$$" 'BEGIN { srand(seed); print int(5 + rand() * 25) }'; }

make_cache
begun=$(date +%s)
until join; do
  now=$(date +%s)
  if [ $((now - begun)) -ge "$TRIES_FOR_S" ]; then
    say "this machine could not join $SERVER within $TRIES_FOR_S s, and ends"
    exec shutdown -h now
  fi
  say 'not joined yet; another try follows'
  sleep "$(pause_s "$now")"
done
say 'joined'
"""
