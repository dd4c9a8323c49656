#!/bin/sh
# The crontab of a host in the laboratory: `crontab -l`, `crontab -r`, `crontab -` or `crontab FILE`. Its @reboot lines
# are run when the host boots, the others never.
table=/var/spool/cron/table
case "${1:-}" in
  -l) cat "$table" 2>/dev/null || { echo "no crontab" >&2; exit 1; } ;;
  -r) rm -f "$table" ;;
  -*[!-]*) echo "usage: crontab -l | -r | - | FILE" >&2; exit 2 ;;
  *) mkdir -p "${table%/*}" && cat "${1:--}" >"$table.new" && mv "$table.new" "$table" ;;
esac
