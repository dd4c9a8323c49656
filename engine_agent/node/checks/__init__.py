"""Deep checks of a node: does its memory keep what is written, do its devices compute right, do its disk and the links
to others carry what they are given. Each is bounded in time and load, says what it found and what would be right, and
changes nothing that stays. See README.md."""
