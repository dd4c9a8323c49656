#!/bin/sh
# The command of a host in the laboratory: `shutdown [-h] now`. Its PID 1 ends, and so does all that runs there.
case " $* " in
  *" -r "* | *" -c "*) echo "usage: shutdown [-h] now" >&2; exit 2 ;;
  *" now "*) kill -USR2 1 ;;
  *) echo "usage: shutdown [-h] now" >&2; exit 2 ;;
esac
