#!/bin/sh
# The command of a host in the laboratory: `shutdown [-h|-r] now`. Its PID 1 ends, and so does all that runs there; with
# -r the host boots again.
case " $* " in
  " now " | " -h now ") kill -USR2 1 ;;
  " -r now ") kill -USR1 1 ;;
  *) echo "usage: shutdown [-h|-r] now" >&2; exit 2 ;;
esac
